"""Steps and layers that a sparse method leaves dense: the first ones, by number or by share."""

from __future__ import annotations

import math

from ...contract import Place
from ...errors import InvalidInputError
from .grids import AGAIN

__all__ = ["first_ones", "first_shares", "known"]


def first_ones(place: Place, method: str, *, steps: int, layers: int) -> str:
    """Say why a call runs dense: its place is among the first steps or layers. "" = it is not.

    Args:
        place: of the call. method: its name, for messages. steps, layers: how many of the first ones run dense.

    Raises:
        InvalidInputError: the place does not say the step or the layer that is needed.
    """
    for count, name in ((steps, "step"), (layers, "layer")):
        if count and known(place, name, f"{method}: first_full_{name}={count}") < count:
            return f"the first {count} {name}s run dense (first_full_{name})"
    return ""


def first_shares(place: Place, method: str, *, steps: tuple[str, float], layers: tuple[str, float]) -> str:
    """Say the same of shares: of n steps those run dense whose number is below share * n.

    Args:
        steps, layers: (name of the option, share from 0 to 1).
    """
    for (option, share), name in ((steps, "step"), (layers, "layer")):
        if not share:
            continue
        number, total = (known(place, part, f"{method}: {option}={share:g}") for part in (name, f"{name}s"))
        if number < share * total:
            return f"the first {math.ceil(share * total)} of {total} {name}s run dense ({option})"
    return ""


def known(place: Place, name: str, why: str) -> int:
    """Return `step`, `steps`, `layer` or `layers` of a place. A layer that is a tensor is read.

    Args:
        why: who needs it, the beginning of a message.

    Raises:
        InvalidInputError: the place does not say it.
    """
    number: int | None = place.layer_number if name == "layer" else getattr(place, name)
    if number is None:
        raise InvalidInputError(f"{why} needs to know the {name}, and the place has none: Place({name}=...){AGAIN}")
    return number
