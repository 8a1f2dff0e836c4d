"""Block maps of the block-sparse family (S8): what one must be, and which keys it lets a query see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import scalars
from ..errors import InvalidInputError
from .validation import contents_readable, has_shapes_only

__all__ = [
    "block_shape_of",
    "check_block_map",
    "check_bool_map",
    "check_one_given",
    "check_starts_given",
    "flags_of",
    "lists_of",
    "visible_keys",
]


def check_block_map(
    query: Tensor,
    key: Tensor,
    block_shape: tuple[int, int],
    block_counts: Tensor,
    block_indices: Tensor,
    block_valid: Tensor | None = None,
    block_starts: Tensor | None = None,
) -> None:
    """Check the tensors of a block map against the queries and keys they are for.

    Shapes, dtypes and devices always; contents on the CPU, on a device only under POLYATTN_VALIDATE=1.

    Args:
        query: [B, H_q, S_q, D]; key: [B, H_kv, S_k, D].
        block_shape: (block_q, block_k), tokens of a block.
        block_counts, block_indices, block_valid, block_starts: see `polyattn.contract.BlockSparseForward`.

    Raises:
        InvalidInputError: names what is wrong, its value and what is allowed.
    """
    (B, H, S_q), S_k = query.shape[:3], key.shape[2]
    block_q, block_k = block_shape
    if block_q < 1 or block_k < 1:
        raise InvalidInputError(
            f"block_shape={block_shape} must be two numbers of tokens, (block_q, block_k), each 1 or more"
        )
    nQ, nK = -(-S_q // block_q), -(-S_k // block_k)
    lists = f"B={B}, H_q={H}, {nQ} blocks of {block_q} queries"
    shared = ((1, B), (1, H), (nQ,))
    _check("block_counts", block_counts, query.device, shared, f"[B|1, H_q|1, nQ]: {lists}")
    _check("block_indices", block_indices, query.device, (*shared, ()), f"[B|1, H_q|1, nQ, max]: {lists}")
    if block_starts is not None:
        words = f"[B|1, H_kv|1, nK]: B={B}, H_kv={key.shape[1]}, any number of blocks"
        _check("block_starts", block_starts, query.device, ((1, B), (1, key.shape[1]), ()), words)
        same = tuple((size,) for size in block_starts.shape)
        words = f"{list(block_starts.shape)}, the shape of block_starts"
        _check("block_valid", block_valid, query.device, same, words)
        nK = block_starts.shape[2]
    elif block_valid is not None:
        _check("block_valid", block_valid, query.device, ((nK,),), f"[nK]: {nK} blocks of {block_k} keys")
    if contents_readable(block_counts) and not has_shapes_only(block_counts):
        _check_contents(block_k, nK, block_counts, block_indices, block_valid)
        if block_starts is not None and block_valid is not None:
            _check_starts(S_k, block_starts, block_valid)


def block_shape_of(block_shape: Any) -> tuple[int, int]:
    """`block_shape`, checked: (block_q, block_k), each 1 or more."""
    pair = isinstance(block_shape, (tuple, list)) and len(block_shape) == 2
    if not pair or any(not scalars.whole(n) or n < 1 for n in block_shape):
        raise InvalidInputError(
            f"block_shape={scalars.shown(block_shape)} must be two numbers of tokens, (block_q, block_k), each 1 or "
            "more"
        )
    return int(block_shape[0]), int(block_shape[1])


def check_one_given(*, map_given: bool, lists_given: bool) -> None:
    """Check that a call has a map or lists, and not both."""
    if map_given == lists_given:
        given = "both" if map_given else "neither"
        raise InvalidInputError(
            f"{given} of block_map and lists given: pass block_map, bool [B|1, H_q|1, nQ, nK], or lists, (counts, "
            "indices)"
        )


def check_starts_given(*, map_given: bool, valid_given: bool) -> None:
    """Check what must be given beside `block_starts`: lists of blocks, and how many keys each block has.

    Raises:
        InvalidInputError: a map of flags is given, or no sizes are.
    """
    if map_given:
        raise InvalidInputError(
            "block_starts with block_map: a map of flags cuts the keys into equal blocks. Pass lists=(counts, indices)"
        )
    if not valid_given:
        raise InvalidInputError(
            "block_starts without block_valid: pass block_valid, int32 of the same shape, the number of keys of each "
            "block"
        )


def check_bool_map(query: Tensor, key: Tensor, block_shape: tuple[int, int], block_map: Any) -> None:
    """Check a map given as a tensor of flags.

    Args:
        query: [B, H_q, S_q, D]; key: [B, H_kv, S_k, D]. block_shape: (block_q, block_k), tokens of a block.
        block_map: bool [B|1, H_q|1, nQ, nK].

    Raises:
        InvalidInputError: names what is wrong, its value and what is allowed.
    """
    (B, H, S_q), S_k = query.shape[:3], key.shape[2]
    nQ, nK = (-(-length // block) for length, block in zip((S_q, S_k), block_shape, strict=True))
    blocks = f"{nQ} blocks of {block_shape[0]} queries, {nK} of {block_shape[1]} keys"
    words = f"[B|1, H_q|1, nQ, nK]: B={B}, H_q={H}, {blocks}"
    _check("block_map", block_map, query.device, ((1, B), (1, H), (nQ,), (nK,)), words, torch.bool)


def lists_of(block_map: Tensor) -> tuple[Tensor, Tensor]:
    """A map of flags as lists. Nothing waits for the device.

    Args:
        block_map: bool [..., nQ, nK].

    Returns:
        (counts int32 [..., nQ], indices int32 [..., nQ, nK]): the numbers of the blocks that are True, ascending, with
        the others behind them.
    """
    indices = (~block_map).to(torch.uint8).argsort(dim=-1, stable=True)
    return block_map.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def _check(
    name: str,
    tensor: Any,
    device: torch.device,
    sizes: Sequence[tuple[int, ...]],
    words: str,
    dtype: torch.dtype = torch.int32,
) -> None:
    """`sizes`: the allowed ones of each axis, () = any."""
    kind = str(dtype).removeprefix("torch.")
    if not isinstance(tensor, Tensor):
        raise InvalidInputError(f"{name} is a {type(tensor).__name__}; a tensor of {kind} {words} is needed")
    if tensor.dtype != dtype or tensor.device != device:
        raise InvalidInputError(f"{name} is {tensor.dtype} on {tensor.device}; {dtype} on {device} is needed")
    found = tuple(tensor.shape)
    if len(found) != len(sizes) or any(allowed and n not in allowed for n, allowed in zip(found, sizes, strict=True)):
        raise InvalidInputError(f"{name} has the shape {found}; needed is {words}")


def _check_contents(block_k: int, nK: int, counts: Tensor, indices: Tensor, valid: Tensor | None) -> None:
    most = indices.shape[-1]
    if (wrong := _first(counts, (counts < 0) | (counts > most))) is not None:
        raise InvalidInputError(f"block_counts holds {wrong}; block_indices has room for 0 to {most} key blocks a list")
    listed = torch.arange(most, device=counts.device) < counts[..., None]
    if (wrong := _first(indices, listed & ((indices < 0) | (indices >= nK)))) is not None:
        raise InvalidInputError(f"block_indices lists block {wrong}; there are {nK} of {block_k} keys, counted from 0")
    if valid is not None and (wrong := _first(valid, (valid < 0) | (valid > block_k))) is not None:
        raise InvalidInputError(f"block_valid holds {wrong}; a block has 0 to {block_k} valid tokens")


def _check_starts(S_k: int, starts: Tensor, valid: Tensor) -> None:
    ends = starts + valid
    if (wrong := _first(starts, (valid > 0) & ((starts < 0) | (ends > S_k)))) is not None:
        raise InvalidInputError(f"block_starts holds {wrong}; each block must lie within the {S_k} keys")
    # In the order of their starts no block may begin before the one before it ends. Empty ones are nowhere.
    places = torch.where(valid > 0, starts, S_k)
    order = places.argsort(dim=-1, stable=True)
    first, last = places.gather(-1, order), torch.where(valid > 0, ends, S_k).gather(-1, order)
    if (wrong := _first(first[..., 1:], first[..., 1:] < last[..., :-1])) is not None:
        raise InvalidInputError(f"block_starts: two blocks have the key {wrong}; a key is in one block at most")


def _first(tensor: Tensor, wrong: Tensor) -> int | None:
    """The first number that is wrong."""
    found = tensor.expand_as(wrong)[wrong]
    return int(found[0]) if found.numel() else None


def visible_keys(
    block_shape: tuple[int, int],
    S_q: int,
    S_k: int,
    block_counts: Tensor,
    block_indices: Tensor,
    block_valid: Tensor | None = None,
    block_starts: Tensor | None = None,
    group: int = 1,
) -> Tensor:
    """A block map as the attention mask that it stands for: what block-sparse attention is defined by.

    Args:
        block_shape: (block_q, block_k). S_q, S_k: tokens of the queries and keys.
        block_counts, block_indices, block_valid, block_starts: see `polyattn.contract.BlockSparseForward`.
        group: H_q / H_kv, which matters where block_starts differ by head.

    Returns:
        bool [B|1, H_q|1, S_q, S_k], True = the query sees the key.
    """
    block_q, block_k = block_shape
    key_blocks = -(-S_k // block_k) if block_starts is None else block_starts.shape[-1]
    seen = _flags(block_counts, block_indices, key_blocks)
    if block_starts is not None:
        assert block_valid is not None, "checked by check_starts_given"
        owners = _owners(block_starts, block_valid, block_k, S_k)
        owners = owners.repeat_interleave(group, 1) if owners.shape[1] > 1 else owners
        seen = seen.repeat_interleave(block_q, -2)[..., :S_q, :]
        seen[..., key_blocks] = False
        B, H = (max(seen.shape[axis], owners.shape[axis]) for axis in (0, 1))
        return seen.expand(B, H, -1, -1).gather(-1, owners[..., None, :].expand(B, H, S_q, -1))
    seen = seen[..., :key_blocks]
    seen = seen.repeat_interleave(block_q, -2)[..., :S_q, :].repeat_interleave(block_k, -1)[..., :S_k]
    if block_valid is not None:
        place = torch.arange(S_k, device=seen.device)
        seen = seen & (place % block_k < block_valid.repeat_interleave(block_k)[:S_k])
    return seen


def flags_of(block_counts: Tensor, block_indices: Tensor, key_blocks: int) -> Tensor:
    """Lists as a map of flags. Nothing waits for the device.

    Args:
        block_counts: int32 [B|1, H_q|1, nQ]. block_indices: int32 [B|1, H_q|1, nQ, max]. key_blocks: nK.

    Returns:
        bool [B|1, H_q|1, nQ, nK].
    """
    return _flags(block_counts, block_indices, key_blocks)[..., :key_blocks]


def _flags(block_counts: Tensor, block_indices: Tensor, key_blocks: int) -> Tensor:
    """As `flags_of`, with a last column of no meaning."""
    listed = torch.arange(block_indices.shape[-1], device=block_counts.device) < block_counts[..., None]
    # What is not listed goes to a column of its own, wherever its entry points.
    numbers = torch.where(listed, block_indices, key_blocks).long()
    seen = torch.zeros(*numbers.shape[:-1], key_blocks + 1, dtype=torch.bool, device=numbers.device)
    return seen.scatter_(-1, numbers, True)


def _owners(starts: Tensor, valid: Tensor, block_k: int, S_k: int) -> Tensor:
    """The block that each key is in, int64 [B|1, H_kv|1, S_k]; nK where it is in none."""
    B, H, blocks = starts.shape
    within = torch.arange(block_k, device=starts.device)
    inside = within < valid[..., None]
    places = torch.where(inside, starts[..., None] + within, S_k).long().flatten(2)
    numbers = torch.arange(blocks, device=starts.device)[:, None].expand(B, H, -1, block_k).flatten(2)
    owners = torch.full((B, H, S_k + 1), blocks, dtype=torch.int64, device=starts.device)
    return owners.scatter_(-1, places, numbers)[..., :S_k]
