"""Paged extend and packed prefill on Hopper: the launchers of `extend_kernel.attend`, and what they take."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Key, PagedTables
from polyattn_triton import runtime
from polyattn_triton.hopper.forward import on_hopper
from polyattn_triton.kernels.choices import EPOCH, chosen
from polyattn_triton.kernels.pools import Matrix, Memory, Pools, packed_pools, pools_of
from polyattn_triton.kernels.room import TOO_LARGE, Loop, Room, refuse
from polyattn_triton.kernels.rules import LOG2E
from polyattn_triton.kernels.splits import MOST_RANGES, ranges
from polyattn_triton.records.tuned import HOPPER_EXTEND

__all__ = [
    "Config",
    "config_for",
    "cuts_for",
    "extend",
    "fits",
    "fits_packed",
    "packed",
    "ranges_for",
    "takes",
    "takes_packed",
    "takes_parts",
]

_ROWS = 64
"""Of a warpgroup, queries times heads of a group."""
_STEPS = 3
"""Steps of keys that a tile must have for its loads and its epilogue to be hidden: of a window of 128 at D = 64 the
portable kernel computes 116 TFLOP/s on an H200, this one 85; of one of 1024 at D = 128 333 and 460."""
_RANGE = 1024
"""Keys of a range of a further part, at least."""
_COLUMNS = 64
"""Of a box of keys: what 128 bytes hold."""


class Config(NamedTuple):
    """One way to run the kernel.

    Attributes:
        keys: of a step. stages: of the ring of K, and of that of V.
        turns: warpgroups take turns at issuing products. registers: of a consumer's thread.
        warpgroups: consumers, 2 or 3. overlap: a block's product with V waits for the next block's with K.
    """

    keys: int
    stages: int
    turns: bool = True
    registers: int = 240
    warpgroups: int = 2
    overlap: bool = True

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.warpgroups * _ROWS


# By head dim. Shared memory is what limits: 227 KiB hold Q and both rings. At 64 the exponentials take as long as the
# products: a third consumer hides them better than overlap within one.
_CONFIGS = {
    64: Config(128, 2, registers=160, warpgroups=3, overlap=False),
    128: Config(128, 2),
    256: Config(64, 2),
}


def config_for(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int, group: int) -> Config:
    """How heads of this dim run: as was measured there, else as on an H200. `page_size`: 0 of packed keys."""
    return _chosen(device, dtype, head_dim, page_size, group, EPOCH.value)


@functools.lru_cache(maxsize=1024)
def _chosen(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int, group: int, _epoch: int) -> Config:
    key = _key(dtype, head_dim, page_size, group)
    return chosen(HOPPER_EXTEND, key, _CONFIGS[head_dim], device, (_room(head_dim),))


def _key(dtype: torch.dtype, head_dim: int, page_size: int, group: int) -> Key:
    return (str(dtype).removeprefix("torch."), head_dim, page_size, group)


def _room(head_dim: int) -> Room:
    """What a configuration needs: Q, and the rings of K and V."""

    def loop(c: Config) -> Loop:
        row = 2 * head_dim
        return Loop(c.rows, c.keys, 4 * c.warpgroups, c.stages, c.rows * row, 2 * c.keys * row, 2 * c.keys * row, 2)

    return Room(loop, (("stages", 2), ("keys", 64)))


def short(request: AttentionRequest) -> bool:
    """Whether a causal window leaves no tile `_STEPS` steps of keys."""
    left, config = request.window[0], _CONFIGS[request.head_dim]
    keys = left + config.rows // request.group
    return request.causal != "none" and left >= 0 and keys < _STEPS * config.keys


def takes(request: AttentionRequest) -> bool:
    """Whether `extend` is for calls like this on a Hopper: what is known before there are tensors.

    It takes what `takes_parts`, causal or full, a left window that is not `short`, sinks, the masks of trees.
    """
    r = request
    return (
        takes_parts(r)
        and _takes_span(r)
        and (r.mask == "none" or (r.mask == "bool" and r.tree))
        # Parts are float32 until they are merged.
        and not r.kv_parts
    )


def takes_parts(request: AttentionRequest) -> bool:
    """Whether `extend` is for further parts of such calls, all of whose keys are seen: bf16 and fp16 with a cache of
    the same, D = D_v of 64, 128 and 256, pages of a multiple of 16 tokens, groups of 1 to 64 heads."""
    r = request
    return (
        _takes_heads(r)
        and r.kv_storage == r.dtype
        and not r.kv_scales
        # Boxes of fewer rows are not worth their copies.
        and r.page_size % 16 == 0
    )


def takes_packed(request: AttentionRequest) -> bool:
    """Whether `packed` is for packed calls like this on a Hopper: bf16 and fp16, D = D_v of 64, 128 and 256, groups of
    1 to 64 heads, causal from the bottom right or full, a left window that is not `short`, sinks."""
    r = request
    return _takes_heads(r) and _takes_span(r) and r.causal != "top_left" and r.mask == "none"


def _takes_heads(request: AttentionRequest) -> bool:
    r = request
    return (
        r.dtype in ("bfloat16", "float16")
        and r.head_dim in _CONFIGS
        and r.same_dims
        and 1 <= r.group <= 64
        and (r.scale is None or r.scale > 0)
        and not r.softcap
    )


def _takes_span(request: AttentionRequest) -> bool:
    return not request.chunk and request.window[1] < 0 and not short(request)


def fits(key_cache: Tensor, value_cache: Tensor, out: Tensor | None, *, hnd: bool) -> bool:
    """Whether `extend`, which `takes` such a call, can be given these caches: on a Hopper, where TMA reaches them.

    Nothing here is of a batch. A query that TMA cannot read is copied.

    Args:
        out: None of parts, which are float32.
    """
    return (
        on_hopper(key_cache.device)
        and (out is None or out.dtype is key_cache.dtype)
        and pools_of(key_cache, value_cache, hnd) is not None
    )


def fits_packed(query: Tensor, key: Tensor, value: Tensor, out: Tensor, max_seqlen_q: int) -> bool:
    """Whether `packed`, which `takes_packed` such a call, can be given these tensors: as `fits`, and where the longest
    sequence has more rows than one consumer.

    Args:
        query, out: [T_q, H_q, D]; key, value: [T_k, H_kv, D].
    """
    return (
        on_hopper(query.device)
        and out.dtype is key.dtype
        and query.numel() > 0
        and key.numel() > 0
        # Of few rows most of a tile would be empty.
        and max_seqlen_q * query.shape[1] > _ROWS * key.shape[1]
        and packed_pools(key, value) is not None
    )


def cuts_for(device: torch.device, sequences: int, max_seqlen_q: int, max_seqlen_k: int, heads: int, group: int,
    head_dim: int,
) -> int:  # fmt: skip
    """Ranges that the keys of each sequence of a part are cut into, so that its tiles fill the device."""
    tiles = sequences * -(-max_seqlen_q * group // _CONFIGS[head_dim].rows) * heads
    return max(min(runtime.processors(device) // max(tiles, 1), max_seqlen_k // _RANGE, MOST_RANGES), 1)


def ranges_for(
    device: torch.device, dtype: torch.dtype, sequences: int, max_seqlen_q: int, max_seqlen_k: int, heads: int,
    group: int, head_dim: int, page_size: int,
) -> int:  # fmt: skip
    """Ranges that the keys of each sequence of a call are cut into so that it ends soonest; 1: they stay whole."""
    config = config_for(device, dtype, head_dim, page_size, group)
    unit = page_size // piece_of(page_size, config.keys)
    tiles = sequences * -(-max_seqlen_q * group // config.rows) * heads
    return ranges(runtime.processors(device), tiles, -(-max_seqlen_k // config.keys), unit)


def _placed(query: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The query where TMA can read it, a copy if need be, and its strides."""
    # Nothing steps over an axis of size 1: its stride may be any number, but not for TMA.
    token, head = (8 if size == 1 else step for size, step in zip(query.shape[:2], query.stride()[:2], strict=True))
    if query.data_ptr() & 15 or token & 7 or head & 7 or token <= 0 or head <= 0 or query.stride(2) != 1:
        query = query.clone(memory_format=torch.contiguous_format)
        return query, query.stride()
    return query, (token, head, 1)


