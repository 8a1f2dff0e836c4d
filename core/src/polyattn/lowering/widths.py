"""This module has what rewrites of head dims share: the widths that kernels are built for, and whether views keep rows
aligned."""

from __future__ import annotations

from ..contract import AttentionRequest

__all__ = ["odd_rows", "wider"]

_STEPS = (8, 16, 32, 64)
_USUAL = (64, 128, 256, 512)
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "fp4_e2m1": 9 / 16}


def wider(width: int) -> list[int]:
    """Widths above `width` that kernels are built for, narrowest first: the next multiples, and the usual ones."""
    found = {-(-width // step) * step for step in _STEPS} | {usual for usual in _USUAL if usual <= max(8 * width, 64)}
    return sorted(w for w in found if w > width)


def odd_rows(request: AttentionRequest) -> bool:
    """Return whether rows of Q, K or V are no multiple of 16 bytes.

    A contiguous tensor of such rows counts as aligned, a view that permutes or cuts it does not (`misaligned`).
    """
    return any(width * BYTES.get(request.dtype, 1) % 16 for width in request.dims)
