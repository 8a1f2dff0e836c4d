"""Dense prefill on Hopper: the launcher of `kernel.attend`, and what it takes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip

from polyattn_triton.kernels.pools import Memory
from polyattn_triton.kernels.room import TOO_LARGE, too_large
from polyattn_triton.kernels.rules import LOG2E
from polyattn_triton.kernels.tiles import Spec, parts
from polyattn_triton.records.tuned import FORWARD

__all__ = [
    "Axes",
    "Config",
    "View",
    "axes_of",
    "config_for",
    "describable",
    "described",
    "fits",
    "forward",
    "on_hopper",
    "plain",
    "supports",
    "takes",
]

Axes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""

_SHORT = 1024
"""Queries up to which three consumers of 64 rows would see too much of a causal tile for nothing."""
_TOGETHER = 32 << 20
"""Bytes of keys and values of the tiles that run at a time where rows differ in length: an L2 of 50 MiB with room."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    Attributes:
        warpgroups: consumers of 64 query rows each beside a producer, 2 or 3; or 1: eight warps with 128 rows, without.
        block_n: keys of a step. stages: of the ring of K, and of that of V.
        overlap: the products of a step with V run during the softmax of the next.
        turns: warpgroups take turns at issuing products.
        registers: of a consumer's thread. persistent: one program per multiprocessor, not one per tile.
        apart: the output leaves through buffers of its own, not the query's, so that the next query comes meanwhile.
    """

    warpgroups: int
    block_n: int
    stages: int
    overlap: bool = True
    turns: bool = True
    registers: int = 240
    persistent: bool = True
    apart: bool = True

    @property
    def rows(self) -> int:
        """Query rows of a consumer."""
        return 128 if self.warpgroups == 1 else 64


@functools.cache
def config_for(width: int, v_width: int, short: bool = False) -> Config:
    """How heads of these dims run on an H200. `short`: two consumers' rows fit better than three's (`_short`)."""
    d, d_v = sum(parts(width)), sum(parts(v_width))
    if max(d, d_v) <= 64 and short:
        return Config(warpgroups=2, block_n=128, stages=2)
    if max(d, d_v) <= 64:
        # The exponentials take as long as the products: a third warpgroup hides them better than overlap within one.
        return Config(warpgroups=3, block_n=128, stages=2, overlap=False, registers=160)
    if d_v <= 128 and d <= 192:
        return Config(warpgroups=2, block_n=128, stages=2, apart=d <= 128)
    return Config(warpgroups=2, block_n=64, stages=2, apart=False)


def _short(queries: int, causal: bool) -> bool:
    """Whether tiles of three consumers, of 192 rows, would see too much of a causal tile for nothing, or be as many as
    those of two, of 128: then what they have more are rows that are none."""
    return (causal and queries <= _SHORT) or -(-queries // 128) == -(-queries // 192)


@functools.cache
def on_hopper(device: torch.device) -> bool:
    """Whether Gluon's Hopper kernels run there: Triton 3.5 starts their warps in another way."""
    if runtime.INTERPRETED or device.type != "cuda" or torch.version.cuda is None:
        return False
    release = tuple(int(digits) for digits in re.findall(r"\d+", triton.__version__)[:2])
    gluon = importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper")
    return release >= (3, 6) and gluon is not None and torch.cuda.get_device_capability(device) == (9, 0)


def _by_head(layout: str, axes: Sequence[int]) -> list[int]:
    """Sizes or strides in the order batch, head, row, and what follows."""
    first, second, third, *rest = axes
    return [first, third, second, *rest] if layout == "BSHD" else [first, second, third, *rest]


def describable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether TMA can address a tensor: dense rows that start at multiples of 16 bytes."""
    places = zip(shape[:3], strides[:3], strict=True)
    return strides[3] == 1 and all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in places)


def plain(dtype: torch.dtype, spec: Spec, layout: str, masked: bool) -> bool:
    """Whether the Hopper kernels of dense calls know all that a call asks but its head dims."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and layout != "THD"
        and not masked
        # A logit that is masked is -inf before the scale.
        and spec.scale > 0
        and not spec.softcap
        and not spec.chunk
    )


