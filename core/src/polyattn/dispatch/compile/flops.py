"""How many floating-point operations the custom ops are, for `torch.utils.flop_counter.FlopCounterMode`.

Counted as torch counts its own attention: two matrix products forward, five backward (one of them again), without a
discount for what masks hide.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...semantics.validation import has_shapes_only
from . import custom_ops as _ops  # noqa: F401 - there must be ops to have formulas for

__all__: list[str] = []

_Counts = tuple[int, int]
"""Of a call and of its gradient."""


def _products(lengths: Iterable[tuple[int, int]], heads: int, d: int, d_v: int) -> _Counts:
    pairs = heads * sum(s_q * s_k for s_q, s_k in lengths)
    return 2 * pairs * (d + d_v), 2 * pairs * (3 * d + 2 * d_v)


def _dense(query: Tensor, key: Tensor, value: Tensor, plan: str, **_: Any) -> _Counts:
    s, h = (1, 2) if json.loads(plan)["request"].get("layout", "BSHD") == "BSHD" else (2, 1)
    lengths = [(query.shape[s], key.shape[s])] * query.shape[0]
    return _products(lengths, query.shape[h], query.shape[3], value.shape[3])


def _packed(query: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **given: Any) -> _Counts:
    lengths: Iterable[tuple[int, int]]
    if has_shapes_only(cu_seqlens_q) or has_shapes_only(cu_seqlens_k):
        lengths = [(given["max_seqlen_q"], given["max_seqlen_k"])] * (cu_seqlens_q.shape[0] - 1)
    else:
        lengths = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)
    return _products(lengths, query.shape[1], query.shape[2], value.shape[2])


def _cached(
    query: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, kv_parts: Any, out_val: Any, **given: Any
) -> _Counts:
    """The keys of a call, and those of its parts."""
    tables = [(cu_seqlens_q, seq_lens), *zip(kv_parts[2::6], kv_parts[1::6], strict=True)]
    if has_shapes_only(seq_lens):
        pairs = [(given["max_seqlen_q"], given["max_seqlen_k"])] * seq_lens.shape[0]
    else:
        pairs = [pair for starts, lens in tables for pair in zip(starts.diff().tolist(), lens.tolist(), strict=True)]
    return _products(pairs, query.shape[1], query.shape[2], out_val[0].shape[-1])


def _blocks(query: Tensor, value: Tensor, block_counts: Tensor, block_indices: Tensor, plan: str, **_: Any) -> _Counts:
    """The listed blocks, whole ones; all that lists have room for, where they cannot be read."""
    block_q, block_k = json.loads(plan)["request"]["block_shape"]
    shared = query.shape[0] * query.shape[1] // (block_counts.shape[0] * block_counts.shape[1])
    room = block_counts.numel() * block_indices.shape[-1]
    listed = room if has_shapes_only(block_counts) else int(block_counts.sum())
    return _products([(block_q, block_k * listed * shared)], 1, query.shape[3], value.shape[3])


def _recurrence(query: Tensor, value: Tensor, **_: Any) -> _Counts:
    """Of each token and value head: what the state says of its key, its update, and what it says of the query."""
    forward = 6 * value.numel() * query.shape[3]
    return forward, 2 * forward


def _counted(names: list[str], counts: Callable[..., _Counts], which: int, *args: Any, **keywords: Any) -> int:
    return counts(**dict(zip(names, args, strict=False)), **keywords)[which]


_FORMULAS: dict[str, Any] = {"dense": _dense, "varlen": _packed, "block_sparse": _blocks, "linear": _recurrence}
_FORMULAS |= {"paged": _cached, "paged_saving": _cached, "mla": _cached}
for _family, _formula in _FORMULAS.items():
    for _which, _name in enumerate((_family, f"{_family}_backward")[: 1 if _formula is _cached else 2]):
        _op = getattr(torch.ops.polyattn, _name)
        _names = [one.name for one in _op.default._schema.arguments]
        register_flop_formula(_op, get_raw=True)(functools.partial(_counted, _names, _formula, _which))
