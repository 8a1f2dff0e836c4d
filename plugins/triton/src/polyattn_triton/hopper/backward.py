"""Backward of dense attention on Hopper: the launcher of `backward_kernel.differentiate`, and what it takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn_triton import runtime
from polyattn_triton.hopper.forward import Axes, View, axes_of, describable, described, on_hopper, plain
from polyattn_triton.kernels.arguments import strides_of
from polyattn_triton.kernels.gradient_sums import add_up, finish, partial, prepare
from polyattn_triton.kernels.pools import Memory
from polyattn_triton.kernels.rules import LOG2E
from polyattn_triton.kernels.tiles import Spec

__all__ = ["KEYS", "LINE", "ROWS", "STAGES", "backward", "columns_of", "fits", "heads_of", "steps_of", "takes"]

KEYS, ROWS = 128, 64
"""Keys of a program's tile, and query rows of a step: two tiles of scores, dK and dV fill the registers."""
LINE = 256
"""Numbers of a line of what is added up: the widest box of TMA."""
STAGES = 2
"""Query tiles that are in shared memory at a time."""
_TOGETHER = 32 << 20
"""Bytes of rows, and of their sums, of the heads whose tiles run at a time: an L2 of 50 MiB with room."""
_MANY = 16
"""Programs to a processor from which on their last round is a small part of all."""
_WORTH = 0.95
"""Of the time of whole groups: parts are float32, and many of them more than all else that a call holds."""
_BETWEEN = 1.0
"""Steps that a program takes to begin and to end."""
_ADDING = 3
"""Steps that the launch takes which adds up parts."""
_PART = {64: 500, 128: 800}
"""Thousands of numbers of dK or dV, by the columns of a tile, that are stored and added up in the time of a step: of
about 1.4 and 2.1 us on an H200."""


def columns_of(width: int) -> int:
    """Columns of a tile of heads of this width; TMA fills them up with zeros."""
    return 64 if width <= 64 else 128


def takes(dtype: torch.dtype, width: int, v_width: int, *, spec: Spec, layout: str, masked: bool = False) -> bool:
    """Whether `backward` is for calls like this on a Hopper: what is known before there are tensors.

    It takes bf16 and fp16 in layouts BSHD and BHSD, head dims of 40 to 64 and of 72 to 128 in steps of 8, D_v in the
    same range as D, causal and windowed. Its dQ is not the same bits on every run.
    """
    return (
        plain(dtype, spec, layout, masked)
        and min(width, v_width) >= 40
        and max(width, v_width) <= 128
        and width % 8 == v_width % 8 == 0
        and columns_of(width) == columns_of(v_width)
    )


