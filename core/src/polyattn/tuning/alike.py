"""Requests that differ from a measured one in numbers only: a model on more GPUs, another page size, the other half
precision. The same kernels serve them, with more or less of the same work, so one measurement says who is fast for all.

What changes the kernel (head dims, causal, sinks, a softcap, a quantised cache, gradients, the layout) tells requests
apart. Whether a backend takes the other request in the same way, or has to rewrite it, is for selection to see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .rows import canonical

__all__ = ["Numbers", "apart", "numbers_of", "scaled"]

_NEAR = 2.0
"""Factors of two: pages of 16 and of 64 tokens, windows of 1024 and 4096. Farther ones say nothing."""
_NEAR_GROUPS = 1.0
"""Of query heads to a key head. On an H200 the fastest for 128 heads of latents was the slowest for 16."""
_HALVES = ("bfloat16", "float16")
_IDLE = {"lse": False, "large": False, "multimodal": False, "save_kv_cache": None}
"""Fields that decide whether a backend takes a request, and hardly how fast it is."""


class Numbers(NamedTuple):
    """What of a request's key may differ. `idle`: of `_IDLE`, those that it has."""

    dtype: str
    heads: int
    kv_heads: int
    page_size: int
    window: tuple[int, int]
    idle: tuple[tuple[str, Any], ...]

    def fields(self) -> dict[str, Any]:
        """As fields of a request."""
        return {**{name: value for name, value in self._asdict().items() if name != "idle"}, **_IDLE, **dict(self.idle)}


def numbers_of(key: Mapping[str, Any]) -> tuple[str, Numbers] | None:
    """(what tells kernels apart, as text; the rest) of a `request_key`; None where that is none."""
    dtype, heads, kv_heads = key.get("dtype", "bfloat16"), key.get("heads", 1), key.get("kv_heads", 1)
    page_size, window = key.get("page_size", 0), key.get("window", (-1, -1))
    whole = all(type(number) is int for number in (heads, kv_heads, page_size))
    if not whole or min(heads, kv_heads) < 1 or page_size < 0 or not isinstance(window, (tuple, list)):
        return None
    if len(window) != 2 or any(type(side) is not int for side in window):
        return None
    named = {"dtype", "heads", "kv_heads", "page_size", "window", *_IDLE}
    kept = {name: value for name, value in key.items() if name not in named}
    kind = canonical({**kept, "dtype": "half" if dtype in _HALVES else dtype, "bounds": [side >= 0 for side in window]})
    idle = tuple((name, key[name]) for name in _IDLE if name in key)
    return kind, Numbers(dtype, heads, kv_heads, page_size, (window[0], window[1]), idle)


def apart(a: Numbers, b: Numbers) -> float | None:
    """How far two of one kind are from each other, in factors of two; None where it is too far."""
    groups = _octaves(a.heads * b.kv_heads, b.heads * a.kv_heads)
    others = [_octaves(a.page_size, b.page_size), *map(_octaves, a.window, b.window)]
    return None if groups > _NEAR_GROUPS or max(others) > _NEAR else groups + sum(others)


def scaled(batch: int, measured: Numbers, asked: Numbers) -> int:
    """The batch with which `asked` has as many key heads to work on as `measured` with `batch`."""
    return max(round(batch * measured.kv_heads / asked.kv_heads), 1)


def _octaves(a: int, b: int) -> float:
    """Between two sizes; what is off or unlimited in both is no difference, in one of them more than any."""
    if a == b:
        return 0.0
    return abs(math.log2(a / b)) if min(a, b) > 0 else math.inf
