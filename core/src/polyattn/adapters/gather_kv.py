"""Keys and values of a call over a cache, gathered from their pages, and its results packed again (S9).

What adapters without page tables of their own share. Only the gathering itself is here: which rows a query may see is
`polyattn.semantics.reference.visible`, how rows are stored is `polyattn.semantics.paged_kv`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import AttentionRequest, PagedTables
from ..errors import UnsupportedRequestError
from ..semantics.masks import combined
from ..semantics.merge_lse import merge
from ..semantics.paged_kv import Pool, Slots, Tokens, from_column
from ..semantics.reference import visible

__all__ = ["Padded", "empty_result", "finish_output", "split_kv", "write_new_kv"]

_LARGE = 2**31


def split_kv(request: AttentionRequest, caches: Sequence[Tensor], slots: Slots, dtype: torch.dtype) -> list[Tensor]:
    """Read keys and values of tokens from their slots.

    Args:
        request: paged or mla; it says how rows are stored (`kv_dtype`, `kv_layout`, `page_size`).
        caches: key and value pool of a paged call, or the one pool of latent rows.
        slots: page and place of tokens [...], see `polyattn.semantics.paged_kv.Tokens.slots`. dtype: of the result.

    Returns:
        Keys [..., H_kv, D] and values [..., H_kv, D_v]; the value of a latent row is a view of its key.
    """
    rows = [Pool(request, cache).rows(slots, dtype) for cache in caches]
    return rows if request.family == "paged" else [rows[0], rows[0][..., : request.dims[1]]]


def write_new_kv(
    request: AttentionRequest, caches: Sequence[Tensor], slots: Slots, new: Sequence[Tensor | None]
) -> None:
    """Write the new rows of the query tokens into the caches, if the request has `save_kv_cache` and rows are given.

    Args:
        caches: key and value pool, or the pool of latent rows; written to. slots: of the query tokens [T_q].
        new: a row tensor [T_q, H_kv, D | D_v] for each cache, or None.
    """
    for cache, rows in zip(caches, new, strict=False):
        if request.save_kv_cache and rows is not None:
            Pool(request, cache).write(slots, rows)


def finish_output(
    request: AttentionRequest, packed: Tensor, lse: Tensor | None, sinks: Tensor | None, out: Tensor | None
) -> Any:
    """Turn the result of a kernel into what a paged or latent call returns: sinks merged, `out` filled, LSE if asked.

    Args:
        packed: the output [T_q, H_q, D_v] without sinks, of the query's dtype.
        lse: its natural-log LSE [T_q, H_q] float32 without sinks (S5), None = the kernel made none; needed with sinks.
        sinks: float32 [H_q], None = none, or the kernel has counted them. out: [T_q, H_q, D_v] to fill, or None.

    Returns:
        The output, or (output, LSE) if the request wants the LSE.
    """
    if sinks is not None and lse is not None:
        packed, lse = merge([packed], [lse], sinks=sinks, layout="THD")
    packed = packed if out is None else out.copy_(packed)
    return (packed, lse) if request.lse else packed


def empty_result(request: AttentionRequest, query: Tensor, out: Tensor | None) -> Any:
    """Make what a paged or latent call returns if it has no queries, or no keys at all (S7): out = 0, lse = -inf.

    Args:
        query: [T_q, H_q, D]. out: [T_q, H_q, D_v] to fill, or None.

    Returns:
        The output, or (output, LSE [T_q, H_q] float32) if the request wants the LSE.
    """
    packed = query.new_zeros(*query.shape[:2], request.dims[1])
    return finish_output(request, packed, query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32), None, out)


@dataclasses.dataclass(frozen=True)
class Padded:
    """A ragged batch as N sequences of `rows` queries and `columns` keys each. Nothing here waits for the device: the
    sizes follow from the call's host ints.

    Attributes:
        tokens: the query tokens. tables: of the call.
        first: int64 [N], the position of column 0: under a window keys that no query sees are left out.
    """

    request: AttentionRequest
    tokens: Tokens
    tables: PagedTables
    first: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, request: AttentionRequest, query: Tensor, tables: PagedTables) -> Padded:
        """Make it from the queries [T_q, H_q, D] and the tables of a call.

        Raises:
            UnsupportedRequestError: the gathered keys would have 2**31 elements or more.
        """
        seq_lens, max_seqlen_q, max_seqlen_k = tables.seq_lens, tables.max_seqlen_q, tables.max_seqlen_k
        left, columns = request.window[0], max_seqlen_k
        first = torch.zeros_like(seq_lens, dtype=torch.int64)
        if left >= 0 and not request.chunk and left + max_seqlen_q < max_seqlen_k:
            columns = left + max_seqlen_q
            first = (seq_lens - tables.cu_seqlens_q.diff() - left).clamp(min=0).long()
        numel = seq_lens.shape[0] * columns * request.kv_heads * max(request.dims)
        if numel >= _LARGE:
            raise UnsupportedRequestError(
                f"gathering {seq_lens.shape[0]} sequences of up to {columns} keys makes a tensor of {numel} elements; "
                f"kernels below take fewer than 2**31. Split the batch, or ask for torch_native, which gathers one "
                f"sequence at a time"
            )
        return cls(request, Tokens.of(query, tables), tables, first, max_seqlen_q, columns)

    @property
    def seq_lens(self) -> Tensor:
        return self.tables.seq_lens

    @property
    def _full(self) -> bool:
        """Whether every sequence has all `rows` queries, so that packed and padded are views of each other."""
        return self.tokens.row.shape[0] == self.seq_lens.shape[0] * self.rows

    def queries(self, query: Tensor) -> Tensor:
        """[T_q, H_q, D] as [N, H_q, rows, D]; rows past the end of a sequence are of any query."""
        if self._full:
            return torch.unflatten(query, 0, (-1, self.rows)).transpose(1, 2)
        row = torch.arange(self.rows, device=query.device)
        index = (self.tables.cu_seqlens_q[:-1, None] + row).clamp(max=query.shape[0] - 1)
        return query[index].transpose(1, 2)

    def gather(self, caches: Sequence[Tensor], new: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
        """Keys [N, H_kv, columns, D] and values [N, H_kv, columns, D_v], after the rows of the query tokens were
        stored. Columns past the end of a sequence hold its last key: a number, whatever lies in free pages. Those of a
        sequence without keys hold anything."""
        size, page_table = self.request.page_size, self.tables.page_table
        write_new_kv(self.request, caches, self.tokens.slots(page_table, size), new)
        column = torch.arange(self.columns, device=self.first.device)
        position = (self.first[:, None] + column).minimum((self.seq_lens[:, None] - 1).clamp(min=0).long())
        sequence = torch.arange(self.first.shape[0], device=self.first.device)[:, None].expand_as(position)
        real = (self.seq_lens > 0)[:, None].expand_as(position)
        slots = Tokens(sequence, sequence, position, real).slots(page_table, size)
        found = split_kv(self.request, caches, slots, dtype)
        if not self.request.save_kv_cache:
            # A padding query's row goes to a column of its own sequence, which nobody looks at.
            at = (self.tokens.sequence, self.tokens.position - self.first[self.tokens.sequence])
            past = (column >= self.filled[:, None])[..., None, None]
            for rows, fresh in zip(found, new, strict=False):
                if fresh is not None:
                    rows[at] = fresh.to(dtype)
                    # The cache's last row is not written yet, and may be no number.
                    rows.masked_fill_(past, 0.0)
        return [rows.transpose(1, 2) for rows in found]

    @property
    def offset(self) -> Tensor:
        """int64 [N], the column of row 0."""
        return self.seq_lens - self.tables.cu_seqlens_q.diff() - self.first

    @property
    def filled(self) -> Tensor:
        """int64 [N], how many columns are keys."""
        return self.seq_lens - self.first

    def mask(self, attn_mask: Tensor | None) -> Tensor:
        """Who sees what, [N, 1|H_q, rows, columns]: bool, or additive where the caller's mask is."""
        r = self.request
        column = torch.arange(self.columns, device=self.first.device)
        seen = (column < self.filled[:, None])[:, None, None, :]
        offset = self.offset[:, None, None]
        options: dict[str, Any] = {"window": r.window, "chunk": r.chunk, "q_offset": offset, "device": column.device}
        rule = visible(self.rows, self.columns, causal=r.causal, **options)
        if rule is not None:
            seen = seen & rule[:, None]
        if attn_mask is not None and self.columns < attn_mask.shape[3]:
            attn_mask = from_column(attn_mask.expand(self.first.shape[0], -1, -1, -1), self.first, self.columns)
        return combined(attn_mask, seen.expand(-1, -1, self.rows, -1))

    def finish_output(self, result: Tensor, lse: Tensor | None, sinks: Tensor | None, out: Tensor | None) -> Any:
        """What the call returns, from [N, H_q, rows, D_v] and an LSE [N, H_q, rows] before sinks."""
        packed = self._packed(result.transpose(1, 2), 0.0)
        return finish_output(
            self.request, packed, None if lse is None else self._packed(lse.transpose(1, 2), -torch.inf), sinks, out
        )

    def _packed(self, padded: Tensor, blank: float) -> Tensor:
        """[N, rows, ...] as [T_q, ...], the queries of padding rows `blank`."""
        t = self.tokens
        packed = padded.flatten(0, 1) if self._full else padded[t.sequence, t.row]
        # Without a diagonal a query sees keys wherever it is, such as those of an encoder that is shorter.
        sees = t.real if self.request.causal != "none" else (self.seq_lens > 0)[t.sequence]
        return packed.masked_fill(~sees.view(-1, *[1] * (packed.ndim - 1)), blank)
