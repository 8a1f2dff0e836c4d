"""`block_sparse_attention`: each block of queries attends to a list of key blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import AttentionRequest, relation, scalars
from ..contract.lengths import extent_of
from ..errors import InvalidInputError
from ..selection import overrides
from ..semantics import validation
from ..semantics.block_maps import check_block_map, check_bool_map, check_starts_given, lists_of
from .binding import Asked, Chosen, choose, explained_by
from .bound_table import BoundTable
from .call_key import Static, autocast_dtype, backend_name, cast, request_facts, runner, without_autocast
from .compile.facts import counted
from .compile.trace import trace_block_sparse
from .dense import dense_signature

__all__ = ["block_sparse_attention"]

_table: BoundTable[tuple[Chosen, Callable[..., Any]]] = BoundTable()


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
    if torch.compiler.is_compiling() or counted() or validation.has_shapes_only(query):
        static = Static(scale=scale, layout=layout, return_lse=return_lse)
        return trace_block_sparse(
            query, key, value, out, block_map, lists, block_shape, block_valid, block_starts, static, backend
        )
    call = _Call.of(
        *(query, key, value, out, block_map, lists, block_shape, block_valid, block_starts),
        *(layout, scale, return_lse),
    )
    scope, backend = overrides.SCOPE.get(), backend_name(backend)
    entry = _table.get(signature := (*call.signature(), backend, scope))
    if entry is None:
        chosen = choose(call.request(), backend, scope)
        entry = _table.put(signature, (chosen, runner(chosen, call.static.return_lse, False, 1)))
    run = entry[0].ranged("block_sparse_attention", entry[1])
    given = call.map if call.out is None else {**call.map, "out": call.out}
    result = without_autocast(run, *call.tensors, **given)
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

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor | None,
        block_map: Tensor | None,
        lists: tuple[Tensor, Tensor] | None,
        block_shape: tuple[int, int],
        block_valid: Tensor | None,
        block_starts: Tensor | None,
        layout: str,
        scale: float | None,
        return_lse: bool,
    ) -> _Call:
        static = Static(scale=scale, layout=layout, return_lse=return_lse).checked()
        if isinstance(query, Tensor) and autocast_dtype(query.device.type) is not None:
            query, key, value = cast(query, key, value)
        validation.check_dense(query, key, value, None, None, out, layout)
        shape = _block_shape(block_shape)
        if layout == "BSHD":
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            out = None if out is None else out.transpose(1, 2)
        if block_starts is not None:
            check_starts_given(map_given=block_map is not None, valid_given=block_valid is not None)
        counts, indices = _lists(query, key, block_map, lists, shape)
        check_block_map(query, key, shape, counts, indices, block_valid, block_starts)
        given: dict[str, Tensor | None] = {"block_counts": counts, "block_indices": indices}
        given |= {"block_valid": block_valid, "block_starts": block_starts}
        return cls((query, key, value), out, given, shape, static._replace(layout="BHSD"))

    def signature(self) -> tuple[Any, ...]:
        """All that decides who serves the call."""
        said = dense_signature("BHSD", *self.tensors, None, None, self.out)
        return self.static, self.block_shape, self.map["block_valid"] is None, self.map["block_starts"] is None, said

    def request(self) -> AttentionRequest:
        """What it asks for."""
        q, k, v = self.tensors
        return AttentionRequest(
            family="block_sparse",
            s_relation=relation(q.shape[2], k.shape[2]),
            block_map=True,
            block_sizes=self.map["block_valid"] is not None,
            block_starts=self.map["block_starts"] is not None,
            block_shape=self.block_shape,
            **request_facts(self.static, q, k, v, None, None, q.shape[1], k.shape[1]),
        ).normalised()


def _lists(
    query: Tensor,
    key: Tensor,
    block_map: Tensor | None,
    lists: tuple[Tensor, Tensor] | None,
    block_shape: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    if (block_map is None) == (lists is None):
        given = "neither" if lists is None else "both"
        raise InvalidInputError(
            f"{given} of block_map and lists given: pass block_map, bool [B|1, H_q|1, nQ, nK], or lists, (counts, "
            "indices)"
        )
    if block_map is not None:
        check_bool_map(query, key, block_shape, block_map)
        return lists_of(block_map)
    if not isinstance(lists, (tuple, list)) or len(lists) != 2:
        raise InvalidInputError(f"lists is a {type(lists).__name__}; a pair (counts, indices) is needed")
    return lists[0], lists[1]


def _block_shape(block_shape: Any) -> tuple[int, int]:
    pair = isinstance(block_shape, (tuple, list)) and len(block_shape) == 2
    if not pair or any(not scalars.whole(n) or n < 1 for n in block_shape):
        raise InvalidInputError(
            f"block_shape={scalars.shown(block_shape)} must be two numbers of tokens, (block_q, block_k), each 1 or "
            "more"
        )
    return int(block_shape[0]), int(block_shape[1])


def _asked(backend: Any, **given: Any) -> Asked:
    call = _Call.of(**given)
    request = call.request()
    return request, backend_name(backend), extent_of(request)(*call.tensors)


explained_by(block_sparse_attention, _asked)
