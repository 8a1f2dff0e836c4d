"""Tokens moved in blocks, means of blocks scored, the best of them chosen: what methods do around attention.

Rows are copied whole: a row of D numbers is one stretch of memory, and each kernel reads and writes what it moves once,
so time is bytes over bandwidth. The scores of n means with m are 2 n m D operations, and n m numbers that are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn_triton import runtime  # noqa: F401  first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.block_sparse import head_at
from polyattn_triton.kernels.rounding import cast

__all__ = ["MOST", "gather", "scatter", "scored", "top"]

MOST = 8192
"""Scores of a row that `top` can choose from: they are all in registers."""


@triton.jit(do_not_specialize=["rows_here", "blocks"])
def _gather(
    source, order, starts, sizes, rows, means, x_b, x_h, x_s, rows_here, blocks, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, FILLED: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """One block of one head: its tokens, and their mean."""
    n, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, size = tl.load(starts + n), tl.load(sizes + n)
    i, d = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    token = tl.load(order + start + i, mask=i < size, other=0).to(tl.int64)
    there = (i < size)[:, None] & (d < D)[None, :]
    found = tl.load(head_at(source, b, head, x_b, x_h) + token[:, None] * x_s + d[None, :], mask=there, other=0.0)
    head_row = b.to(tl.int64) * tl.num_programs(1) + head
    if FILLED:
        at = head_row * rows_here + n * BLOCK + i
        kept = (d < D)[None, :]
    else:
        at = head_row * rows_here + start + i
        kept = there
    tl.store(rows + at[:, None] * D + d[None, :], found, mask=kept)
    if MEANS:
        mean = tl.sum(found.to(tl.float32), 0) / tl.maximum(size, 1)
        tl.store(means + (head_row * blocks + n) * D + d, mean, mask=d < D)


@triton.jit(do_not_specialize=["rows_here", "blocks", "tokens"])
def _scatter(
    rows, places, out, gate, coarse, owners, rows_here, blocks, tokens, g_b, g_h, g_s, g_d, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one head. `out` is [B, S, H, D]."""
    n, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, d = n * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    place = tl.load(places + s, mask=s < tokens, other=-1)
    there = (place >= 0)[:, None] & (d < D)[None, :]
    head_row = b.to(tl.int64) * tl.num_programs(1) + head
    found = tl.load(rows + (head_row * rows_here + place)[:, None] * D + d[None, :], mask=there, other=0.0)
    if COARSE:
        owner = tl.load(owners + s, mask=s < tokens, other=0)
        weight_at = head_at(gate, b, head, g_b, g_h) + s[:, None].to(tl.int64) * g_s + d[None, :] * g_d
        weight = tl.load(weight_at, mask=there, other=0.0).to(tl.float32)
        more = tl.load(coarse + (head_row * blocks + owner)[:, None] * D + d[None, :], mask=there, other=0.0)
        # Added in the rows' own numbers, as torch's operators do.
        found += cast(weight * more, found.dtype)
    at = (b.to(tl.int64) * tokens + s)[:, None] * (tl.num_programs(1) * D) + head * D + d[None, :]
    tl.store(out + at, found, mask=(s < tokens)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["n_rows", "m_rows", "scale"])
