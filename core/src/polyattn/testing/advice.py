"""This module finds what conforms and will still surprise a user of the backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..contract import FAMILIES, AttentionRequest, Row, request_fields
from ..registry.manager import get_manager
from .calls import Installed
from .row_cases import holds_here
from .sources import UNPACK, packed
from .xfails import NAME

__all__ = ["advice"]

_ASKED = frozenset(
    (
        *("phase", "s_relation", "page_size", "v_head_dim"),
        *("method", "block_map", "block_sizes", "block_starts", "block_shape", "state_dtype", "state_layout"),
    )
)
"""Options that calls of a family always say something of: their off value is no call that anybody makes."""

_CACHED = ("paged", "mla")


def advice(target: Installed) -> list[str]:
    """A sentence for each."""
    return [*_in_an_archive(target), *_without_off_values(target)]


def _in_an_archive(target: Installed) -> Iterator[str]:
    origin = get_manager().owner(target.info).origin
    if origin and not Path(origin).is_file():
        text = f"{packed(origin)}: evidence and {NAME} beside it are neither read nor written"
        yield f"{text}, so that it is not chosen by itself on the strength of a run. {UNPACK}"


def _without_off_values(target: Installed) -> Iterator[str]:
    """Rows that list values of an option and leave out the one of a call that does not ask for it. Every listed value
    is tried and right, and plain calls are refused."""
    for family in FAMILIES:
        rows = [row for row in target.rows if holds_here(row, {**target.facts, "family": family})]
        for field in (field for field in request_fields() if field.kind == "option" and field.name not in _ASKED):
            off = getattr(AttentionRequest(), field.name)
            if not rows or any(_takes(row, field.name, off) for row in rows):
                continue
            who = ", those of `polyattn generate` among them" if family in _CACHED else ""
            yield (
                f"{field.name}: no row of family {family} takes {off!r}, which is what calls have that do not ask for "
                f"it{who}: they are refused or rewritten. If the kernel takes them, add {off!r} to what the row lists"
            )


def _takes(row: Row, name: str, value: object) -> bool:
    limits = (row.when.get(name), row.allows.get(name))
    return name in row.lowered or all(limit is None or limit.reason(value) is None for limit in limits)
