"""The serving side of `torch_native`: an SDPA call over the gathered keys of each sequence, one for all of like length
that decode (`like_lengths`).

Lengths are read on the host, so that little is padded, and little is gathered at once. A session reads them, and finds
the places of keys and of new rows, once for all layers of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..adapters import empty_result, finish_output, split_kv, write_new_kv
from ..contract import AttentionRequest, Bound, PagedTables, Slot
from ..semantics.masks import combined
from ..semantics.paged_kv import Slots, Tokens
from ..semantics.reference import visible
from .gathered_sdpa import GatheredSDPA
from .like_lengths import Group, Workspace, attend_group, groups_of, may_be_grouped, numbered_caches

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
        number: which of the call. first: the position of the first of them.
    """

    number: int
    span: slice
    keys: int
    first: int
    slots: Slots


class _Planned(NamedTuple):
    """Holds the sequences of a call that have queries.

    Attributes:
        together: those with one query. alone: those that are attended one by one.
        order: int64 [T_q], which query a row of the results is, `together` first; None = they are in the call's order.
    """

    together: list[Group]
    alone: list[_Sequence]
    order: Tensor | None


class _NativeSession:
    """The lengths and places of a step, for all layers that ask the same."""

    def __init__(self, request: AttentionRequest, attend: GatheredSDPA, slot: Slot) -> None:
        self._request, self._attend = request, attend
        # A recording would hold the lengths of one step for ever: there they are read in each layer, from the device,
        # which whoever records refuses.
        self._alone = functools.partial(_forward, request, attend) if slot.recorded else None
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._planned = _Planned([], [], None)
        self._new: Slots | None = None
        self._slots: Tensor
        self._workspace = slot.workspace
        self._numbered: dict[int, tuple[Tensor, list[Tensor] | None]] = {}

    def plan(self, step: Any) -> None:
        if self._alone is None:
            self._starts, self._lengths = step.listed("cu_seqlens_q"), step.listed("seq_lens")

    def prepare(self, step: Any) -> None:
        if self._alone is not None:
            return
        self._planned = _planned(self._request, self._starts, self._lengths, step.page_table, self._workspace)
        if self._request.save_kv_cache:
            self._slots = step.slots
            self._new = Slots.numbered(self._slots, self._request.page_size)

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
        known = self._numbered.get(id(caches[0]))
        numbered = self._number(caches) if known is None else known[1]
        if self._new is not None and key is not None:
            if numbered is None or value is None:
                write_new_kv(self._request, caches, self._new, (key, value))
            else:
                numbered[0].index_copy_(0, self._slots, key)
                numbered[1].index_copy_(0, self._slots, value)
            key = value = None
        new = key, value
        return _attend(self._request, self._attend, query, caches, numbered, self._planned, new, attn_mask, sinks, out)

    def _number(self, caches: tuple[Tensor, ...]) -> list[Tensor] | None:
        """Return the caches of a layer as `numbered_caches` does, which looks at them once."""
        found = numbered_caches(self._request, caches)
        self._numbered[id(caches[0])] = caches[0], found  # which keeps the id its own
        return found


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
    planned = _planned(request, starts, lengths, tables.page_table, None)
    numbered = numbered_caches(request, caches)
    return _attend(request, attend, query, caches, numbered, planned, (key, value), attn_mask, sinks, out)


def _planned(
    request: AttentionRequest,
    starts: Sequence[int],
    lengths: Sequence[int],
    page_table: Tensor,
    workspace: Workspace | None,
) -> _Planned:
    queries = [n for n in range(len(lengths)) if starts[n + 1] > starts[n]]
    single = [n for n in queries if starts[n + 1] - starts[n] == 1 and lengths[n]] if may_be_grouped(request) else []
    together = groups_of(request, single, starts, lengths, page_table, workspace) if single else []
    some = set(single)
    alone = [_sequence_of(request, n, starts, lengths, page_table) for n in queries if n not in some]
    if not together or together[0].tokens is None:
        return _Planned(together, alone, None)
    order = [starts[n] for group in together for n in group.sequences]
    order += [token for one in alone for token in range(one.span.start, one.span.stop)]
    return _Planned(together, alone, torch.tensor(order, device=page_table.device))


def _sequence_of(
    request: AttentionRequest, n: int, starts: Sequence[int], lengths: Sequence[int], page_table: Tensor
) -> _Sequence:
    left, size, span, keys = request.window[0], request.page_size, slice(starts[n], starts[n + 1]), lengths[n]
    # Keys before the window of the first query are seen by nobody.
    first = max(keys - (span.stop - span.start) - left, 0) if left >= 0 and not request.chunk else 0
    token = torch.arange(first, keys, device=page_table.device)
    slots = page_table[n][token // size].long() * size + token % size
    return _Sequence(n, span, keys, first, Slots.numbered(slots, size))


def _attend(
    request: AttentionRequest,
    attend: GatheredSDPA,
    query: Tensor,
    caches: tuple[Tensor, ...],
    numbered: list[Tensor] | None,
    planned: _Planned,
    new: tuple[Tensor | None, Tensor | None],
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> Any:
    found = [attend_group(request, attend, query, caches, numbered, group) for group in planned.together]
    key, value = new
    for sequence in planned.alone:
        queries = query[sequence.span]
        if not sequence.keys:
            empty = queries.new_zeros(*queries.shape[:2], request.dims[1])
            found.append((empty, queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float32)))
            continue
        own = (None, None) if key is None or value is None else (key[sequence.span], value[sequence.span])
        mask = None if attn_mask is None else attn_mask[sequence.number if attn_mask.shape[0] > 1 else 0][None]
        result, lse = _sequence(request, attend, queries, caches, sequence, own, mask)
        found.append((result[0].transpose(0, 1), None if lse is None else lse[0].transpose(0, 1)))
    packed = _packed([result for result, _ in found], planned.order)
    wanted = request.lse or sinks is not None
    lse = _packed([lse for _, lse in found if lse is not None], planned.order) if wanted else None
    if packed is None:
        return empty_result(request, query, out)
    return finish_output(request, packed, lse, sinks, out)


def _packed(parts: list[Tensor], order: Tensor | None) -> Tensor | None:
    """Put the parts together as [T_q, ...] in the order of the call, None where there are no parts."""
    if not parts:
        return None
    rows = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
    return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)


def _sequence(
    request: AttentionRequest,
    attend: GatheredSDPA,
    query: Tensor,
    caches: tuple[Tensor, ...],
    sequence: _Sequence,
    new: tuple[Tensor | None, Tensor | None],
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Attend one sequence: query [S_q, H_q, D], mask [1, 1|H_q, ...]."""
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
