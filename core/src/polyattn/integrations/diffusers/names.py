"""This module adds members to diffusers' enum of attention backends, which is closed, and takes them out again.

Python has no public way to add a member. Three tables of the enum are changed, and what came out is looked at.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from ...errors import BackendUnavailableError

__all__ = ["add_members", "drop_members"]


def add_members(kind: type[enum.Enum], values: Iterable[str]) -> dict[str, enum.Enum]:
    """Add a member for each value; its name is its value.

    Args:
        kind: `AttentionBackendName`, an enum of strings.

    Returns:
        Value -> member. A value that is there already keeps its member.

    Raises:
        BackendUnavailableError: this Python keeps the members of an enum elsewhere.
    """
    found = {}
    for value in values:
        member = kind._value2member_map_.get(value)
        if member is None:
            member = str.__new__(kind, value)  # type: ignore[type-var]
            member._name_, member._value_ = value, value
            kind._member_map_[value] = kind._value2member_map_[value] = member
            kind._member_names_.append(value)
        found[value] = member
    if strange := [value for value, member in found.items() if kind(value) is not member or member not in list(kind)]:
        drop_members(kind, found)
        raise BackendUnavailableError(
            f"{kind.__name__} of the installed diffusers takes no new member ({strange[0]!r} was tried); install a "
            "version of diffusers that this version of polyattn is tested with (docs/diffusers.md)"
        )
    return found


def drop_members(kind: type[enum.Enum], values: Iterable[str]) -> None:
    """Take members out again; values that are none are skipped."""
    for value in values:
        kind._member_map_.pop(value, None)
        kind._value2member_map_.pop(value, None)
        if value in kind._member_names_:
            kind._member_names_.remove(value)
