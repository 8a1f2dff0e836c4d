"""Where the rows of a cache and their scales lie: the strides that kernels take (S9)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scales_of", "strides", "units"]


def strides(cache: Tensor, hnd: bool) -> tuple[int, int, int]:
    """Of pages, places and heads, of a cache or of its scales by token."""
    page, first, second = cache.stride()[:3]
    return (page, second, first) if hnd else (page, first, second)


def units(key: Tensor, value: Tensor, hnd: bool) -> tuple[int, tuple[int, int, int], tuple[int, int, int]]:
    """(unit, strides of keys, of values in units): of 16 bytes where all are such, else of numbers. Of 72, the stride
    of a head, a compiler knows no more than that it is no multiple of 16 (`arguments.units_of`), and loads numbers one
    by one."""
    unit = 16 // key.itemsize
    k, v = strides(key, hnd), strides(value, hnd)
    if any(step % unit for step in (*k, *v)):
        return 1, k, v
    return unit, tuple(step // unit for step in k), tuple(step // unit for step in v)  # type: ignore[return-value]


def scales_of(
    scale: Tensor | None, cache: Tensor, kv_scales: str, hnd: bool
) -> tuple[Tensor | None, tuple[int, int, int]]:
    """Scales as kernels load them, e4m3 as bytes, with their strides; ones for a side that has none."""
    if kv_scales in ("token", "block16"):
        if scale is None:
            ones = torch.ones(max(cache.shape[3] // 8, 1), device=cache.device)
            scale = ones[0].expand(cache.shape[:3]) if kv_scales == "token" else ones.expand(*cache.shape[:3], -1)
        return (scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale), strides(scale, hnd)
    if not kv_scales:
        return None, (0, 0, 0)
    if scale is None:
        scale = torch.ones(1, device=cache.device)
    return scale, (0, 0, scale.stride(-1) if kv_scales == "head" and scale.numel() > 1 else 0)