def _scored(
    query, key, value, scores, out, n_rows, m_rows, scale, D: tl.constexpr, D_V: tl.constexpr, K: tl.constexpr,
    K_V: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, M: tl.constexpr, VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """N means of queries against all means of keys. K, K_V: D and D_V, up to a power of two."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    q_row = (b.to(tl.int64) * heads + head) * n_rows
    k_row = (b.to(tl.int64) * (heads // GROUP) + head // GROUP) * m_rows
    n, d, e = tile * N + tl.arange(0, N), tl.arange(0, K), tl.arange(0, K_V)
    inside = (n < n_rows)[:, None]
    q = tl.load(query + (q_row + n)[:, None] * D + d[None, :], mask=inside & (d < D)[None, :], other=0.0)
    top = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    acc = tl.zeros([N, K_V], tl.float32)
    for first in range(0, m_rows, M):
        m = first + tl.arange(0, M)
        here = m < m_rows
        k = tl.load(key + (k_row + m)[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        tl.store(scores + (q_row + n)[:, None] * m_rows + m[None, :], s, mask=inside & here[None, :])
        if VALUE:
            s = tl.where(here[None, :], s, float("-inf"))
            highest = tl.maximum(top, tl.max(s, 1))
            weights = tl.exp(s - highest[:, None])
            factor = tl.exp(top - highest)
            total = total * factor + tl.sum(weights, 1)
            v_at = value + (k_row + m)[:, None] * D_V + e[None, :]
            v = tl.load(v_at, mask=here[:, None] & (e < D_V)[None, :], other=0.0)
            acc = tl.dot(weights, v, acc * factor[:, None], input_precision=PRECISION)
            top = highest
    if VALUE:
        tl.store(out + (q_row + n)[:, None] * D_V + e[None, :], acc / total[:, None], mask=inside & (e < D_V)[None, :])


@triton.jit(do_not_specialize=["count", "kept"])
def _top(scores, chosen, count, kept, WIDE: tl.constexpr):
    """The `kept` highest of one row: the bits of the last of them are found one by one, from the highest on."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    bits = tl.load(scores + row * count + i, mask=i < count, other=float("-inf")).to(tl.int32, bitcast=True)
    # In the order of the numbers: above 0 with the first bit set, below 0 turned round. -0 is 0.
    bits = tl.where(bits == -2147483648, 0, bits)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    # What is behind the end is below everything.
    ordered = tl.where(i < count, ordered, 0)
    least = tl.full([1], 0, tl.uint32)
    for k in tl.static_range(32):
        tried = least | tl.full([1], 1 << (31 - k), tl.uint32)
        enough = tl.sum((ordered >= tried).to(tl.int32), 0) >= kept
        least = tl.where(enough, tried, least)
    above = ordered > least
    alike = (ordered == least) & (i < count)
    wanted = kept - tl.sum(above.to(tl.int32), 0)
    take = above | (alike & (tl.cumsum(alike.to(tl.int32), 0) <= wanted))
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(chosen + row * kept + place, i, mask=take)


def gather(
    tensor: Tensor, blocks: tuple[Tensor, Tensor, Tensor], block: int, *, filled: bool, means: bool
) -> tuple[Tensor, Tensor | None]:
    """See `polyattn.contract.BlockOps`. `block` is a power of two."""
    order, starts, sizes = blocks
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    B, H, _, D = tensor.shape
    n = len(sizes)
    width = n * block if filled else len(order)
    rows = tensor.new_empty(B, H, width, D)
    found = tensor.new_empty(B, H, n, D, dtype=torch.float32) if means else None
    if rows.numel():
        _gather[n, H, B](
            tensor, order, starts, sizes, rows, rows if found is None else found, *tensor.stride()[:3], width, n, D=D,
            WIDTH=triton.next_power_of_2(D), BLOCK=block, FILLED=filled, MEANS=means, num_warps=4,
        )  # fmt: skip
    return rows, found


def scatter(
    rows: Tensor,
    places: Tensor,
    *,
    gate: Tensor | None = None,
    coarse: Tensor | None = None,
    owners: Tensor | None = None,
) -> Tensor:
    """See `polyattn.contract.BlockOps`."""
    B, H, width, D = rows.shape
    tokens, added = len(places), gate is not None and coarse is not None and owners is not None
    out = rows.new_empty(B, tokens, H, D)
    if out.numel():
        more = (gate, coarse, owners) if added else (rows, rows, places)
        strides = gate.stride() if gate is not None else (0, 0, 0, 0)
        _scatter[triton.cdiv(tokens, 64), H, B](
            rows, places, out, *more, width, coarse.shape[2] if coarse is not None else 0, tokens, *strides, D=D,
            WIDTH=triton.next_power_of_2(D), BLOCK=64, COARSE=added, num_warps=4,
        )  # fmt: skip
    return out


def scored(query: Tensor, key: Tensor, value: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """See `polyattn.contract.BlockOps`."""
    (B, H, n, D), (H_kv, m) = query.shape, key.shape[1:3]
    D_V = D if value is None else value.shape[3]
    scores = query.new_empty(B, H, n, m)
    out = None if value is None else query.new_empty(B, H, n, D_V)
    if scores.numel():
        _scored[triton.cdiv(n, 64), H, B](
            query, key, key if value is None else value, scores, scores if out is None else out, n, m, scale, D=D,
            D_V=D_V, K=triton.next_power_of_2(D), K_V=triton.next_power_of_2(D_V), GROUP=H // H_kv, N=64, M=32,
            VALUE=value is not None, PRECISION="tf32x3" if query.device.type == "cuda" else "ieee", num_warps=4,
            num_stages=2,
        )  # fmt: skip
    return scores, out


def top(scores: Tensor, kept: int) -> Tensor | None:
    """See `polyattn.contract.BlockOps`."""
    count = scores.shape[-1]
    if count > MOST:
        return None
    scores = scores.contiguous()
    rows = scores.numel() // max(count, 1)
    chosen = torch.empty(*scores.shape[:-1], kept, dtype=torch.int32, device=scores.device)
    if chosen.numel():
        wide = triton.next_power_of_2(count)
        _top[rows,](scores, chosen, count, kept, WIDE=wide, num_warps=1 if wide <= 2048 else 4)
    return chosen
