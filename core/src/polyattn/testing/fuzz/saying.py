"""Right calls whose numbers and flags are said with other types: NumPy's, or ints for numbers and flags. What a call
takes is `polyattn.contract.scalars`' rule; that it takes the same from all of them is what the fuzzer asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["SAYINGS", "said_as"]

SAYINGS = ("numpy", "ints")


def said_as(saying: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with every number and flag in other types of the same value; tensors and words stay.

    Args:
        saying: "numpy", or "ints": 2 for 2.0 and 1 for True, and 3.0 for the bound 3 of a window.

    Raises:
        ImportError: "numpy" where there is no NumPy.
    """
    say = _numpys if saying == "numpy" else _ints
    return {name: say(name, value) for name, value in given.items()}


def _numpys(name: str, value: Any) -> Any:
    import numpy as np

    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return np.int64(value)
    if isinstance(value, float):
        # Of half the width where that holds the value.
        return np.float32(value) if float(np.float32(value)) == value else np.float64(value)
    if name == "window":
        return tuple(np.int16(bound) for bound in value)
    return value


def _ints(name: str, value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return tuple(float(bound) for bound in value) if name == "window" else value
