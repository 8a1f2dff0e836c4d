"""Checks of a latent call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract import PagedTables, scalars
from ...errors import InvalidInputError
from ..kv_quant import FP4_BLOCK, LATENT_FORMATS, LatentFormat, latent_format
from .tensors import FLOATS, check_dense_axis, check_index, check_plain, contents_readable


def check_mla(query: Any, cache: Any, v_head_dim: Any) -> LatentFormat | None:
    """Check the tensors of a latent call; returns the format of rows in fewer bits than the query.

    Raises:
        InvalidInputError: tensors that are none, or do not go together.
    """
    for name, tensor, shape in (
        ("query", query, "[T, H_q, D_c + D_r]"),
        ("cache", cache, "[pages, page_size, D_c + D_r]"),
    ):
        if isinstance(tensor, Tensor):
            check_plain(name, tensor)
        if not isinstance(tensor, Tensor) or tensor.ndim != 3:
            shown = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInputError(f"{name} is {shown}; a tensor {shape} is needed")
    if not scalars.whole(v_head_dim):
        raise InvalidInputError(
            f"v_head_dim={scalars.shown(v_head_dim)} is a {type(v_head_dim).__name__}; give a whole number, the "
            f"leading part of a row that is the value"
        )
    if query.device != cache.device:
        raise InvalidInputError(f"query is on {query.device}, cache on {cache.device}; move them to one device")
    for name, tensor in (("query", query), ("cache", cache)):
        check_dense_axis(name, tensor)
    width = query.shape[2]
    form = latent_format(cache, width) if query.dtype in FLOATS else None
    if query.dtype != cache.dtype and form is None:
        known = ", ".join(f"{str(f.dtype)[6:]} [pages, page_size, {f.entries(width)}]" for f in LATENT_FORMATS)
        raise InvalidInputError(
            f"query is {query.dtype}, cache {cache.dtype} {list(cache.shape)}; one dtype is needed, or rows of a "
            f"format of polyattn.semantics.kv_quant: {known}"
        )
    if not 0 < v_head_dim <= width or (form is None and width != cache.shape[2]):
        raise InvalidInputError(
            f"query rows have {width} numbers, cache rows {cache.shape[2]}, v_head_dim is {v_head_dim}; rows "
            f"must be equal and v_head_dim the leading part of them"
        )
    if form is not None and not form.takes((width, v_head_dim)):
        most = (
            f"{form.widths[0]}, the first {form.widths[1]} of them the value"
            if form.widths
            else f"multiples of {FP4_BLOCK}"
        )
        raise InvalidInputError(
            f"query rows have {width} numbers and v_head_dim is {v_head_dim}; rows of {form.kv_dtype} with scales by "
            f"{form.kv_scales or 'none'} hold {most}"
        )
    return form


def check_token_indices(query: Tensor, token_indices: Any, tables: PagedTables, causal: Any) -> int:
    """Check the lists of a latent call, contents included where they are readable; returns their length.

    Raises:
        InvalidInputError: no list [T_q, topk], a token that its query does not see, or one that is listed twice.
    """
    check_index("token_indices", token_indices, 2, "[T_q, topk]")
    count, topk = token_indices.shape
    if count != query.shape[0] or not topk or token_indices.device != query.device:
        raise InvalidInputError(
            f"token_indices is {tuple(token_indices.shape)} on {token_indices.device}; [{query.shape[0]}, topk] (T_q, "
            f"one token or more) on {query.device} is needed"
        )
    if not count or not contents_readable(token_indices):
        return int(topk)
    _, lens, starts = tables[:3]
    ends = starts[1:].long()
    token = torch.arange(count, device=query.device)
    row = torch.searchsorted(ends, token, right=True).clamp(max=len(lens) - 1)
    room = lens[row] - (0 if causal in (False, "none") else ends[row] - 1 - token)
    sorted_rows = token_indices.sort(1).values
    twice = torch.nn.functional.pad((sorted_rows[:, 1:] == sorted_rows[:, :-1]) & (sorted_rows[:, 1:] >= 0), (1, 0))
    for wrong, why in (
        ((token_indices < -1) | (token_indices >= room[:, None].clamp(min=0)), "is not -1, nor a token that it sees"),
        (twice, "is listed twice"),
    ):
        if bool(wrong.any()):
            n, place = wrong.nonzero()[0].tolist()
            shown = int((sorted_rows if wrong is twice else token_indices)[n, place])
            raise InvalidInputError(
                f"token_indices[{n}]: {shown} {why}; query {n} sees {max(int(room[n]), 0)} tokens, from 0 on, each is "
                f"listed once, and -1 stands for none"
            )
    return int(topk)
