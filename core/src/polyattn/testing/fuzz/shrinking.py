"""Make a failing call smaller for as long as it fails: options off, sequences gone, lengths, heads and widths down."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..cases import Case
from .drawing import Drawn, settled

__all__ = ["shrink"]

_OFF: tuple[dict[str, Any], ...] = (
    {"dropout": 0.0},
    {"grad": ()},
    {"deterministic": False},
    {"mask": "none"},
    {"sinks": False},
    {"softcap": 0.0},
    {"window": (-1, -1)},
    {"causal": "none"},
    {"scale": None},
    {"save_kv_cache": None},
    {"save_kv_cache": False},
    {"kv_scales": ""},
    {"kv_dtype": "auto"},
    {"kv_scales": "", "kv_dtype": "auto"},
    {"kv_layout": "NHD"},
    {"lse": False},
    {"layout": "BSHD"},
    {"v_head_dim": 0},
)
"""Values of the request that say less."""

_PLAIN: tuple[dict[str, Any], ...] = (
    {"storage": "contiguous"},
    {"out": ""},
    {"sink": "usual"},
    {"logits": "usual"},
    {"mask_dtype": "same"},
    {"mask_shape": "one"},
    {"mask_shape": "full"},
    {"closed_rows": False},
)
"""Values of the case that say less."""


def shrink(drawn: Drawn, fails: Callable[[Drawn], bool], seconds: float = 10.0) -> Drawn:
    """The smallest call found that still fails.

    Greedy: a smaller call that fails takes the place of the one before, until none does or time is up.

    Args:
        drawn: a call that fails. fails: whether another one fails in the same way. seconds: bound on the time.
    """
    end = time.monotonic() + seconds
    plain = dataclasses.replace(drawn, saying="")
    found = plain if drawn.saying and fails(plain) else drawn
    tried = {found.id}

    def smaller(ways: Callable[[Case], Iterator[Case]]) -> Drawn | None:
        for case in ways(found.case):
            candidate = dataclasses.replace(found, case=settled(case))
            if time.monotonic() > end:
                return None
            if candidate.id not in tried:
                tried.add(candidate.id)
                if fails(candidate):
                    return candidate
        return None

    before = None
    while found is not before:
        before = found
        for ways in _WAYS:
            while (less := smaller(ways)) is not None:
                found = less
    return found


# Ways to make a case smaller, what loses most first. What they yield does not have to be consistent.


def _sequences(case: Case) -> Iterator[Case]:
    lengths = case.lengths
    if len(lengths) > 1:
        yield dataclasses.replace(case, lengths=lengths[:1])
        for n in range(len(lengths)):
            yield dataclasses.replace(case, lengths=lengths[:n] + lengths[n + 1 :])


def _options(case: Case) -> Iterator[Case]:
    for changes in _OFF:
        if case.request.family != "mla" or "scale" not in changes:
            yield _asking(case, **changes)
    for changes in _PLAIN:
        if any(getattr(case, name) != value for name, value in changes.items()):
            yield dataclasses.replace(case, **changes)


def _gradients(case: Case) -> Iterator[Case]:
    grad = case.request.grad
    if len(grad) > 1:
        yield from (_asking(case, grad=(name,)) for name in grad)
        yield from (_asking(case, grad=tuple(other for other in grad if other != name)) for name in grad)


def _lengths(case: Case) -> Iterator[Case]:
    lengths, dense = case.lengths, case.request.family == "dense"
    for n, (s_q, s_k) in enumerate(lengths[:1] if dense else lengths):
        shorter = [(n, n) for n in _towards(s_q, 1)] if s_q == s_k else []
        shorter += [*((q, s_k) for q in _towards(s_q, 0)), *((s_q, k) for k in _towards(s_k, 0))]
        for pair in shorter:
            several = (pair,) * len(lengths) if dense else (*lengths[:n], pair, *lengths[n + 1 :])
            yield dataclasses.replace(case, lengths=several)


def _sizes(case: Case) -> Iterator[Case]:
    request = case.request
    if request.dtype != "float32":
        yield _asking(case, dtype="float32")
    for heads, kv_heads in ((1, 1), (2, 1), (request.kv_heads, request.kv_heads), (request.group, 1)):
        if heads < request.heads:
            yield _asking(case, heads=heads, kv_heads=kv_heads)
    for name in ("head_dim", "v_head_dim", "page_size"):
        yield from (_asking(case, **{name: size}) for size in _towards(getattr(request, name), 1))
    left, right = request.window
    yield from (_asking(case, window=(bound, right)) for bound in (-1, *_towards(left, 0)))
    yield from (_asking(case, window=(left, bound)) for bound in (-1, *_towards(right, 0)))


_WAYS = (_sequences, _options, _gradients, _lengths, _sizes)


def _asking(case: Case, **changes: Any) -> Case:
    if changes.get("v_head_dim") == 0:
        changes["v_head_dim"] = case.request.head_dim
    if "head_dim" in changes and case.request.same_dims:
        changes["v_head_dim"] = changes["head_dim"]
    return dataclasses.replace(case, request=dataclasses.replace(case.request, **changes))


def _towards(value: int, least: int) -> Iterator[int]:
    """Numbers below `value`, the smallest first."""
    if value > least:
        yield from dict.fromkeys(
            n for n in (least, least + 1, value // 2, value - value // 4, value - 1) if least <= n < value
        )
