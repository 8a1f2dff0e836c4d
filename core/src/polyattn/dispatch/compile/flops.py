"""How many floating-point operations the custom ops are, for `torch.utils.flop_counter.FlopCounterMode`.

Counted as torch counts its own attention: two matrix products forward, five backward (one of them again), without a
discount for what masks hide.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...semantics.validation import has_shapes_only
from . import custom_ops as _ops  # noqa: F401 - there must be ops to have formulas for

__all__: list[str] = []


def _forward(lengths: Iterator[tuple[int, int]], heads: int, d: int, d_v: int) -> int:
    return sum(2 * heads * s_q * s_k * (d + d_v) for s_q, s_k in lengths)


def _backward(lengths: Iterator[tuple[int, int]], heads: int, d: int, d_v: int) -> int:
    return sum(2 * heads * s_q * s_k * (3 * d + 2 * d_v) for s_q, s_k in lengths)


def _dense(query: Tensor, key: Tensor, value: Tensor, plan: str) -> tuple[Iterator[tuple[int, int]], int, int, int]:
    s, h = (1, 2) if json.loads(plan)["request"].get("layout", "BSHD") == "BSHD" else (2, 1)
    lengths = ((query.shape[s], key.shape[s]) for _ in range(query.shape[0]))
    return lengths, query.shape[h], query.shape[3], value.shape[3]


def _packed(
    query: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> tuple[Iterator[tuple[int, int]], int, int, int]:
    if has_shapes_only(cu_q) or has_shapes_only(cu_k):
        lengths = iter([(max_q, max_k)] * (cu_q.shape[0] - 1))
    else:
        lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
    return lengths, query.shape[1], query.shape[2], value.shape[2]


@register_flop_formula(torch.ops.polyattn.dense, get_raw=True)
def _(query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Any, plan: str, *args: Any, **kw: Any) -> int:
    return _forward(*_dense(query, key, value, plan))


@register_flop_formula(torch.ops.polyattn.dense_backward, get_raw=True)
def _(dout: Any, dlse: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> int:
    return _backward(*_dense(query, key, value, args[4]))


@register_flop_formula(torch.ops.polyattn.varlen, get_raw=True)
def _(query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Any, *args: Any, **kw: Any) -> int:
    return _forward(*_packed(query, value, *args[:4]))


@register_flop_formula(torch.ops.polyattn.varlen_backward, get_raw=True)
def _(dout: Any, dlse: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Any, *args: Any,
      **kw: Any) -> int:  # fmt: skip
    return _backward(*_packed(query, value, *args[:4]))


def _blocks(
    query: Tensor, key: Tensor, value: Tensor, counts: Tensor, indices: Tensor, plan: str
) -> tuple[Iterator[tuple[int, int]], int, int, int]:
    """The listed blocks, whole ones; all that lists have room for, where they cannot be read."""
    block_q, block_k = json.loads(plan)["request"]["block_shape"]
    shared = query.shape[0] * query.shape[1] // (counts.shape[0] * counts.shape[1])
    listed = counts.numel() * indices.shape[-1] if has_shapes_only(counts) else int(counts.sum())
    return iter([(block_q, block_k * listed * shared)]), 1, query.shape[3], value.shape[3]


@register_flop_formula(torch.ops.polyattn.block_sparse, get_raw=True)
def _(query: Tensor, key: Tensor, value: Tensor, counts: Tensor, indices: Tensor, valid: Any, plan: str, *args: Any,
      **kw: Any) -> int:  # fmt: skip
    return _forward(*_blocks(query, key, value, counts, indices, plan))


@register_flop_formula(torch.ops.polyattn.block_sparse_backward, get_raw=True)
def _(dout: Any, dlse: Any, query: Tensor, key: Tensor, value: Tensor, counts: Tensor, indices: Tensor, *args: Any,
      **kw: Any) -> int:  # fmt: skip
    return _backward(*_blocks(query, key, value, counts, indices, args[3]))


def _recurrence(value: Tensor, width: int) -> int:
    """Of each token and value head: what the state says of its key, its update, and what it says of the query."""
    batch, length, heads, d_v = value.shape
    return 6 * batch * length * heads * width * d_v


@register_flop_formula(torch.ops.polyattn.linear, get_raw=True)
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> int:
    return _recurrence(value, query.shape[3])


@register_flop_formula(torch.ops.polyattn.linear_backward, get_raw=True)
def _(dout: Any, dstate: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> int:
    return 2 * _recurrence(value, query.shape[3])
