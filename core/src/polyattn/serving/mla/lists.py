"""This module lists the tokens that each query of a step sees, in layers of DeepSeek sparse attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...errors import GraphError, InvalidInputError
from ...registry.device_ops import device_ops
from ...semantics.token_index import hadamard, index_scores, pack_index, round_index, top_tokens, unpack_index

if TYPE_CHECKING:
    from ..attention.backend import AttentionBackend
    from ..kv_cache.pool import KVPool
    from ..layer import AttentionLayer
    from ..step.step import Step

__all__ = ["INDEX", "Index", "TokenLists"]

INDEX = "index"
"""The keep of a layer's index keys, by token: (D_i,) of floats, or uint8 (D_i + 4,), FP8 with a scale each."""


_ROOM = 2**26
"""Scores that are made at once."""


class Index(NamedTuple):
    """What a layer's indexer makes of the new tokens: query [T, H_i, D_i] and key [T, D_i], after RoPE; weights
    [T, H_i], all factors of the scores in them."""

    query: Tensor
    key: Tensor
    weights: Tensor


class TokenLists:
    """The lists of the planned step.

    Args:
        backend: which has the step. pool: with the index keys.
    """

    def __init__(self, backend: AttentionBackend, pool: KVPool) -> None:
        self._backend, self._pool = backend, pool
        self._last: tuple[Hashable, Tensor] | None = None

    def plan(self) -> None:
        """Forget the lists of the step before."""
        self._last = None

    def write(self, layer: AttentionLayer, index: Index | None) -> None:
        """Store the index keys of the new tokens."""
        if index is None:
            return
        packed = self._pool.kept(layer.layer_id, INDEX).dtype == torch.uint8
        key = pack_index(hadamard(index.key)) if packed else index.key
        for step, tokens in self._backend.steps_of(layer.layer_id):
            self._pool.write_kept(layer.layer_id, INDEX, step.slots, key[tokens])

    def of(self, layer: AttentionLayer, index: Index | None) -> Tensor:
        """Return the lists of a layer, int32 [T, topk]; those of the layer before where it has no indexer.

        Raises:
            InvalidInputError: it has none, and no layer before it in this step had one, or another `token_topk`.
        """
        if index is None:
            if self._last is None or self._last[0] != layer.token_topk:
                raise InvalidInputError(
                    f"layer {layer.layer_id} has no indexer and takes the lists of the layer before it, of which "
                    f"there are none with token_topk={layer.token_topk} in this step; give it its index"
                )
            return self._last[1]
        found = index.key.new_empty(index.key.shape[0], layer.token_topk, dtype=torch.int32)
        for step, tokens in self._backend.steps_of(layer.layer_id):
            some = Index(*(tensor[tokens] for tensor in index))
            found[tokens] = self._part(layer, step, some)
        self._last = layer.token_topk, found
        return found

    def _part(self, layer: AttentionLayer, step: Step, index: Index) -> Tensor:
        """Of a step, by the kernels of a package where it has such."""
        ops: Any = device_ops(index.query.device.type)
        kernel = getattr(ops, "index_scores", None) if index.query.dtype != torch.float64 else None
        room = step.page_table.shape[1] * step.page_size * index.query.shape[0] <= _ROOM
        if kernel is None or not (room or step.fixed or step.max_seqlen_q == 1):
            together = step.fixed or step.max_seqlen_q == 1
            return self._together(layer, step, index) if together else self._rows(layer, step, index, kernel)
        starts, lens = step.cu_seqlens_q, step.seq_lens
        kept, query = self._scored_by(layer, index.query)
        scores = kernel(query, index.weights, kept, step.page_table, lens, starts, step.max_seqlen_q)
        if step.max_seqlen_q == 1 and step.tokens == len(lens):
            return _listed(scores, lens, layer.token_topk)
        places = torch.arange(query.shape[0], device=query.device)
        row = torch.searchsorted(starts[1:].long(), places, right=True).clamp(max=len(lens) - 1)
        return _listed(scores, lens[row] - (starts[1:][row] - 1 - places), layer.token_topk)

    def _scored_by(self, layer: AttentionLayer, query: Tensor) -> tuple[Tensor, Tensor]:
        """The index keys of a layer, and queries as a kernel scores them with those."""
        kept = self._pool.kept(layer.layer_id, INDEX)
        if kept.dtype == torch.uint8:
            query = round_index(hadamard(query))
        return kept, query

    def _together(self, layer: AttentionLayer, step: Step, index: Index) -> Tensor:
        """Of rows with as many new tokens each: nothing is read on the host.

        Raises:
            GraphError: they have not, and the step is recorded.
        """
        new = step.max_seqlen_q
        if step.tokens != step.sequences * new:
            raise GraphError(
                f"a recorded step of {step.tokens} tokens in {step.sequences} rows, and layers that list tokens are "
                "recorded with as many in each row: record decode steps and chains of drafts only"
            )
        keys, query = self._keys(layer, step.page_table, step.page_size, index.query)
        scores = index_scores(torch.unflatten(query, 0, (-1, new)), keys, torch.unflatten(index.weights, 0, (-1, new)))
        seen = step.seq_lens[:, None] - new + 1 + torch.arange(new, device=scores.device)
        return _listed(scores.flatten(0, 1), seen.flatten(0, 1), layer.token_topk)

    def _rows(
        self, layer: AttentionLayer, step: Step, index: Index, kernel: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Row by row, whose lengths the host knows."""
        starts, lens, found = step.listed("cu_seqlens_q"), step.listed("seq_lens"), []
        for n, keys in enumerate(lens):
            some = slice(starts[n], starts[n + 1])
            new = some.stop - some.start
            table = step.page_table[n : n + 1, : -(-keys // step.page_size)]
            if not keys:
                found.append(step.page_table.new_full((new, layer.token_topk), -1))
                continue
            if kernel is None:
                rows, query = self._keys(layer, table, step.page_size, index.query[some])
            else:
                rows, query = self._scored_by(layer, index.query[some])
            seen = torch.arange(keys - new + 1, keys + 1, device=query.device)
            size = max(_ROOM // keys, 1)
            parts = (torch.split(tensor, size) for tensor in (query, index.weights[some], seen))
            for q, w, s in zip(*parts, strict=True):
                if kernel is None:
                    scores = index_scores(q, rows[0, :keys], w)
                else:
                    starts_of = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
                    scores = kernel(q, w, rows, table, s[-1:].to(torch.int32), starts_of, len(q))
                found.append(_listed(scores, s, layer.token_topk))
        return torch.cat(found)

    def _keys(self, layer: AttentionLayer, table: Tensor, page_size: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """The index keys of rows [N, tokens, D_i], and queries as they are scored with those."""
        kept = self._pool.kept(layer.layer_id, INDEX)
        keys = kept[table.long()].flatten(1, 2)
        if kept.dtype != torch.uint8:
            return keys, query
        return unpack_index(keys), round_index(hadamard(query))


def _listed(scores: Tensor, seen: Tensor, topk: int) -> Tensor:
    """`top_tokens` of [T, S] and [T], by the kernel of a package where it has one."""
    kernel: Any = getattr(device_ops(scores.device.type), "top_tokens", None) if scores.dtype == torch.float32 else None
    found: Tensor = (kernel or top_tokens)(scores, seen, topk)
    return found
