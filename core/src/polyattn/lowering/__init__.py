"""Exact rewrites between a request and a kernel: what a kernel lacks is often one away.

A `Lowering` turns a request into others that a kernel may take, and the kernel's functions into ones that serve the
request. They chain: `plan` finds the cheapest chain, `bind` builds it. Each is one file of this folder; `LOWERINGS`
names them, and a file is imported when a chain is first looked for. Planning needs no torch.
"""

from .base import KEPT, Lowering, Rewrite
from .binding import bind
from .catalogue import LOWERINGS, get_lowering, lowerings
from .planning import MAX_STEPS, Plan, Planner, in_reach, refused_fields
from .ways import Stop, Ways

__all__ = [
    "KEPT",
    "LOWERINGS",
    "MAX_STEPS",
    "Lowering",
    "Plan",
    "Planner",
    "Rewrite",
    "Stop",
    "Ways",
    "bind",
    "get_lowering",
    "in_reach",
    "lowerings",
    "refused_fields",
]
