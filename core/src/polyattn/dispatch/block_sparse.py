"""`block_sparse_attention`: each block of queries attends to a list of key blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..contract import AttentionRequest, relation, scalars
from ..contract.lengths import extent_of
from ..epoch import EPOCH
from ..errors import InvalidInputError
from ..selection import overrides
from ..selection.select import Selection
from ..semantics import validation
from ..semantics.block_maps import check_block_map, check_bool_map, lists_of
from .binding import remembered, select_here
from .call_key import Static, autocast_dtype, backend_name, cast, request_facts, runner

__all__ = ["block_sparse_attention"]


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_map: Tensor | None = None,
    lists: tuple[Tensor, Tensor] | None = None,
    block_shape: tuple[int, int],
    block_valid: Tensor | None = None,
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
        layout, scale, return_lse, backend, out: as `polyattn.attention`.

    Returns:
        out in the layout of the query, or (out, lse fp32 [B, S_q, H_q], heads first with layout="BHSD"). Rows that see
        no key are 0, their LSE is -inf.

    Raises:
        InvalidInputError, UnsupportedRequestError, BackendUnavailableError: as `polyattn.attention`.
    """
    given = {
        "block_map": block_map,
        "lists": lists,
        "block_shape": block_shape,
        "block_valid": block_valid,
        "layout": layout,
        "scale": scale,
        "return_lse": return_lse,
        "out": out,
    }
    # Compiled code has no operator of this family yet: its graph ends before the call and goes on after it.
    run = _between_graphs if torch.compiler.is_compiling() else _run
    return run(query, key, value, backend, given)


def _run(query: Tensor, key: Tensor, value: Tensor, backend: str | None, given: Mapping[str, Any]) -> Any:
    return _Call(query, key, value, **given).run(backend)


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _between_graphs(*given: Any) -> Any:
    return _run(*given)


class _Call:
    """A checked call, heads first."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        block_shape: tuple[int, int],
        block_map: Tensor | None = None,
        lists: tuple[Tensor, Tensor] | None = None,
        block_valid: Tensor | None = None,
        layout: str = "BSHD",
        scale: float | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> None:
        static = Static(scale=scale, layout=layout, return_lse=return_lse).checked()
        if isinstance(query, Tensor) and autocast_dtype(query.device.type) is not None:
            query, key, value = cast(query, key, value)
        validation.check_dense(query, key, value, None, None, out, layout)
        self.swapped, self.return_lse = layout == "BSHD", static.return_lse
        self.tensors = (self._turned(query), self._turned(key), self._turned(value))
        self.out = None if out is None else self._turned(out)
        shape = _block_shape(block_shape)
        counts, indices = self._lists(block_map, lists, shape)
        q, k, v = self.tensors
        check_block_map(q, k, shape, counts, indices, block_valid)
        self.map = {"block_counts": counts, "block_indices": indices, "block_valid": block_valid}
        heads_first = Static(scale=static.scale, layout="BHSD", return_lse=static.return_lse)
        self.request = AttentionRequest(
            family="block_sparse",
            s_relation=relation(q.shape[2], k.shape[2]),
            block_map=True,
            block_sizes=block_valid is not None,
            block_shape=shape,
            **request_facts(heads_first, q, k, v, None, None, q.shape[1], k.shape[1]),
        ).normalised()

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if self.swapped else tensor

    def _lists(
        self, block_map: Tensor | None, lists: tuple[Tensor, Tensor] | None, block_shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        if (block_map is None) == (lists is None):
            given = "neither" if lists is None else "both"
            raise InvalidInputError(
                f"{given} of block_map and lists given: pass block_map, bool [B|1, H_q|1, nQ, nK], or lists, (counts, "
                "indices)"
            )
        if block_map is not None:
            check_bool_map(self.tensors[0], self.tensors[1], block_shape, block_map)
            return lists_of(block_map)
        if not isinstance(lists, (tuple, list)) or len(lists) != 2:
            raise InvalidInputError(f"lists is a {type(lists).__name__}; a pair (counts, indices) is needed")
        return lists[0], lists[1]

    def run(self, backend: str | None) -> Any:
        chosen = remembered(self.request, backend_name(backend), overrides.SCOPE.get(), EPOCH.value)
        kind = self.tensors[0].device.type
        forward = chosen.ranged("block_sparse_attention", runner(chosen, self.return_lse, False, 1))
        given = self.map if self.out is None else {**self.map, "out": self.out}
        if autocast_dtype(kind) is None:
            result = forward(*self.tensors, **given)
        else:
            with torch.autocast(kind, enabled=False):
                result = forward(*self.tensors, **given)
        if not isinstance(result, tuple):
            return self._turned(result)
        return self._turned(result[0]), self._turned(result[1])


def _block_shape(block_shape: Any) -> tuple[int, int]:
    pair = isinstance(block_shape, (tuple, list)) and len(block_shape) == 2
    if not pair or any(not scalars.whole(n) or n < 1 for n in block_shape):
        raise InvalidInputError(
            f"block_shape={scalars.shown(block_shape)} must be two numbers of tokens, (block_q, block_k), each 1 or "
            "more"
        )
    return int(block_shape[0]), int(block_shape[1])


def _explain(query: Tensor, key: Tensor, value: Tensor, *, backend: str | None = None, **given: Any) -> Selection:
    call = _Call(query, key, value, **given)
    extent = extent_of(call.request)(*call.tensors)
    return select_here(call.request, backend_name(backend), overrides.SCOPE.get(), extent, full=True)


block_sparse_attention.__polyattn_explain__ = _explain  # type: ignore[attr-defined]
