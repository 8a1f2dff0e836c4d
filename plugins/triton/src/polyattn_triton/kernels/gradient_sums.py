"""What stands before and after a backward that adds dQ up in memory: the numbers of rows, and dQ in its own order.

`hopper.backward` launches these beside its kernel. Tiles are those of that kernel: M rows of one head.
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

__all__ = ["finish", "prepare"]

_NUMBERS = ["blocks", "heads", "s_q"]


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
