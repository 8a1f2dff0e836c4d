"""The conformance kit: is a backend what it says it is?

Cases come from the capability rows a backend declares, so there is nothing to write per backend: what is declared must
pass (docs/conformance.md says what), what is not must be refused with a reason.

    >>> from polyattn.testing import run
    >>> print(run("torch_sdpa", device="cpu", families=["dense"], dtypes=["float32"]))  # doctest: +SKIP

From a shell: `python -m polyattn.testing torch_sdpa --device cpu`.
"""

from .calls import Installed, OffChip, Target
from .cases import Case
from .checks import Outcome, run_case
from .controls import Control, controls
from .generate import generate, refusals
from .report import Report
from .running import plan, record, run
from .tolerances import RELATIVE_L2, Finding, check

__all__ = [
    "RELATIVE_L2",
    "Case",
    "Control",
    "Finding",
    "Installed",
    "OffChip",
    "Outcome",
    "Report",
    "Target",
    "check",
    "controls",
    "generate",
    "plan",
    "record",
    "refusals",
    "run",
    "run_case",
]
