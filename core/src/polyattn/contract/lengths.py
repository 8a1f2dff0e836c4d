"""What the arguments of a bound call say of its shape. Nothing here waits for a device."""

from __future__ import annotations

import functools
from collections.abc import Callable

from .families import FAMILY_SPECS, Extent, packed_batch
from .request import AttentionRequest

__all__ = ["Extent", "extent_of", "head_axis", "packed_batch"]


def head_axis(request: AttentionRequest) -> int:
    """Axis of H_q in the LSE of a call."""
    return FAMILY_SPECS[request.family].head_axis(request.layout)


def extent_of(request: AttentionRequest) -> Callable[..., Extent]:
    """What reads the extent of a call of a request's family from the arguments of `Bound.forward`."""
    return functools.partial(FAMILY_SPECS[request.family].extent, request.layout)
