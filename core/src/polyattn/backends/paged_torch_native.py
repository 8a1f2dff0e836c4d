"""The serving side of `torch_native`: each sequence's keys are gathered and attended by an SDPA call of their own.

Lengths are read on the host: nothing is padded, and nothing but one sequence is ever gathered at once. A session reads
them, and finds the places of keys and of new rows, once for all layers of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..adapters import finish_output, split_kv, write_new_kv
from ..contract import AttentionRequest, Bound, PagedTables, Slot
from ..semantics.masks import combined
from ..semantics.paged_kv import Slots, Tokens
from ..semantics.reference import visible
from .gathered_sdpa import GatheredSDPA

__all__ = ["PagedTorchNative"]


class PagedTorchNative:
    """Binds paged and latent requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        attend = GatheredSDPA(request)
        return Bound(
            functools.partial(_forward, request, attend), session=functools.partial(_NativeSession, request, attend)
        )


class _Sequence(NamedTuple):
    """The queries of one sequence, its number of keys, and where those are that some query sees.

    Attributes:
        first: the position of the first of them.
    """

    span: slice
    keys: int
    first: int
    slots: Slots


class _NativeSession:
    """The lengths and places of a step, for all layers that ask the same."""

    def __init__(self, request: AttentionRequest, attend: GatheredSDPA, slot: Slot) -> None:
        self._request, self._attend = request, attend
        # A recording would hold the lengths of one step for ever: there they are read in each layer, from the device,
        # which whoever records refuses.
        self._alone = functools.partial(_forward, request, attend) if slot.recorded else None
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._sequences: list[_Sequence] = []
        self._new: Slots | None = None

    def plan(self, step: Any) -> None:
        if self._alone is None:
            self._starts, self._lengths = step.listed("cu_seqlens_q"), step.listed("seq_lens")

    def prepare(self, step: Any) -> None:
        if self._alone is not None:
            return
        self._sequences = _sequences(self._request, self._starts, self._lengths, step.page_table)
        if self._request.save_kv_cache:
            size = self._request.page_size
            self._new = Slots(step.slots // size, step.slots % size, None)

    def forward(
        self,
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: None = None,
        v_scale: None = None,
        out: Tensor | None = None,
    ) -> Any:
        if self._alone is not None:
            return self._alone(
                query, *caches, tables=tables, key=key, value=value, attn_mask=attn_mask, sinks=sinks, out=out
            )
        if self._new is not None and key is not None:
            write_new_kv(self._request, caches, self._new, (key, value))
            key = value = None
        return _attend(self._request, self._attend, query, caches, self._sequences, (key, value), attn_mask, sinks, out)


def _forward(
    request: AttentionRequest,
    attend: GatheredSDPA,
    query: Tensor,
    *caches: Tensor,
    tables: PagedTables,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: None = None,
    v_scale: None = None,
    out: Tensor | None = None,
) -> Any:
    if request.save_kv_cache and key is not None:
        write_new_kv(
            request, caches, Tokens.of(query, tables).slots(tables.page_table, request.page_size), (key, value)
        )
        key = value = None
    # One copy to the host, not one for each sequence; none where the caller has them there.
    starts, lengths = tables.listed("cu_seqlens_q"), tables.listed("seq_lens")
    sequences = _sequences(request, starts, lengths, tables.page_table)
    return _attend(request, attend, query, caches, sequences, (key, value), attn_mask, sinks, out)


def _sequences(
    request: AttentionRequest, starts: Sequence[int], lengths: Sequence[int], page_table: Tensor
) -> list[_Sequence]:
    """Return all sequences of a call, in their order."""
    left, size, found = request.window[0], request.page_size, []
    for n, keys in enumerate(lengths):
        span = slice(starts[n], starts[n + 1])
        # Keys before the window of the first query are seen by nobody.
        first = max(keys - (span.stop - span.start) - left, 0) if left >= 0 and not request.chunk else 0
        first = first if span.stop > span.start else keys
        token = torch.arange(first, keys, device=page_table.device)
        found.append(_Sequence(span, keys, first, Slots(page_table[n][token // size].long(), token % size, None)))
    return found


def _attend(
    request: AttentionRequest,
    attend: GatheredSDPA,
    query: Tensor,
    caches: tuple[Tensor, ...],
    sequences: Sequence[_Sequence],
    new: tuple[Tensor | None, Tensor | None],
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> Any:
    outs = [query.new_zeros(0, query.shape[1], request.dims[1])]
    lses: list[Tensor] = [query.new_zeros(0, query.shape[1], dtype=torch.float32)]
    key, value = new
    for n, sequence in enumerate(sequences):
        queries = query[sequence.span]
        if not len(queries):
            continue
        if not sequence.keys:
            outs.append(queries.new_zeros(*queries.shape[:2], request.dims[1]))
            lses.append(queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float32))
            continue
        own = (None, None) if key is None or value is None else (key[sequence.span], value[sequence.span])
        mask = None if attn_mask is None else attn_mask[n if attn_mask.shape[0] > 1 else 0][None]
        result, lse = _sequence(request, attend, queries, caches, sequence, own, mask)
        outs.append(result[0].transpose(0, 1))
        if lse is not None:
            lses.append(lse[0].transpose(0, 1))
    wanted = request.lse or sinks is not None
    return finish_output(request, torch.cat(outs), torch.cat(lses) if wanted else None, sinks, out)


def _sequence(
    request: AttentionRequest,
    attend: GatheredSDPA,
    query: Tensor,
    caches: tuple[Tensor, ...],
    sequence: _Sequence,
    new: tuple[Tensor | None, Tensor | None],
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one sequence: query [S_q, H_q, D], mask [1, 1|H_q, ...]."""
    s_q, s_k, first = query.shape[0], sequence.keys, sequence.first
    found = split_kv(request, caches, sequence.slots, query.dtype)
    if new[0] is not None:
        found = [
            torch.cat([rows[: len(rows) - s_q], fresh.to(rows.dtype)])
            for rows, fresh in zip(found, new, strict=True)
            if fresh is not None
        ]
    q, k, v = (rows.transpose(0, 1)[None] for rows in (query, *found))

    mask = None if attn_mask is None else attn_mask[:, :, :s_q, first:s_k]
    plain = request.window == (-1, -1) and not request.chunk
    if plain and request.causal != "none" and s_q == s_k and mask is None:
        return attend(q, k, v, None, causal=s_q > 1)
    # A query at the end sees all that its window left.
    if s_q > 1 or request.chunk:
        offset = s_k - s_q - first
        options: dict[str, Any] = {"window": request.window, "chunk": request.chunk, "device": query.device}
        seen = visible(s_q, s_k - first, causal=request.causal, q_offset=offset, **options)
        mask = mask if seen is None else combined(mask, seen[None, None])
    return attend(q, k, v, mask)
