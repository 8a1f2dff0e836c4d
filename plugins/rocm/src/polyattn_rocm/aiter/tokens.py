"""Page tables as AITER's kernels for single tokens read them: lists of tokens, one sequence after another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.adapters import cut_pages
from polyattn.contract import PagedTables

__all__ = ["SPARE", "TokenLists", "token_lists"]

SPARE = 256
"""Entries behind the last token: kernels read the list, and the tokens in it, up to a whole tile past the end."""


class TokenLists(NamedTuple):
    """indptr: int32 [N+1]. indices: int32 [N * max_seqlen_k + SPARE]; those behind indptr[-1] are some real token's."""

    indptr: Tensor
    indices: Tensor


def token_lists(caches: tuple[Tensor, ...], tables: PagedTables) -> tuple[tuple[Tensor, ...], TokenLists]:
    """Caches [pages, page_size, ...] as [tokens, 1, ...] in the same memory, and who owns which token. Nothing here
    waits for the device.

    Raises:
        UnsupportedRequestError: the caches' strides do not allow such a view.
    """
    page_table, seq_lens = tables.page_table, tables.seq_lens
    size, step = caches[0].shape[1], 1
    if size > 1:
        cut, step = cut_pages({str(i): cache for i, cache in enumerate(caches)}, size, 1)
        caches = tuple(cut.values())
    column = torch.arange(tables.max_seqlen_k, dtype=torch.int32, device=page_table.device)
    token = page_table[:, (column // size).clamp(max=page_table.shape[1] - 1)] * step + column % size
    real = column < seq_lens[:, None]
    indptr = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    # What is behind the end is read, and multiplied by 0: it must be a number.
    some = token[(seq_lens > 0).int().argmax(0, keepdim=True), 0]
    indices = some.repeat(token.numel() + SPARE)
    place = torch.where(real, indptr[:-1, None] + column, token.numel())
    indices.scatter_(0, place.flatten().long(), token.where(real, some).flatten())
    return caches, TokenLists(indptr, indices)
