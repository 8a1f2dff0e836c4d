"""What stands before and after a backward whose programs share a gradient.

`prepare` and `finish` are for one that adds dQ up in memory (`hopper.backward`): the numbers of rows, and dQ in its own
order, in that kernel's tiles of M rows of one head. `add_up` is for any whose dK and dV are sums of several programs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.arguments import strides_of
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import LOG2E
from polyattn_triton.kernels.tiles import head_at, put, rows_of

__all__ = ["add_up", "finish", "partial", "prepare"]

_NUMBERS = ["blocks", "heads", "s_q"]
_ADDED = 2048
"""Numbers of a tile of `_add_up`."""


@triton.jit(do_not_specialize=_NUMBERS)
def _prepare(
    dout, out, lse, numbers, dquery,
    sdz, sdm, sdh, soz, som, soh, slz, slm, slh, blocks, heads, s_q,
    E: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """LSE in base 2 and delta = rowsum(dO * O) of a tile's rows, and zeros in its place of dQ."""
    pid = tl.program_id(0)
    number = pid % blocks
    head = pid // blocks % heads
    z = pid // blocks // heads
    m = number * M
    r = m + tl.arange(0, M)
    zero = z * 0
    d = rows_of(head_at(dout, z, zero, head, sdz, sdm, sdh), m, sdm, s_q, M, 0, COLUMNS, E)
    o = rows_of(head_at(out, z, zero, head, soz, som, soh), m, som, s_q, M, 0, COLUMNS, E)
    delta = tl.sum(d.to(tl.float32) * o.to(tl.float32), 1)
    # A row without keys, and one past the end, has an LSE of +inf here: all its weights are 0.
    top = tl.load(head_at(lse, z, zero, head, slz, slm, slh) + r.to(tl.int64) * slm, mask=r < s_q, other=float("-inf"))
    top = tl.where(top > float("-inf"), top * LOG2E, float("inf"))
    at = numbers + pid.to(tl.int64) * (2 * M) + tl.arange(0, M)
    tl.store(at, top)
    tl.store(at + M, delta)
    every = tl.arange(0, M * D)
    tl.store(dquery + pid.to(tl.int64) * (M * D) + every, tl.zeros((M * D,), tl.float32))