@functools.lru_cache(maxsize=4096)
def _query_boxes(memory: Memory, sizes: tuple[int, ...], strides: tuple[int, ...], group: int) -> Any:
    """Descriptors take longer to make than a launch, and allocators hand out the same places again: hence caches."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    swizzled = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(memory, list(sizes), list(strides), [64 // group, group, sizes[2]], swizzled)


@functools.lru_cache(maxsize=1024)
def _page_boxes(memory: Memory, matrix: Matrix, rows: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    swizzled = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(memory, matrix.shape, matrix.strides, [rows, _COLUMNS], swizzled)


def piece_of(page_size: int, keys: int) -> int:
    """Rows of a box: the largest power of two that divides pages and blocks of keys."""
    return min(keys, page_size & -page_size)


def tiles_of(tokens: int, sequences: int, max_seqlen_q: int, group: int, rows: int) -> tuple[int, int, bool]:
    """(tiles of the longest sequence, numbers of tiles, whether all sequences are that long), for tiles of `rows`."""
    tiles = -(-max_seqlen_q * group // rows)
    uniform = tokens == sequences * max_seqlen_q
    return tiles, sequences * tiles if uniform else tokens * group // rows + sequences, uniform


def extend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    tables: PagedTables,
    page_size: int,
    hnd: bool,
    causal: bool,
    left: int = -1,
    scale: float,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None = None,
    config: Config | None = None,
    cuts: int = 0,
) -> None:
    """As `kernels.extend.extend`, for a call that it `takes` and whose caches it `fits`. Waits for nothing.

    Args:
        left: keys seen before a query's own position, -1 = no bound.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k], bool, of a tree: read for the last queries' own columns.
        config: instead of that of the table.
        cuts: above 0, the keys of each sequence are cut into so many ranges: out and lse are float32
            [cuts, T_q, H_q, D] and [cuts, T_q, H_q], a part of each. Without a window, a mask and sinks.
    """
    heads = key_cache.shape[1 if hnd else 2]
    pools = pools_of(key_cache, value_cache, hnd)
    assert pools is not None
    assert not cuts or not (left >= 0 or attn_mask is not None or sinks is not None)
    mask_strides = (0, 0, 0)
    if attn_mask is not None:
        attn_mask = attn_mask if attn_mask.stride(3) == 1 else attn_mask.contiguous()
        steps = zip(attn_mask.shape, attn_mask.stride(), strict=True)
        n, h, i, _ = (step if size > 1 else 0 for size, step in steps)
        mask_strides = (n, i, h)
    keys = _Keys(key_cache, value_cache, pools, heads, tables.page_table, tables.seq_lens, page_size)
    _launch(
        query, keys, tables.seq_lens.shape[0], tables.cu_seqlens_q, tables.max_seqlen_q, (attn_mask, *mask_strides),
        causal=causal, left=left, scale=scale, sinks=sinks, out=out, lse=lse, config=config, cuts=cuts,
    )  # fmt: skip


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    causal: bool,
    left: int = -1,
    scale: float,
    sinks: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Write `out`, and `lse` where it is given, of a packed call that it `takes_packed` and whose tensors it
    `fits_packed`. Waits for nothing.

    Args:
        query, out: [T_q, H_q, D]; key, value: [T_k, H_kv, D]; lse: float32 [T_q, H_q].
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1]. causal, left: from the bottom right; keys seen before a query's own
            position, -1 = no bound.
        sinks: [H_q] logits. config: instead of that of the table.
    """
    pools = packed_pools(key, value)
    assert pools is not None
    keys = _Keys(key, value, pools, key.shape[1], None, cu_seqlens_k, 0)
    _launch(
        query, keys, cu_seqlens_q.shape[0] - 1, cu_seqlens_q, max_seqlen_q, (None, 0, 0, 0), causal=causal, left=left,
        scale=scale, sinks=sinks, out=out, lse=lse, config=config,
    )  # fmt: skip