def steps_of(tiles: int, blocks: int, s_q: int, s_k: int, offset: int, *, causal: bool, left: int) -> list[int]:
    """Blocks of rows that see some key of each tile, as `backward_kernel._span` has them."""
    found = []
    for key in range(0, tiles * KEYS, KEYS):
        low = max(key - offset, 0) // ROWS if causal else 0
        last = min(key + KEYS, s_k) - 1 + left - offset + 1
        high = blocks if left < 0 else -(-max(min(s_q, last), 0) // ROWS)
        found.append(max(high - low, 0))
    return found


def heads_of(steps: Sequence[int], sequences: int, group: int, processors: int, part: float) -> int:
    """How many of a group's query heads a program sums over. With fewer of them less is left for the last programs to
    do alone, and there are more parts of dK and dV to store and to add up: where the device is full, all of them,
    unless fewer save a twentieth.

    Args:
        steps: of a program of one head, by tile of keys. sequences: (sequence, key head) pairs.
        part: what one more part of all of dK and dV costs, in steps.
    """

    def costs(each: int) -> float:
        ways = group // each
        programs, longest = len(steps) * sequences * ways, max(steps) * each
        mean = sum(steps) / len(steps) * each
        if min(steps) == max(steps):
            time = -(-programs // processors) * (longest + _BETWEEN)
        else:
            # Of some heads at a time long ones begin first, and short ones fill up what is left.
            time = max(longest + _BETWEEN, programs / processors * (mean + _BETWEEN) + 0.75 * mean)
        return time + (_ADDING + ways * part if ways > 1 else 0)

    programs = len(steps) * sequences
    if programs >= _MANY * processors:
        return group
    best = min((each for each in range(group, 0, -1) if not group % each), key=costs)
    return group if programs >= processors and costs(best) > _WORTH * costs(group) else best


class _Plan:
    """Launches for tensors of these shapes, wherever they lie."""

    def __init__(self, layout: str, spec: Spec, device: torch.device, axes: tuple[Axes, ...]) -> None:
        (q_shape, _), (k_shape, _), (v_shape, _), _ = axes
        head, token = (2, 1) if layout == "BSHD" else (1, 2)
        batch, heads, self.s_q, width = q_shape[0], q_shape[head], q_shape[token], q_shape[3]
        heads_k, s_k = k_shape[head], k_shape[token]
        self.columns = columns_of(width)
        self.sizes = batch, self.s_q, heads
        offset = 0 if spec.top_left else s_k - self.s_q
        left, causal = spec.left, spec.right >= 0
        if causal:
            # As in forward.py: keys up to p + right are those of a causal query that stands `right` further on.
            offset += spec.right
            left += spec.right if left >= 0 else 0
        group, blocks, tiles = heads // heads_k, -(-self.s_q // ROWS), -(-s_k // KEYS)
        steps = steps_of(tiles, blocks, self.s_q, s_k, offset, causal=causal, left=left)
        part = batch * heads_k * s_k * (width + v_shape[3]) / (_PART[self.columns] * 1e3)
        self.each = heads_of(steps, batch * heads_k, group, runtime.processors(device), part)
        self.ways = group // self.each
        pairs = batch * heads_k * self.ways
        bytes_ = self.each * self.s_q * (width + v_shape[3] + 2 * self.columns) * 2
        together = min(pairs, max(1, _TOGETHER // bytes_))
        self.grid, self.most = (tiles * pairs,), tiles * batch * heads
        self.numbers = (
            tiles, pairs, together, heads, heads_k, self.each, heads_k * self.ways, blocks, self.s_q, s_k, offset,
            max(left, 0), spec.scale * LOG2E.value, spec.scale, width, v_shape[3],
        )  # fmt: skip
        # Which block a program begins at is a product of these, in int32.
        whole = not causal and left < 0 and blocks * tiles < 1 << 31
        self.options = {"CAUSAL": causal, "LEFT": left >= 0, "ROTATE": whole, "STAGES": STAGES, "num_warps": 8}
        boxes = (ROWS, KEYS, KEYS, ROWS)
        self.views = tuple((View(layout, *found, box, self.columns),) for found, box in zip(axes, boxes, strict=True))


@functools.lru_cache(maxsize=1024)
def _plan(layout: str, spec: Spec, device: torch.device, *axes: Axes) -> _Plan | None:
    """None where TMA cannot reach a tensor."""
    return _Plan(layout, spec, device, axes) if all(describable(*found) for found in axes) else None


def fits(query: Tensor, key: Tensor, value: Tensor, dout: Tensor, *, spec: Spec, layout: str) -> bool:
    """Whether `backward`, which `takes` such a call, is given these tensors: on a Hopper, where TMA reaches them, and
    with enough of them that most processors could have a tile of one head. Of fewer rows than a tile's most of the sums
    would be empty.
    """
    if (
        not on_hopper(query.device)
        or (query.data_ptr() | key.data_ptr() | value.data_ptr() | dout.data_ptr()) & 15
        or not (query.numel() and key.numel())
        or query.shape[1 if layout == "BSHD" else 2] < ROWS
    ):
        return False
    plan = _plan(layout, spec, query.device, *axes_of(query, key, value, dout))
    return plan is not None and 2 * plan.most >= runtime.processors(query.device)


@functools.lru_cache(maxsize=1024)
def _described_lines(pointer: int, lines: int, columns: int, box: int) -> Any:
    """A descriptor of lines of float32, `box` of which come and go at a time."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    plain = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    memory = Memory(pointer, torch.float32)
    return TensorDescriptor(memory, [lines, columns], [columns, 1], [box, columns], plain)


@runtime.on_its_device
def backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, spec: Spec, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue), shaped as their inputs, of a call that it `takes` and whose tensors it `fits`.

    Args:
        out, lse: may belong to a merged result that this call is a part of.
        The others as `kernels.backward.backward`.
    """
    from polyattn_triton.hopper.backward_kernel import differentiate

    plan = _plan(layout, spec, query.device, *axes_of(query, key, value, dout))
    assert plan is not None
    out = out if out.stride(-1) == 1 else out.contiguous()
    numbers, sums = prepare(dout, out, lse, layout=layout, sizes=plan.sizes, rows=ROWS, columns=plan.columns)
    ways = plan.ways
    dquery, dkey, dvalue = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    axis = 2 if layout == "BSHD" else 1
    dk, dv = (partial(grad, axis, ways) if ways > 1 else grad for grad in (dkey, dvalue))
    q, k, v, d = plan.views
    dtype = query.dtype
    differentiate[plan.grid](
        *described(q, query.data_ptr(), dtype), *described(k, key.data_ptr(), dtype),
        *described(v, value.data_ptr(), dtype), *described(d, dout.data_ptr(), dtype),
        _described_lines(numbers.data_ptr(), *numbers.shape, 1),
        _described_lines(sums.data_ptr(), sums.numel() // LINE, LINE, ROWS * plan.columns // LINE),
        dk, dv, *plan.numbers,
        *strides_of(dk, layout), *strides_of(dv, layout), **plan.options,
    )  # fmt: skip
    finish(sums, dquery, layout=layout, factor=spec.scale)
    if ways > 1:
        add_up(dk, dv, dkey, dvalue, layout=layout)
    return dquery, dkey, dvalue