@triton.jit(do_not_specialize=_NUMBERS)
def _finish(
    sums, dquery, sgz, sgm, sgh, blocks, heads, s_q, factor,
    WIDTH: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A tile of dQ, times `factor`, from how `hopper.backward_kernel._leave` lays it out."""
    pid = tl.program_id(0)
    m = pid % blocks * M
    head = pid // blocks % heads
    z = pid // blocks // heads
    r = tl.arange(0, M)[:, None]
    c = tl.arange(0, D)[None, :]
    # [sixteens of rows, eights of columns, eight rows, four pairs of columns, halves of sixteen rows, two columns]
    at = (r // 16 * (D // 8) + c // 8) * 128 + r % 8 * 16 + c % 8 // 2 * 4 + r // 8 % 2 * 2 + c % 2
    found = tl.load(sums + pid.to(tl.int64) * (M * D) + at) * factor
    row = m + tl.arange(0, M)
    place = z.to(tl.int64) * sgz + row.to(tl.int64) * sgm + head.to(tl.int64) * sgh
    put(dquery, place, row < s_q, cast(found, dquery.dtype.element_ty), 0, D, WIDTH)


@triton.jit
def _sum(
    parts, spz, spm, sph, grad, sgz, sgm, sgh, z, head, m, s, ways,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((M, COLUMNS), tl.float32)
    for way in range(ways):
        base = head_at(parts, z, z * 0, head * ways + way, spz, spm, sph)
        total += rows_of(base, m, spm, s, M, 0, COLUMNS, WIDTH)
    row = m + tl.arange(0, M)
    place = z.to(tl.int64) * sgz + row.to(tl.int64) * sgm + head.to(tl.int64) * sgh
    put(grad, place, row < s, cast(total, grad.dtype.element_ty), 0, COLUMNS, WIDTH)


@triton.jit(do_not_specialize=["blocks", "heads", "s", "ways"])
def _add_up(
    dk_parts, dv_parts, dkey, dvalue,
    skz, skm, skh, svz, svm, svh, gkz, gkm, gkh, gvz, gvm, gvh, blocks, heads, s, ways,
    D: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """A tile of dK (programs of the first column) or dV, from its parts: always in the same order."""
    pid = tl.program_id(0)
    m = pid % blocks * M
    head = pid // blocks % heads
    z = pid // blocks // heads
    if tl.program_id(1) == 0:
        _sum(dk_parts, skz, skm, skh, dkey, gkz, gkm, gkh, z, head, m, s, ways, D, COLUMNS, M)
    else:
        _sum(dv_parts, svz, svm, svh, dvalue, gvz, gvm, gvh, z, head, m, s, ways, E, COLUMNS, M)


@runtime.on_its_device
def prepare(
    dout: Tensor, out: Tensor, lse: Tensor, *, layout: str, sizes: tuple[int, int, int], rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """(numbers, sums) of tiles of `rows` rows: float32 [B H blocks, 2 rows], and zeros [B H blocks, rows, columns].

    Args:
        dout, out: [B, S, H, D_v] for layout BSHD, [B, H, S, D_v] for BHSD, with rows that lie together. lse: the same
            without its last axis, natural.
        sizes: B, S and H. columns: of a tile of dQ, a power of two.
    """
    batch, s_q, heads = sizes
    blocks, width = -(-s_q // rows), out.shape[-1]
    numbers = torch.empty((batch * heads * blocks, 2 * rows), dtype=torch.float32, device=out.device)
    sums = torch.empty((batch * heads * blocks, rows, columns), dtype=torch.float32, device=out.device)
    _prepare[(len(numbers),)](
        dout, out, lse, numbers, sums,
        *strides_of(dout, layout), *strides_of(out, layout), *strides_of(lse.unsqueeze(-1), layout), blocks, heads, s_q,
        E=width, COLUMNS=triton.next_power_of_2(width), D=columns, M=rows,
    )  # fmt: skip
    return numbers, sums


@runtime.on_its_device
def finish(sums: Tensor, dquery: Tensor, *, layout: str, factor: float) -> None:
    """Write `dquery`, shaped as the query, from the `sums` that `prepare` made and the kernel has filled."""
    tiles, rows, columns = sums.shape
    s_q, heads = (dquery.shape[1], dquery.shape[2]) if layout == "BSHD" else (dquery.shape[2], dquery.shape[1])
    _finish[(tiles,)](
        sums, dquery, *strides_of(dquery, layout), -(-s_q // rows), heads, s_q, factor,
        WIDTH=dquery.shape[-1], M=rows, D=columns,
    )  # fmt: skip


def partial(grad: Tensor, axis: int, ways: int) -> Tensor:
    """Memory for so many parts of a gradient, side by side on the axis of its heads."""
    shape = list(grad.shape)
    shape[axis] *= ways
    return grad.new_empty(shape, dtype=torch.float32)


@runtime.on_its_device
def add_up(dk: Tensor, dv: Tensor, dkey: Tensor, dvalue: Tensor, *, layout: str) -> None:
    """Write `dkey` and `dvalue` from the parts that `partial` made room for, in one launch.

    Args:
        layout: BSHD, BHSD, or THD with [T, H_kv, D].
    """
    axis = 1 if layout == "BHSD" else -2
    heads, tokens = dkey.shape[axis], dkey.shape[-2 if layout == "BHSD" else -3]
    batch = 1 if layout == "THD" else dkey.shape[0]
    width, v_width = dkey.shape[-1], dvalue.shape[-1]
    columns = triton.next_power_of_2(max(width, v_width))
    rows = max(_ADDED // columns, 1)
    blocks = -(-tokens // rows)
    if blocks:
        _add_up[(batch * heads * blocks, 2)](
            dk, dv, dkey, dvalue, *strides_of(dk, layout), *strides_of(dv, layout), *strides_of(dkey, layout),
            *strides_of(dvalue, layout), blocks, heads, tokens, dk.shape[axis] // heads,
            D=width, E=v_width, COLUMNS=columns, M=rows,
        )  # fmt: skip
