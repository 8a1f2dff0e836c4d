"""Arguments that are no tensors: what is taken for a flag, a count, a window's bound or a number. Imports no torch.

A flag is no number and a number no flag: `softcap=True` is a mistake. Whoever keeps a table of calls by such arguments
keeps their types in its keys, since 1, 1.0 and True are one key of a dict (`kinds`).
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from ..errors import InvalidInputError

__all__ = ["ENDLESS", "LARGEST", "bound", "flag", "is_flag", "kinds", "length", "number", "shown", "softcap", "whole"]

LARGEST = 1e30
"""Most that a softcap or a scale may be, and 1 over it the least a softcap. Logits are fp32: kernels divide by the cap
or multiply by its inverse, and beyond this either leaves the numbers that fp32 holds to full precision, or at all."""

_INFINITE: Any = float("inf")

ENDLESS = 2**30
"""A bound of a window from here on is none: no sequence is as long, and int32 has room for positions beyond it."""


def is_flag(value: Any) -> bool:
    """Whether a value says True or False: a bool, NumPy's too, or the ints 1 and 0."""
    if value is True or value is False:
        return True
    return _is_numpys_bool(value) or (isinstance(value, Integral) and value in (0, 1))


def flag(name: str, value: Any) -> bool:
    """A flag as a bool.

    Raises:
        InvalidInputError: it is none. A tensor is none: its value may have to be waited for.
    """
    if value is True or value is False:
        return value
    if not is_flag(value):
        raise InvalidInputError(f"{name}={shown(value)} is a {type(value).__name__}; it must be True or False")
    return bool(value)


def whole(value: Any) -> bool:
    """Whether a value is a whole number. NumPy's are; bools are flags."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def length(name: str, value: Any) -> int:
    """A length, counted by the host, as an int.

    Raises:
        InvalidInputError: no whole number of at least 0.
    """
    if not whole(value) or value < 0:
        raise InvalidInputError(f"{name}={shown(value)} must be a Python int >= 0 (a tensor would cost a device sync)")
    return int(value)


def number(value: Any) -> bool:
    """Whether a value is a real number that is finite. NumPy's are; bools are flags."""
    # NaN is not below infinity either; an int may be too large to be a float.
    return isinstance(value, Real) and not isinstance(value, bool) and bool(-_INFINITE < value < _INFINITE)


def softcap(value: Any) -> str:
    """What is wrong with a softcap; nothing: an empty string."""
    if not number(value) or value < 0:
        return "must be a finite number >= 0; 0 is off"
    value = _pythons(value)
    if value and not 1 / LARGEST <= value <= LARGEST:
        return f"must be 0, which is off, or from {1 / LARGEST:g} to {LARGEST:g}: logits are float32"
    return ""


def scale(value: Any) -> str:
    """What is wrong with a scale of the logits that is not None; nothing: an empty string."""
    if not number(value):
        return "must be a finite number, or None for D_qk ** -0.5"
    return "" if abs(_pythons(value)) <= LARGEST else f"must be within {-LARGEST:g} and {LARGEST:g}: logits are float32"


def bound(value: Any) -> int | None:
    """A bound of a window as an int, -1 where it is none; None: the value is no bound.

    3.0 is 3: configurations hold such numbers.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or value != value // 1 or value < -1:
        return None
    number = _pythons(value)
    return int(number) if number < ENDLESS else -1


def kinds(values: Iterable[Any]) -> tuple[Any, ...]:
    """The types of values, those in tuples too: what a key lacks in which 1, 1.0 and True are one."""
    return tuple([kinds(value) if type(value) is tuple else type(value) for value in values])


def shown(value: Any) -> str:
    """A value in a message: one line, not endless."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int of more digits than Python prints
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _pythons(value: Any) -> Any:
    """The number as Python's int or float: NumPy would take a bound for one of its own, narrow kind."""
    return int(value) if isinstance(value, Integral) else float(value)


def _is_numpys_bool(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
