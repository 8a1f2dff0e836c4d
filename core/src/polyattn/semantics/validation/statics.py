"""Checks of the arguments that are no tensors."""

from __future__ import annotations

from typing import Any

from ...contract import scalars
from ...errors import InvalidInputError

LAYOUTS = ("BSHD", "BHSD")


def check_statics(
    *,
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    layout: Any,
    dropout_p: Any,
    chunk: Any = 0,
    layouts: tuple[str, ...] = LAYOUTS,
) -> tuple[int, int]:
    """Check the arguments that are no tensors but for flags; returns the window as a pair of ints."""
    by_name = isinstance(causal, str) and causal in ("top_left", "bottom_right")
    if not by_name and not scalars.is_flag(causal):
        raise InvalidInputError(
            f"causal={scalars.shown(causal)} must be True (bottom-right), False, 'top_left' or 'bottom_right'"
        )
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidInputError(
            f"window={scalars.shown(window)} must be a pair (left, right) of key counts, -1 = unlimited"
        )
    left, right = map(scalars.bound, window)
    if left is None or right is None:
        side = "left" if left is None else "right"
        raise InvalidInputError(
            f"window={scalars.shown(tuple(window))}: the {side} bound must be an integer >= 0, or -1 for "
            f"unlimited (a model's sliding window of W tokens is (W - 1, 0))"
        )
    if wrong := scalars.softcap(softcap):
        raise InvalidInputError(f"softcap={scalars.shown(softcap)} {wrong}")
    if scale is not None and (wrong := scalars.scale(scale)):
        raise InvalidInputError(f"scale={scalars.shown(scale)} {wrong}")
    if not isinstance(layout, str) or layout not in layouts:
        raise InvalidInputError(f"layout={scalars.shown(layout)} must be one of {', '.join(layouts)}")
    if not scalars.number(dropout_p) or not 0 <= dropout_p < 1:
        raise InvalidInputError(f"dropout_p={scalars.shown(dropout_p)} must be a probability, 0 <= p < 1")
    if not scalars.whole(chunk) or not 0 <= chunk <= scalars.ENDLESS:
        raise InvalidInputError(
            f"chunk={scalars.shown(chunk)} must be a number of keys, an int from 1 to {scalars.ENDLESS}; 0 is off"
        )
    return left, right


def check_longest(max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        scalars.length(name, longest)
