"""This module attends sequences with one query each together, where their keys are about as many: one gather and one
SDPA call instead of one for each.

Sequences of unlike length stay apart, so that little is gathered for nothing; and what is gathered at once is bounded,
so that SDPA finds it in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..adapters import split_kv
from ..contract import AttentionRequest
from ..semantics.masks import additive
from ..semantics.paged_kv import Slots, by_number, from_column
from .gathered_sdpa import GatheredSDPA

__all__ = ["Group", "attend_group", "groups_of", "may_be_grouped", "numbered_caches"]

PADDED = 4 / 3
"""The most columns of a group over the keys of its shortest sequence, from `FEW` columns on."""
FEW = 64
MOST = 2**20
"""Numbers of keys and values gathered at once, where one sequence has no more."""

Workspace = Callable[[str, int], Tensor]
"""As `Slot.workspace`."""


class Group(NamedTuple):
    """Holds sequences of about one length, and where their keys are.

    Attributes:
        sequences: of the call, in any order. tokens: int64 [n], their queries; None = those are all of the call, in
            its order.
        places: int64 [n * columns], numbers of tokens: of a key that is seen where a column holds none.
        slots: the same, [n, columns].
        mask: additive [n, 1, 1, columns], None = all columns are seen.
        memory: for each cache where its rows are gathered, [n * columns, ...]. rows: the same as keys [n, H_kv,
            columns, D] and values [n, H_kv, columns, D_v]. Both are empty where new memory is taken.
    """

    sequences: list[int]
    tokens: Tensor | None
    places: Tensor
    slots: Slots
    mask: Tensor | None
    memory: list[Tensor]
    rows: list[Tensor]


def may_be_grouped(request: AttentionRequest) -> bool:
    """Return whether sequences with one query may be attended together: their keys are in the cache, nothing but
    lengths and a window says which are seen, and the batch may change the last bits."""
    saved = request.save_kv_cache is not False
    return saved and request.mask == "none" and not (request.chunk or request.tree or request.batch_invariant)


def groups_of(
    request: AttentionRequest,
    single: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    page_table: Tensor,
    workspace: Workspace | None,
) -> list[Group]:
    """Group the sequences `single` of a call, which have one query and at least one key.

    Args:
        starts: the first query of each sequence. lengths: keys of each. page_table: int32 [N, max_pages].
        workspace: memory that the groups share, None = there is none.
    """
    found, device, size, left = [], page_table.device, request.page_size, request.window[0]
    if left >= 0 and any(skipped := [max(keys - 1 - left, 0) // size for keys in lengths]):
        # Pages before the window of the query are seen by nobody.
        lengths = [keys - pages * size for keys, pages in zip(lengths, skipped, strict=True)]
        page_table = from_column(page_table, torch.tensor(skipped, device=device), -(-max(lengths) // size))
    one = request.kv_heads * sum(request.dims)
    for members in _alike(single, lengths, max(MOST // one, 1)):
        every = len(members) == len(lengths) == starts[-1]
        if every:
            members.sort()
        tokens = None if every else torch.tensor([starts[n] for n in members], device=device)
        pages = page_table if every else page_table[torch.tensor(members, device=device)]
        slots, mask = _columns(request, [lengths[n] for n in members], pages)
        numbers = Slots.numbered(slots, size)
        found.append(Group(members, tokens, slots.view(-1), numbers, mask, *_memory(request, slots, workspace)))
    return found


def _alike(single: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the sequences in groups of one length or so, `most` keys at a time, the longest first."""
    columns = max(lengths[n] for n in single)
    if len(single) * columns <= most and columns <= max(min(lengths[n] for n in single) * PADDED, FEW):
        yield list(single)
        return
    members: list[int] = []
    for n in sorted(single, key=lengths.__getitem__, reverse=True):
        if members and ((len(members) + 1) * columns > most or columns > max(lengths[n] * PADDED, FEW)):
            yield members
            members = []
        columns = columns if members else lengths[n]
        members.append(n)
    if members:
        yield members


def _columns(request: AttentionRequest, lengths: list[int], pages: Tensor) -> tuple[Tensor, Tensor | None]:
    """Find the slots and the mask of a group. pages: int32 [n, max_pages]."""
    size, left, columns, device = request.page_size, request.window[0], max(lengths), pages.device
    slots = pages[:, : -(-columns // size), None].long() * size + torch.arange(size, device=device)
    slots = slots.flatten(1)[:, :columns].contiguous()
    windowed = 0 <= left < columns - 1
    if not windowed and min(lengths) == columns:
        return slots, None
    column, ends = torch.arange(columns, device=device), torch.tensor(lengths, device=device)[:, None]
    seen = column < ends
    if windowed:
        seen = seen & (column >= ends - 1 - left)
    # Pages past the end, and before a window, may be another's and hold anything.
    return slots.where(seen, slots.gather(1, ends - 1)), additive(seen[:, None, None], getattr(torch, request.dtype))


def _memory(request: AttentionRequest, slots: Tensor, workspace: Workspace | None) -> tuple[list[Tensor], list[Tensor]]:
    if workspace is None or request.kv_layout == "HND":
        return [], []
    dtype, memory, rows, (n, columns) = getattr(torch, request.dtype), [], [], slots.shape
    heads = (request.kv_heads,) if request.family == "paged" else ()
    for i, width in enumerate(request.dims if heads else request.dims[:1]):
        row = request.kv_heads * width
        # Twice as much at a time, not for each new key.
        room = workspace(f"gathered {i}", dtype.itemsize << (n * columns * row - 1).bit_length()).view(dtype)
        memory.append(room.as_strided((n * columns, *heads, width), (row, width, 1) if heads else (row, 1)))
        rows.append(room.as_strided((n, request.kv_heads, columns, width), (columns * row, width, row, 1)))
    return memory, rows if heads else [rows[0], rows[0][..., : request.dims[1]]]


def numbered_caches(request: AttentionRequest, caches: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the caches as [tokens, ...], None where the tokens of one do not follow each other in memory."""
    found = [] if request.kv_layout == "HND" else [by_number(cache) for cache in caches]
    known = [cache for cache in found if cache is not None]
    return known if len(known) == len(caches) else None


def attend_group(
    request: AttentionRequest,
    attend: GatheredSDPA,
    query: Tensor,
    caches: Sequence[Tensor],
    numbered: Sequence[Tensor] | None,
    group: Group,
) -> tuple[Tensor, Tensor | None]:
    """Attend one group.

    Args:
        query: [T_q, H_q, D], all of the call. numbered: as `numbered_caches` finds them.

    Returns:
        (out [n, H_q, D_v], lse [n, H_q] or None).
    """
    own = query if group.tokens is None else query.index_select(0, group.tokens)
    if group.memory and numbered is not None:
        for cache, memory in zip(numbered, group.memory, strict=True):
            torch.index_select(cache, 0, group.places, out=memory)
        keys, values = group.rows
    else:
        keys, values = (rows.transpose(1, 2) for rows in split_kv(request, caches, group.slots, query.dtype))
    folded = torch.unflatten(own, 1, (request.kv_heads, request.group))
    out, lse = attend.folded(folded, keys, values, group.mask)
    return out.flatten(1, 2), None if lse is None else lse.flatten(1, 2)
