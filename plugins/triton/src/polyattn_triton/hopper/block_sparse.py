"""Block-sparse attention on Hopper: the launcher of `listed.attend_listed`, and what it takes."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn_triton import runtime
from polyattn_triton.hopper.forward import Axes, View, axes_of, describable, described, on_hopper
from polyattn_triton.hopper.groups import GROUP, grouped
from polyattn_triton.kernels.block_sparse import Lists
from polyattn_triton.kernels.merge import merge
from polyattn_triton.kernels.room import TOO_LARGE, too_large
from polyattn_triton.kernels.rules import LOG2E
from polyattn_triton.records.tuned import BLOCK_SPARSE

__all__ = ["Config", "config_for", "fits", "forward", "reachable", "takes"]


class Config(NamedTuple):
    """One way to run the kernel.

    Attributes:
        keys: of a step. slots: of a ring of `keys` keys or values each; there are two rings with blocks of 64 queries.
        apart: the output leaves through buffers of its own, not the query's, so that the next query comes meanwhile.
    """

    keys: int
    slots: int
    apart: bool


_CACHED, _CACHED_HBM3E = 30 << 20, 45 << 20
"""Bytes of the keys and values of a head up to which they are read in one go, though lists read them in an order of
their own, and the L2 cache has 50 MB: by an H100, and by an H200, whose memory is half as fast again. On an H100 lists
of a fifth of 39 MB took 43 ms in one go and 37 in two parts, of 59 MB 56 and 42; an H200 took 32 for the former in one
go."""
_HBM3E = 100 << 30
"""Bytes of memory of a device that has the faster one, at least."""
_ROUNDS = 12
"""Turns in which heads are taken where keys are: so small is the share of the output that has parts."""
_MOST_KEYS = 2**26
"""Above any sequence: an entry of `groups.grouped` has 26 bits for the number of a key."""

# By head dim and block_q. Shared memory is what limits: 227 KiB hold Q, the slots, and O where it is apart.
_CONFIGS = {
    (64, 64): Config(128, 5, True),
    (64, 128): Config(128, 6, True),
    (128, 64): Config(128, 3, False),
    (128, 128): Config(128, 5, True),
    (256, 128): Config(64, 5, False),
}


def config_for(head_dim: int, block_q: int) -> Config:
    """How blocks of queries of this head dim run on an H200."""
    return _CONFIGS[head_dim, block_q]


def takes(dtype: torch.dtype, head_dim: int, block_shape: tuple[int, int], scale: float) -> bool:
    """Whether `forward` is for calls like this on a Hopper: what is known before there are tensors.

    It takes bf16 and fp16, blocks of 64 and 128, head dims 64 and 128, and 256 where query blocks are of 128.
    """
    block_q, block_k = block_shape
    half = dtype in (torch.bfloat16, torch.float16)
    return half and scale > 0 and block_k in (64, 128) and (head_dim, block_q) in _CONFIGS


def fits(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> bool:
    """Whether `forward`, which `takes` such a call, can be given these tensors: on a Hopper, where TMA reaches them."""
    return (
        on_hopper(query.device)
        and query.numel() > 0
        and 0 < key.shape[2] < _MOST_KEYS
        and not (query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr()) & 15
        and all(describable(*found) for found in axes_of(query, key, value, out))
    )


def reachable(tensor: Tensor) -> Tensor:
    """`tensor` where TMA reaches it, else a copy."""
    if tensor.data_ptr() & 15 or not describable(tensor.shape, tensor.stride()):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


@functools.lru_cache(maxsize=1024)
def _views(unit: int, wide: int, *axes: Axes) -> tuple[tuple[View], ...]:
    query, key, value, out = axes
    width = query[0][3]
    boxes = (
        *((query, 64, width), (key, unit, 64), (value, unit, 64)),
        *((key, wide, 64), (value, wide, 64), (out, 64, width)),
    )
    return tuple((View("BHSD", *found, rows, columns),) for found, rows, columns in boxes)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: Lists,
    *,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """As `kernels.block_sparse.forward`, for a call that it `takes` and whose tensors it `fits`."""
    parts = -(-2 * key[0, 0].nbytes // _cached(key.device))
    if parts > 1 and lists.starts is not None:
        _in_parts(parts, query, key, value, lists, scale=scale, out=out, lse=lse, config=config)
    else:
        _launched(query, key, value, lists, scale=scale, out=out, lse=lse, config=config)


@functools.cache
def _cached(device: torch.device) -> int:
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= _HBM3E
    return _CACHED_HBM3E if large else _CACHED


def _in_parts(
    parts: int, query: Tensor, key: Tensor, value: Tensor, lists: Lists, *, out: Tensor, lse: Tensor | None, **more: Any
) -> None:
    """`forward` over parts of the keys one after the other, merged; some heads at a time, so that parts are small."""
    (B, H_kv, S_k, _), group = key.shape, query.shape[1] // key.shape[1]
    together = -(-H_kv // _ROUNDS)
    for b, first in itertools.product(range(B), range(0, H_kv, together)):
        keys, mine = (slice(first * n, (first + together) * n) for n in (1, group))
        q, k, v, o = (t[b : b + 1, heads] for t, heads in ((query, mine), (key, keys), (value, keys), (out, mine)))
        some = lists.of(slice(b, b + 1))
        sides = {"counts": mine, "indices": mine, "starts": keys, "valid": keys}
        tensors = ((name, heads, getattr(some, name)) for name, heads in sides.items())
        own = some._replace(**{name: t if t.shape[1] == 1 else t[:, heads] for name, heads, t in tensors})
        outs, lses = out.new_empty(parts, *q.shape), q.new_empty(parts, *q.shape[:3], dtype=torch.float32)
        for n in range(parts):
            within = (S_k * n // parts, S_k * (n + 1) // parts)
            _launched(q, k, v, own, out=outs[n], lse=lses[n], within=within, **more)
        merged = None if lse is None else lse[b, mine].mT
        merge(outs[:, 0].transpose(1, 2), lses[:, 0].mT, out=o[0].transpose(0, 1), lse=merged)


@runtime.on_its_device
def _launched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: Lists,
    *,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    config: Config | None,
    within: tuple[int, int] | None = None,
) -> None:
    """within: see `grouped`."""
    from polyattn_triton.hopper.listed import attend_listed

    B, H, S_q, D = query.shape
    S_k = key.shape[2]
    block_q, block_k = lists.block_q, lists.block_k
    config = config or config_for(D, block_q)
    packed = lists.starts is not None
    if packed:
        lists, block_k = grouped(lists, H, key.shape[1], S_k, within), GROUP.value
    partly = not packed and (lists.valid is not None or S_k % block_k != 0)
    unit = min(config.keys, block_k)
    tensors = (query, key, value, key, value, out)
    views = _views(unit, 4 * unit if packed else unit, *axes_of(query, key, value, out))
    blocks = -(-S_q // block_q)
    tiles = B * H * blocks
    programs = min(runtime.processors(query.device), -(-tiles * block_q // 128))
    try:
        attend_listed[(programs,)](
            *(described(view, x.data_ptr(), x.dtype)[0] for view, x in zip(views, tensors, strict=True)),
            lse, lists.counts, lists.indices, lists.valid, blocks, H, H // key.shape[1], tiles, S_q, S_k,
            scale * LOG2E.value, *lists.strides(), BLOCK_Q=block_q, BLOCK_K=block_k, COUNT=config.keys // unit,
            SLOTS=config.slots, PARTLY=partly, APART=config.apart, GROUPS=packed, num_warps=4,
        )  # fmt: skip
    except TOO_LARGE as error:
        asked = ("forward", str(query.dtype).removeprefix("torch."), D, block_q, block_k)
        raise too_large(BLOCK_SPARSE, asked, query.device, error) from error