def takes(dtype: torch.dtype, width: int, v_width: int, *, spec: Spec, layout: str, masked: bool = False) -> bool:
    """Whether `forward` is for calls like this on a Hopper: what is known before there are tensors.

    It takes bf16 and fp16 in layouts BSHD and BHSD, head dims of 16 to 256 in steps of 8 with D_v = D, or less where
    D_v is what the first part of D covers (192 and 128), causal and windowed, with sinks.
    """
    return (
        plain(dtype, spec, layout, masked)
        and 16 <= width <= 256
        and width % 8 == 0
        and v_width % 8 == 0
        # The output leaves through buffers like those of the query.
        and (parts(v_width) == parts(width) or v_width == parts(width)[0])
    )


def _steps(blocks: int, config: Config, s_k: int, offset: int, left: int) -> list[int]:
    """Key blocks of the tiles of a head, and one for what else a tile takes; in the order of `kernel._decode`."""
    rows = config.rows * config.warpgroups
    seen = [max(min(s_k, offset + (block + 1) * rows), 1) for block in reversed(range(blocks))]
    if left >= 0:
        seen = [min(keys, left + rows) for keys in seen]
    return [1 - -keys // config.block_n for keys in seen]


def _balanced(steps: Sequence[int], heads: int, most: int, unit: int, programs: int) -> int:
    """Over how many heads at a time tiles go from long to short, so that the busiest program has least to do.

    Programs take tiles there and back again (`common.tile_of`). Where a section is a little less than two rounds, or
    four, the same programs get the longest tiles of every section, up to half as much again as the others. Sections of
    whole rounds are even; where they are too large for the L2, more than three times `most` heads, the best of those
    from `most` down to half by multiples of `unit`.
    """
    every = torch.tensor(steps, device="cpu")  # whatever a program's default device is

    def busiest(together: int) -> int:
        sections, rest = divmod(heads, together)
        tiles = torch.cat([every.repeat_interleave(together).repeat(sections), every.repeat_interleave(rest)])
        rounds = torch.nn.functional.pad(tiles, (0, -len(tiles) % programs)).view(-1, programs)
        rounds[1::2] = rounds[1::2].flip(1)
        return int(rounds.sum(0).max())

    whole = min(programs // math.gcd(programs, len(steps)), heads)
    if whole <= 3 * most:
        return min(most, whole, key=busiest)
    return min(range(most, max(most // 2, 1) - 1, -unit), key=busiest)


class _Plan:
    """A launch for tensors of these shapes, wherever they lie."""

    def __init__(
        self, layout: str, spec: Spec, config: Config | None, device: torch.device, axes: Sequence[Axes]
    ) -> None:
        query, key, value, _ = (_by_head(layout, shape) for shape, _ in axes)
        batch, heads, s_q, width = query
        heads_k, s_k, v_width = key[1], key[2], value[3]
        config = config or config_for(width, v_width, _short(s_q, spec.right >= 0))
        group = heads // heads_k
        blocks = -(-s_q // (config.rows * config.warpgroups))
        offset = 0 if spec.top_left else s_k - s_q
        left, causal = spec.left, spec.right >= 0
        if causal:
            # Keys up to p + right are seen: as for a causal query that stands `right` further on.
            offset += spec.right
            left += spec.right if left >= 0 else 0
        together = 1
        if causal:
            # Longest tiles first, over as many heads at a time as keep their keys and values in the L2.
            together = min(batch * heads, group * max(1, _TOGETHER // (s_k * (width + v_width) * 2)))
        tiles = blocks * batch * heads
        programs = min(tiles, runtime.processors(device)) if config.persistent else tiles
        if causal and config.persistent:
            together = _balanced(_steps(blocks, config, s_k, offset, left), batch * heads, together, group, programs)
        self.grid = (programs,)
        self.numbers = (
            blocks, heads, group, batch * heads, together, s_q, s_k, offset, max(left, 0), spec.scale * LOG2E.value,
        )  # fmt: skip
        self.options = {
            "CAUSAL": causal, "LEFT": left >= 0, "WARPGROUPS": config.warpgroups, "STAGES": config.stages,
            "OVERLAP": config.overlap, "TURNS": config.turns, "REGISTERS": config.registers, "APART": config.apart,
            "num_warps": 8 if config.warpgroups == 1 else 4,
        }  # fmt: skip
        rows = (config.rows, config.block_n, config.block_n, config.rows)
        widths = (parts(width), parts(width), parts(v_width), parts(v_width))
        self.views = tuple(
            tuple(View(layout, *found, box, columns) if columns else None for columns in pair)
            for found, box, pair in zip(axes, rows, widths, strict=True)
        )


@functools.lru_cache(maxsize=1024)
def _plan(layout: str, spec: Spec, config: Config | None, device: torch.device, *axes: Axes) -> _Plan | None:
    """None where TMA cannot reach a tensor. Cached: a call should cost its launch and little else."""
    return _Plan(layout, spec, config, device, axes) if all(describable(*found) for found in axes) else None


def axes_of(*tensors: Tensor) -> Iterator[Axes]:
    """What is planned for: shapes and strides."""
    return ((x.shape, x.stride()) for x in tensors)


def fits(query: Tensor, key: Tensor, value: Tensor, out: Tensor, *, spec: Spec, layout: str) -> bool:
    """Whether `forward`, which `takes` such a call, can be given these tensors: on a Hopper, where TMA reaches them."""
    return (
        on_hopper(query.device)
        # With few rows the heads of a group share a tile of the portable kernel.
        and query.shape[1 if layout == "BSHD" else 2] >= 64
        and key.numel() > 0
        and query.numel() > 0
        and not (query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr()) & 15
        and _plan(layout, spec, None, query.device, *axes_of(query, key, value, out)) is not None
    )


def supports(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, *, spec: Spec, layout: str, attn_mask: Tensor | None = None
) -> bool:
    """Whether `forward` takes this call; the portable kernel takes the others."""
    masked = attn_mask is not None
    return takes(query.dtype, query.shape[-1], value.shape[-1], spec=spec, layout=layout, masked=masked) and fits(
        query, key, value, out, spec=spec, layout=layout
    )


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A tensor [B, H, S, D], read or written in boxes of rows x columns. Equal to itself only: its hash is quick."""

    layout: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    columns: int


@functools.lru_cache(maxsize=4096)
def described(views: tuple[View | None, ...], pointer: int, dtype: torch.dtype) -> list[Any]:
    """Descriptors of views of a tensor.

    Some ten microseconds of checks each, and allocators hand out the same places again and again: hence the cache.
    """
    return [None if view is None else _descriptor(Memory(pointer, dtype), view) for view in views]


def _descriptor(memory: Memory, view: View) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Nothing steps over an axis of size 1: its stride may be any number, but not for TMA.
    steps = [8 if size == 1 else stride for size, stride in zip(view.shape[:3], view.strides[:3], strict=True)]
    swizzled = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * view.columns), element_bitwidth=16, rank=4)
    sizes, strides = _by_head(view.layout, view.shape), [*_by_head(view.layout, steps), 1]
    return TensorDescriptor(memory, sizes, strides, [1, 1, view.rows, view.columns], swizzled)


def _rows_of(layout: str, strides: tuple[int, ...]) -> tuple[int, ...]:
    """(batch, row, head), as the kernel takes those of the LSE."""
    return strides if layout == "BSHD" else (strides[0], strides[2], strides[1])


@runtime.on_its_device
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    spec: Spec,
    layout: str,
    sinks: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Write `out`, and `lse` where it is given, of a call that it `takes` and whose tensors it `fits`.

    Args:
        query, key, value, out: [B, S, H, D] for layout BSHD, [B, H, S, D] for BHSD.
        lse: float32, shaped as `out` without its last axis, in any strides.
        sinks: [H_q] logits.
        config: instead of that of the table.
    """
    from polyattn_triton.hopper.kernel import attend

    plan = _plan(layout, spec, config, query.device, *axes_of(query, key, value, out))
    assert plan is not None
    q, k, v, o = plan.views
    dtype = query.dtype
    try:
        attend[plan.grid](
            *described(q, query.data_ptr(), dtype), *described(k, key.data_ptr(), dtype),
            *described(v, value.data_ptr(), dtype), *described(o, out.data_ptr(), dtype),
            lse, sinks, *plan.numbers, *((0, 0, 0) if lse is None else _rows_of(layout, lse.stride())), **plan.options,
        )  # fmt: skip
    except TOO_LARGE as error:
        asked = (str(dtype).removeprefix("torch."), query.shape[-1], value.shape[-1], 0, False)
        raise too_large(FORWARD, asked, query.device, error) from error
