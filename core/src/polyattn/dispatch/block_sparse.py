"""`block_sparse_attention`: each block of queries attends to a list of key blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import AttentionRequest
from ..contract.lengths import extent_of
from ..errors import InvalidInputError
from ..selection import overrides
from ..semantics import validation
from ..semantics.block_maps import (
    block_shape_of,
    check_block_map,
    check_bool_map,
    check_one_given,
    check_starts_given,
    lists_of,
)
from .binding import Asked, explained_by
from .bound_table import BoundTable
from .call_key import CallKey, Found, Static, autocasted, backend_name, found, request_of, without_autocast
from .compile.facts import counted
from .compile.trace import Blocks, trace_block_sparse
from .dense import dense_signature

__all__ = ["block_sparse_attention"]

_table: BoundTable[Found] = BoundTable()


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_map: Tensor | None = None,
    lists: tuple[Tensor, Tensor] | None = None,
    block_shape: tuple[int, int],
    block_valid: Tensor | None = None,
    block_starts: Tensor | None = None,
    layout: str = "BSHD",
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    out: Tensor | None = None,
) -> Any:
    """Softmax attention in which a block of queries sees only the key blocks of its list.

    The result is that of `polyattn.attention` under the bool mask which the map stands for (docs/semantics.md, S8).
    Differentiable in query, key and value. A backend without block-sparse kernels serves the call by writing the mask
    out, which `polyattn.explain` shows as `expand_block_map`.

    Args:
        query: [B, S_q, H_q, D]; key: [B, S_k, H_kv, D]; value: [B, S_k, H_kv, D_v], or heads first with layout="BHSD".
        block_map: bool [B|1, H_q|1, nQ, nK], True = the queries of the block see the keys of the block. nQ is
            ceil(S_q / block_q), nK is ceil(S_k / block_k).
        lists: (counts, indices) in its place: int32 [B|1, H_q|1, nQ], and int32 [B|1, H_q|1, nQ, max] with distinct
            numbers of key blocks; entries past the count are ignored.
        block_shape: (block_q, block_k), tokens of a block. The last block of either side may hold fewer.
        block_valid: int32 [nK], how many tokens of each key block are seen, its first ones; None = all.
        block_starts: int32 [B|1, H_kv|1, nK], at which key each key block starts, for blocks of unequal sizes that are
            packed: block_valid has the same shape then and says how many keys each has, up to block_k; there may be any
            number of blocks, in any order, and no key is in two. Goes with `lists`. None = the blocks cut S_k.
        layout, scale, return_lse, backend, out: as `polyattn.attention`.

    Returns:
        out in the layout of the query, or (out, lse fp32 [B, S_q, H_q], heads first with layout="BHSD"). Rows that see
        no key are 0, their LSE is -inf.

    Raises:
        InvalidInputError, UnsupportedRequestError, BackendUnavailableError: as `polyattn.attention`.
    """
    blocks = Blocks(block_map, lists, block_shape, block_valid, block_starts)
    static = Static(scale=scale, layout=layout, return_lse=return_lse)
    if torch.compiler.is_compiling() or counted() or validation.has_shapes_only(query):
        return trace_block_sparse(query, key, value, out, blocks, static, backend)
    call = _Call.of(query, key, value, out, blocks, static)
    scope, backend = overrides.SCOPE.get(), backend_name(backend)
    entry = found(_table, (*call.signature(), backend, scope), call.request, backend, scope)
    given = call.map if call.out is None else {**call.map, "out": call.out}
    result = without_autocast(entry.chosen.ranged("block_sparse_attention", entry.run), *call.tensors, **given)
    if layout == "BHSD":
        return result
    return tuple(t.transpose(1, 2) for t in result) if isinstance(result, tuple) else result.transpose(1, 2)


class _Call(NamedTuple):
    """A checked call, heads first."""

    tensors: tuple[Tensor, Tensor, Tensor]
    out: Tensor | None
    map: dict[str, Tensor | None]
    block_shape: tuple[int, int]
    static: Static
    key: CallKey

    @classmethod
    def of(cls, query: Any, key: Any, value: Any, out: Any, blocks: Blocks, static: Static) -> _Call:
        static = static.checked()
        query, key, value = autocasted(query, key, value)
        validation.check_dense(query, key, value, None, None, out, static.layout)
        shape = block_shape_of(blocks.shape)
        if static.layout == "BSHD":
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            out = None if out is None else out.transpose(1, 2)
        if blocks.starts is not None:
            check_starts_given(map_given=blocks.map is not None, valid_given=blocks.valid is not None)
        check_one_given(map_given=blocks.map is not None, lists_given=blocks.lists is not None)
        counts, indices = _lists(query, key, blocks, shape)
        check_block_map(query, key, shape, counts, indices, blocks.valid, blocks.starts)
        given = {"block_counts": counts, "block_indices": indices, "block_valid": blocks.valid}
        # Packages that are older than starts need not know them.
        given |= {} if blocks.starts is None else {"block_starts": blocks.starts}
        said = CallKey._make(dense_signature("BHSD", query, key, value, None, None, out))
        return cls((query, key, value), out, given, shape, static._replace(layout="BHSD"), said)

    def signature(self) -> tuple[Any, ...]:
        """All that decides who serves the call."""
        return self.static, self.block_shape, self.map["block_valid"] is None, "block_starts" in self.map, self.key

    def request(self) -> AttentionRequest:
        """What it asks for."""
        return request_of(
            self.key,
            self.static,
            family="block_sparse",
            block_map=True,
            block_sizes=self.map["block_valid"] is not None,
            block_starts="block_starts" in self.map,
            block_shape=self.block_shape,
        )


def _lists(query: Tensor, key: Tensor, blocks: Blocks, block_shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    if blocks.map is not None:
        check_bool_map(query, key, block_shape, blocks.map)
        return lists_of(blocks.map)
    lists = blocks.lists
    if not isinstance(lists, (tuple, list)) or len(lists) != 2:
        raise InvalidInputError(f"lists is a {type(lists).__name__}; a pair (counts, indices) is needed")
    return lists[0], lists[1]


def _asked(
    backend: Any, query: Any, key: Any, value: Any, out: Any, scale: Any, layout: Any, return_lse: Any, **blocks: Any
) -> Asked:
    static = Static(scale=scale, layout=layout, return_lse=return_lse)
    found = Blocks(**{name.removeprefix("block_"): one for name, one in blocks.items()})
    call = _Call.of(query, key, value, out, found, static)
    request = call.request()
    return request, backend_name(backend), extent_of(request)(*call.tensors)


explained_by(block_sparse_attention, _asked)
