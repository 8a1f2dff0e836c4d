"""Requests that differ from a measured one in numbers only: a model on more GPUs, another head dim or page size, the
other half precision, the same tensors in the other layout. Kernels of one design serve them, with more or less of the
same work, so one measurement says who is fast for all.

What changes the design (causal, sinks, a softcap, a quantised cache, gradients, values of another width than keys)
tells requests apart. Whether a backend takes the other request in the same way, or has to rewrite it, is for selection
to see. `benchmarks/shipped_tables.py` says how good choices by this are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from ..contract import AttentionRequest
from ..errors import ConfigError
from .keys import request_of
from .rows import canonical

__all__ = ["Numbers", "distance", "numbers_of", "octaves", "scaled", "within"]

_NEAR = 4
"""Pages of 16 and of 64 tokens, windows of 1024 and of 4096. Farther ones say nothing."""
_NEAR_GROUPS = 2
"""Of query heads to a key head. On an H200 the fastest for 128 heads of latents was the slowest for 16."""
_NEAR_DIMS = 2
_OTHER_LAYOUT = 1.0
"""As far as twice the heads. On an H200 prompts in both layouts take times within 3% of each other, but for backends
that copy one of them: those have another rewrite, so that selection passes them over."""
_LAYOUTS = ("BSHD", "BHSD")
_HALVES = ("bfloat16", "float16")
_SIZES = ("dtype", "heads", "kv_heads", "head_dim", "v_head_dim", "layout", "page_size", "window")
_IDLE = ("lse", "large", "multimodal", "save_kv_cache")
"""Fields that decide whether a backend takes a request, and hardly how fast it is."""


class Numbers(NamedTuple):
    """Describes what may differ between requests that are alike. `fields`: all of it, as fields of a request."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: tuple[int, int]
    layout: str
    fields: Mapping[str, Any]


def numbers_of(key: Mapping[str, Any]) -> tuple[str, Numbers] | None:
    """(what tells kernels apart, as text; the rest) of a `request_key`; None where no request has it."""
    try:
        request = request_of(key)
    except ConfigError:
        return None
    if request.heads % request.kv_heads:
        return None
    kept = {name: value for name, value in key.items() if name not in (*_SIZES, *_IDLE)}
    same = {
        "dtype": "half" if request.dtype in _HALVES else request.dtype,
        "layout": "dense" if request.layout in _LAYOUTS else request.layout,
        "widths": [] if request.same_dims else [request.head_dim, request.v_head_dim],
        "bounds": [side >= 0 for side in request.window],
    }
    return canonical({**kept, **same}), _numbers(request)


def _numbers(request: AttentionRequest) -> Numbers:
    fields = {name: getattr(request, name) for name in (*_SIZES, *_IDLE)}
    head_dim, page_size, window = request.head_dim, request.page_size, request.window
    return Numbers(request.heads, request.kv_heads, head_dim, page_size, window, request.layout, fields)


def distance(a: Numbers, b: Numbers) -> float | None:
    """How far two of one kind are from each other, in factors of two; None where it is too far."""
    groups = a.heads * b.kv_heads, b.heads * a.kv_heads
    # A window of 1023 keys to the left sees 1024; -1 is no window.
    others = [(a.page_size, b.page_size), *((x + 1, y + 1) for x, y in zip(a.window, b.window, strict=True))]
    dims = a.head_dim, b.head_dim
    if not (within(*groups, _NEAR_GROUPS) and within(*dims, _NEAR_DIMS) and all(within(*x, _NEAR) for x in others)):
        return None
    layouts = 0.0 if a.layout == b.layout else _OTHER_LAYOUT
    return layouts + octaves(*groups) + octaves(*dims) + sum(octaves(*sizes) for sizes in others)


def scaled(batch: int, measured: Numbers, asked: Numbers) -> Fraction:
    """The batch with which `asked` has as many key heads to work on as `measured` with `batch`; below 1 where one
    sequence of it has more."""
    return Fraction(batch * measured.kv_heads, asked.kv_heads)


def within(a: Fraction | int, b: Fraction | int, factor: int) -> bool:
    """Return whether neither size is more than so many times the other. Both may be 0: off, or unlimited."""
    return a == b or 0 < max(a, b) <= factor * min(a, b)


def octaves(a: Fraction | int, b: Fraction | int) -> float:
    """Factors of two between two sizes; 0 of both is no difference."""
    return 0.0 if a == b else abs(_log2(a) - _log2(b))


def _log2(size: Fraction | int) -> float:
    """Return log2 of an int of any size: whole numbers in a file may be larger than a float."""
    return math.log2(size.numerator) - math.log2(size.denominator)
