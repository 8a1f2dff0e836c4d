"""Checks of the further keys of a paged or latent call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...contract import KVPart
from ...errors import InvalidInputError
from .paged import check_page_table
from .tensors import check_plain


def check_kv_parts(
    query: Tensor,
    parts: Sequence[Any],
    window: tuple[int, int],
    chunk: int,
    pools: Mapping[str, Tensor],
    page: int,
    scales: Any,
) -> None:
    """Check the parts of a paged or latent call.

    Args:
        window, chunk: the call's. pools: its caches by argument name, `page` being the axis of a page's tokens.
        scales: its k_scale; one for each token belongs to the call's own pool.
    """
    if not isinstance(parts, (tuple, list)) or not all(isinstance(part, KVPart) for part in parts):
        kinds = ", ".join(type(p).__name__ for p in parts) if isinstance(parts, (tuple, list)) else type(parts).__name__
        raise InvalidInputError(f"kv_parts is {kinds}; a list of polyattn.KVPart is needed")
    for name, value, says in (("window", window, window[0] >= 0 or window[1] > 0), ("chunk", chunk, chunk > 0)):
        if parts and says:
            raise InvalidInputError(
                f"{name}={value} and kv_parts exclude each other: a {name} counts positions, which parts do not have. "
                f"Give one page table with all keys"
            )
    for i, part in enumerate(parts):
        given = _own_pool(f"kv_parts[{i}]", part, pools)
        if given and isinstance(scales, Tensor) and scales.ndim > 1 and scales.numel() > 1:
            raise InvalidInputError(
                f"kv_parts[{i}] has a pool of its own, and k_scale {list(scales.shape)} belongs to the tokens of the "
                f"call's; keep the part in the call's pool, or scale by tensor or head"
            )
        pool = next(iter((given or pools).values()))
        try:
            check_page_table(query, part.tables, pool.shape[0], pool.shape[page], grouped=True)
        except InvalidInputError as exc:
            raise InvalidInputError(f"kv_parts[{i}]: {exc}") from exc


def _own_pool(label: str, part: KVPart, pools: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The pool that a part brings, empty where it is in the call's."""
    all_ = {name: getattr(part, name) for name in ("key_cache", "value_cache", "cache")}
    given = {name: tensor for name, tensor in all_.items() if tensor is not None}
    if given and given.keys() != pools.keys():
        raise InvalidInputError(
            f"{label} has a pool of its own by {' and '.join(given)}; pass all or none of {', '.join(pools)}"
        )
    for name, tensor in given.items():
        like = pools[name]
        if isinstance(tensor, Tensor):
            check_plain(f"{label}.{name}", tensor)
        fits = isinstance(tensor, Tensor) and tensor.shape[1:] == like.shape[1:]
        if not fits or tensor.dtype != like.dtype or tensor.device != like.device:
            shown = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInputError(
                f"{label}.{name} is {shown}; one like the call's is needed: [pages, "
                f"{', '.join(map(str, like.shape[1:]))}] {like.dtype} on {like.device}"
            )
        if tensor.shape[-1] != 1 and tensor.stride(-1) != 1:
            raise InvalidInputError(f"{label}.{name}'s last axis is not dense; pass it .contiguous()")
    return given
