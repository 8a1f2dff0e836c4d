"""Differential fuzzing: random calls, fine and wrong ones, given to every backend and compared with the reference.

A fine call must agree with the float64 reference by the gates of the kit, or be refused with a reason; a wrong call
must be refused with a typed error, by every backend and by automatic selection. What fails is made smaller and written
as a script (docs/fuzzing.md). From a shell: `polyattn fuzz --seconds 60`.
"""

from .drawing import Drawn, draw
from .judging import Calls, Failure, Verdict, judge
from .running import AUTOMATIC, Found, Report, fuzz
from .scripts import exit_code, script
from .shrinking import shrink

__all__ = [
    "AUTOMATIC",
    "Calls",
    "Drawn",
    "Failure",
    "Found",
    "Report",
    "Verdict",
    "draw",
    "exit_code",
    "fuzz",
    "judge",
    "script",
    "shrink",
]