class _Keys(NamedTuple):
    """Keys and values of all sequences, as matrices of rows, and where each sequence has its own.

    Attributes:
        heads: H_kv. table: of pages, None of packed keys. lens: int32 [N], of packed keys where they begin, [N + 1].
        page_size: 0 of packed keys.
    """

    key: Tensor
    value: Tensor
    pools: Pools
    heads: int
    table: Tensor | None
    lens: Tensor
    page_size: int


@runtime.on_its_device
def _launch(
    query: Tensor, keys: _Keys, sequences: int, starts: Tensor, max_seqlen_q: int,
    mask: tuple[Tensor | None, int, int, int], *, causal: bool, left: int, scale: float, sinks: Tensor | None,
    out: Tensor, lse: Tensor | None, config: Config | None, cuts: int = 0,
) -> None:  # fmt: skip
    """Arguments as `extend`; `starts`: of sequences among the queries. `mask`: and its strides by (sequence, query,
    head)."""
    from polyattn_triton.hopper.extend_kernel import attend

    T_q, H_q, D = query.shape
    heads, pools, page_size = keys.heads, keys.pools, keys.page_size
    group = H_q // heads
    given, config = config, config or config_for(query.device, query.dtype, D, page_size, group)
    query, strides = _placed(query)
    rows = piece_of(page_size, config.keys) if page_size else config.keys
    tiles, numbers, uniform = tiles_of(T_q, sequences, max_seqlen_q, group, config.rows)
    steps = out.stride()[-3:-1], (0, 0) if lse is None else lse.stride()[-2:]
    out_part, lse_part = (out.stride(0), 0 if lse is None else lse.stride(0)) if cuts else (0, 0)
    boxed = _ROWS % group == 0
    every = numbers * heads * max(cuts, 1)
    programs = min(runtime.processors(query.device), every)
    # A tensor of the call's own: calls on other streams have theirs, and a graph has its own.
    queue = None if uniform or every == programs else torch.zeros(1, dtype=torch.int32, device=query.device)
    try:
        attend[(programs,)](
            _query_boxes(Memory(query.data_ptr(), query.dtype), query.shape, strides, group) if boxed else query,
            _page_boxes(Memory(keys.key.data_ptr(), keys.key.dtype), pools.key, rows),
            _page_boxes(Memory(keys.value.data_ptr(), keys.value.dtype), pools.value, rows),
            out, lse, sinks, *mask, keys.table, keys.lens, starts, queue,
            0 if keys.table is None else keys.table.stride(0), pools.row, pools.column, pools.page_rows, sequences,
            tiles, numbers, heads, max(left, 0), scale * LOG2E.value,
            out_part, *steps[0], lse_part, *steps[1], strides[0] // 8, strides[1] // 8, cuts,
            CAUSAL=causal, LEFT=left >= 0, TREE=mask[0] is not None, GROUP=group, PAGE=page_size, UNIFORM=uniform,
            D=D, BLOCK_N=config.keys, WARPGROUPS=config.warpgroups, STAGES=config.stages, OVERLAP=config.overlap,
            TURNS=config.turns, REGISTERS=config.registers, PARTS=cuts > 0, num_warps=4,
        )  # fmt: skip
    except TOO_LARGE as error:
        asked = _key(query.dtype, D, page_size, group)
        refuse(HOPPER_EXTEND, asked, None, query.device, config, error, last=given is not None)
        _launch(
            query, keys, sequences, starts, max_seqlen_q, mask, causal=causal, left=left, scale=scale, sinks=sinks,
            out=out, lse=lse, config=None, cuts=cuts,
        )  # fmt: skip
