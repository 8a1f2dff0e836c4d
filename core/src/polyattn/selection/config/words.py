"""Words that the messages of this package share."""

from __future__ import annotations

import reprlib
from typing import Any

__all__ = ["FORMS", "show"]

FORMS = "a path ending in .json, .yaml, .yml or .toml, a JSON object '{...}', or key=value pairs separated by commas"

# Bounded in depth and width: YAML aliases can make a value whose full repr would not end.
_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxlist, _repr.maxdict = 3, 10, 10
_repr.maxstring = _repr.maxlong = _repr.maxother = 80


def show(value: Any) -> str:
    """`value` as messages print it: its repr, shortened."""
    text = _repr.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
