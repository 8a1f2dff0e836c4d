"""This module shows people why backends were not chosen: equal answers on one line, the long lists behind
`--verbose`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from .rendering import grid

__all__ = ["reasons_table"]

PLANNED = "planned: its adapter is not part of this version"


def reasons_table(rejected: Mapping[str, Sequence[str]], *, everything: bool = False) -> Table:
    """Make a table of backends and their reasons.

    Args:
        rejected: backend -> reasons. everything: every reason of every provider; else those that matter most: limits,
            then what is not installed (one way to install it), then planned ones and other families by name only.
    """
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    for name, reasons in rejected.items():
        rank, text = (0, "; ".join(reasons)) if everything else _gist(reasons)
        groups[rank, text].append(name)
    table = grid("not chosen", "because", ratios=(3, 7))
    for (_, text), names in sorted(groups.items(), key=lambda item: item[0][0]):
        table.add_row(Text(", ".join(names), style="name"), Text(text))
    return table


def _gist(reasons: Sequence[str]) -> tuple[int, str]:
    """Return (rank of the kind of refusal, what to say about it)."""
    kinds: dict[int, list[str]] = defaultdict(list)
    for reason in reasons:
        kinds[_kind(reason)].append(reason)
    rank = min(kinds)
    if rank == 1:
        others = len(kinds[1]) - 1
        ways = f" (or {others} other way{'s' if others > 1 else ''}: --verbose)" if others else ""
        return 1, _without_provider(kinds[1][0]) + ways
    if rank == 2:
        return 2, PLANNED
    if rank == 3:
        return 3, "it serves other families"
    return 0, "; ".join(dict.fromkeys(kinds[0]))


def _kind(reason: str) -> int:
    if " is not installed" in reason or " is installed" in reason:
        return 1
    if PLANNED in reason:
        return 2
    return 3 if "family='" in reason else 0


def _without_provider(reason: str) -> str:
    head, colon, rest = reason.partition(": ")
    return rest if colon and " " not in head else reason
