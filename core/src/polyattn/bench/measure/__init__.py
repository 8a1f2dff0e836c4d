"""How fast a request is served, and by whom best: inputs, a check before any clock, and times that can be compared.

The tuner (`polyattn tune`) and the benchmark (`polyattn bench`) measure with it. Names are resolved at first use:
importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy as _lazy

_WHERE = {
    "Anchors": "device_rates",
    "Call": "entrants",
    "Candidate": "entrants",
    "Clock": "clock",
    "Entrant": "entrants",
    "Inputs": "inputs",
    "Measured": "running",
    "Time": "clock",
    "Verdict": "checking",
    "Workload": "workload",
    "candidates": "entrants",
    "check": "checking",
    "examine": "running",
    "interleaved": "clock",
    "make_inputs": "inputs",
    "measure": "running",
    "peak_memory": "running",
}

__all__ = list(_WHERE)

if TYPE_CHECKING:
    from .checking import Verdict as Verdict
    from .checking import check as check
    from .clock import Clock as Clock
    from .clock import Time as Time
    from .clock import interleaved as interleaved
    from .device_rates import Anchors as Anchors
    from .entrants import Call as Call
    from .entrants import Candidate as Candidate
    from .entrants import Entrant as Entrant
    from .entrants import candidates as candidates
    from .inputs import Inputs as Inputs
    from .inputs import make_inputs as make_inputs
    from .running import Measured as Measured
    from .running import examine as examine
    from .running import measure as measure
    from .running import peak_memory as peak_memory
    from .workload import Workload as Workload


if not TYPE_CHECKING:  # a checker would take every name for one that is here
    __getattr__, __dir__ = _lazy(__name__, _WHERE)
