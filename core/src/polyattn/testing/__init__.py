"""The conformance kit: is a backend what it says it is?

Cases come from the capability rows a backend declares, so there is nothing to write per backend: what is declared must
pass (docs/conformance.md says what), what is not must be refused with a reason.

    >>> from polyattn.testing import run
    >>> print(run("torch_sdpa", device="cpu", families=["dense"], dtypes=["float32"]))  # doctest: +SKIP

From a shell: `polyattn conform torch_sdpa`. In a plugin's own tests, with pytest:

    >>> from polyattn.testing import AttentionConformance
    >>> class TestAcme(AttentionConformance):
    ...     backend = "acme"

Importing this package imports neither torch nor pytest; names are resolved at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy as _lazy

_WHERE = {
    "Asked": "declaring",
    "AttentionConformance": "conforming",
    "AttentionRecords": "declaring",
    "Case": "cases",
    "Control": "negative",
    "FAMILIES": "families",
    "Family": "families",
    "Finding": "tolerances",
    "Installed": "calls",
    "METHODS": "families",
    "OffChip": "calls",
    "Outcome": "checks",
    "PlacedCalls": "families",
    "RELATIVE_L2": "tolerances",
    "Report": "report",
    "Target": "calls",
    "check": "tolerances",
    "controls": "negative",
    "generate": "generation",
    "plan": "running",
    "record": "recording",
    "refusals": "beyond",
    "run": "running",
    "run_case": "checks",
}

__all__ = [*sorted(_WHERE)]

if TYPE_CHECKING:
    from .beyond import refusals as refusals
    from .calls import Installed as Installed
    from .calls import OffChip as OffChip
    from .calls import Target as Target
    from .cases import Case as Case
    from .checks import Outcome as Outcome
    from .checks import run_case as run_case
    from .conforming import AttentionConformance as AttentionConformance
    from .declaring import Asked as Asked
    from .declaring import AttentionRecords as AttentionRecords
    from .families import FAMILIES as FAMILIES
    from .families import METHODS as METHODS
    from .families import Family as Family
    from .families import PlacedCalls as PlacedCalls
    from .generation import generate as generate
    from .negative import Control as Control
    from .negative import controls as controls
    from .recording import record as record
    from .report import Report as Report
    from .running import plan as plan
    from .running import run as run
    from .tolerances import RELATIVE_L2 as RELATIVE_L2
    from .tolerances import Finding as Finding
    from .tolerances import check as check


if not TYPE_CHECKING:  # a checker would take every name for one that is here
    __getattr__, __dir__ = _lazy(__name__, _WHERE)
