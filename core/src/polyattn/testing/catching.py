"""The kit tried on itself: does it notice each bug of `polyattn.testing.planted`?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .calls import Installed
from .checks import run_case
from .planted import BUGS, NO_BUG, planted
from .running import Progress, plan

__all__ = ["NOTHING", "Catch", "blanks", "catch", "catches"]

NOTHING = "nothing"

DTYPE = "float32"
"""The gates are the same in every dtype; in this one a bug has least rounding to hide behind."""


@dataclasses.dataclass(frozen=True)
class Catch:
    """Describes what the kit makes of one bug in one family.

    Attributes:
        bug, what: its name, and the mistake in one sentence. family: it was looked for in.
        caught_by: the checks of the first case that noticed, `nothing` where none did. case: its id.
    """

    bug: str
    what: str
    family: str
    caught_by: str = NOTHING
    case: str = ""

    @property
    def good(self) -> bool:
        """A bug was caught; where there is none, nothing was."""
        return (self.caught_by == NOTHING) == (self.bug == NO_BUG)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "good": self.good}


def blanks() -> list[Catch]:
    """Return each planted bug in each family where it shows, and the backend without a bug in all of them."""
    every = tuple(dict.fromkeys(family for bug in BUGS.values() for family in bug.families))
    wanted = [(NO_BUG, "nothing is wrong: nothing may be found", every)]
    wanted += [(bug.name, bug.what, bug.families) for bug in BUGS.values()]
    return [Catch(name, what, family) for name, what, families in wanted for family in families]


def catches(progress: Progress | None = None) -> Iterator[Catch]:
    """`catch` of all `blanks`.

    Args:
        progress: told before each.
    """
    wanted = blanks()
    for number, blank in enumerate(wanted):
        if progress is not None:
            progress(number, len(wanted), f"{blank.bug}, {blank.family}")
        yield catch(blank)


def catch(blank: Catch) -> Catch:
    """Run the kit's quick cases of a family on a backend with this bug, until one notices."""
    with planted(blank.bug) as backend:
        target = Installed(backend, "cpu")
        # The plainest first: it is the one to show. What shows in several tiles only is not looked for in one.
        tile = BUGS[blank.bug].tile if blank.bug in BUGS else 0
        cases = plan(target, dtypes=[DTYPE], families=[blank.family])
        for case in sorted(cases, key=lambda case: (case.longest[1] <= tile, len(case.id))):
            findings = run_case(target, case).findings
            if findings:
                checks = ", ".join(dict.fromkeys(finding.check for finding in findings))
                return dataclasses.replace(blank, caught_by=checks, case=case.id)
    return blank
