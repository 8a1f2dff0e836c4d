"""Checks of a packed call and of its cumulative lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError
from .common import check_alibi, check_heads_and_dtypes, check_mask, check_out, check_sinks
from .statics import check_longest
from .tensors import check_index, check_tensor, contents_readable, has_shapes_only

TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
"""What torch.compile knows tensors again by, in one call; None: this torch has none."""


def check_lengths(query: Tensor, key: Tensor, **lens: Any) -> None:
    """Check the contents of a packed call's lengths, where they can be read."""
    if contents_readable(lens["cu_seqlens_q"]) and not has_shapes_only(lens["cu_seqlens_q"]):
        for side, tensor in (("q", query), ("k", key)):
            longest, cu = lens[f"max_seqlen_{side}"], lens[f"cu_seqlens_{side}"]
            check_cu_seqlens(f"cu_seqlens_{side}", cu, tensor.shape[0], longest, f"max_seqlen_{side}")


def check_cu_seqlens(name: str, cu: Tensor, tokens: int, longest: int, max_name: str) -> list[int]:
    """Check the contents of cumulative lengths [N+1]; returns them."""
    try:
        starts: list[int] = cu.tolist()
    except RuntimeError as exc:  # vmap batches it
        raise InvalidInputError(
            f"{name} cannot be read on the host: {exc}; under vmap map over tensors of one set of lengths "
            f"(in_dims=None for {name}), or call once for each set"
        ) from exc
    if starts[0] != 0:
        raise InvalidInputError(f"{name} starts with {starts[0]}; it must start with 0")
    if starts[-1] != tokens:
        raise InvalidInputError(
            f"{name} ends at {starts[-1]}, the packed batch has {tokens} tokens; they must agree"
            f"{_without_tail(name, starts[-1]) if 0 <= starts[-1] < tokens else ''}"
        )
    lengths = [b - a for a, b in pairwise(starts)]
    if min(lengths, default=0) < 0:
        at = next(i for i, n in enumerate(lengths) if n < 0)
        raise InvalidInputError(f"{name} falls from {starts[at]} to {starts[at + 1]} at {at}; it must not decrease")
    if max(lengths, default=0) > longest:
        raise InvalidInputError(f"{max_name}={longest} is less than the longest sequence, {max(lengths)}")
    return starts


def _without_tail(name: str, end: int) -> str:
    """The next step where tokens of padding are behind the last sequence."""
    rows = {"cu_seqlens_q": f"query[:{end}]", "cu_seqlens_k": f"key[:{end}] and value[:{end}]"}
    tensors = rows.get(name, f"[:, :{end}] of each tensor of tokens")
    return f". If padding is behind the last sequence, cut it off and pass {tensors}"


def check_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    attn_mask: Any,
    sinks: Any,
    out: Any,
    alibi: Any = None,
) -> None:
    """Check the host-visible facts of a packed call."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor, 3, "[T, H, D]")
    check_heads_and_dtypes(query, key, value, query.shape[1], key.shape[1], value.shape[1])
    if key.shape[0] != value.shape[0]:
        raise InvalidInputError(f"key has {key.shape[0]} tokens, value {value.shape[0]}; they must be equal")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_index(name, cu, 1, "[N+1]")
        if cu.shape[0] < 1:
            raise InvalidInputError(f"{name} is empty; it has one entry more than there are sequences")
        if cu.device != query.device:
            raise InvalidInputError(f"{name} is on {cu.device}, query on {query.device}; move it")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise InvalidInputError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries, cu_seqlens_k {cu_seqlens_k.shape[0]}; make them equal"
        )
    check_longest(max_seqlen_q, max_seqlen_k)
    check_mask(attn_mask, query, cu_seqlens_q.shape[0] - 1, query.shape[1], max_seqlen_q, max_seqlen_k, "max_q, max_k")
    check_sinks(sinks, query, query.shape[1])
    check_alibi(alibi, query, query.shape[1])
    check_out(out, query, (*query.shape[:2], value.shape[-1]), (query, key, value), (attn_mask, sinks))


class PackedCheck:
    """`check_varlen` for the calls of one site: tensors like those that passed twice are known by torch's guards, and
    only what these do not see is looked at."""

    __slots__ = ("_like", "_seen")

    def __init__(self) -> None:
        self._like: dict[bool, Any] = {}
        self._seen: Any = None

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        attn_mask: Any,
        sinks: Any,
        out: Any,
        alibi: Any = None,
    ) -> None:
        one = cu_seqlens_q is cu_seqlens_k
        tensors = (query, key, value, cu_seqlens_q) if one else (query, key, value, cu_seqlens_q, cu_seqlens_k)
        plain = attn_mask is sinks is out is alibi is None
        if (
            plain
            and (alike := self._like.get(one)) is not None
            and alike(*tensors)
            and key.shape[0] == value.shape[0]
            and 0 < cu_seqlens_q.shape[0] == cu_seqlens_k.shape[0]
            and type(max_seqlen_q) is type(max_seqlen_k) is int
            and max_seqlen_q >= 0 <= max_seqlen_k
        ):
            return
        lens = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        check_varlen(query, key, value, *lens, attn_mask, sinks, out, alibi)
        seen = one, *((t.dtype, t.shape[1:], t.requires_grad) for t in tensors)
        # Guards never hold for one tensor passed twice, and those of calls that take turns would be made each time.
        if seen == self._seen and plain and TensorGuards is not None and query is not key is not value is not query:
            sizes = [[None, *t.shape[1:]] for t in tensors]
            strides = [[*[None] * (t.ndim - 1), 1] for t in tensors]
            self._like[one] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        self._seen = seen
