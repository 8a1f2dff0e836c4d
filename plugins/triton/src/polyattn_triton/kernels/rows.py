"""Tokens moved in blocks, means of blocks scored, the best of them chosen: what methods do around attention.

Rows are copied whole: a row of D numbers is one stretch of memory, and each kernel reads and writes what it moves once,
so time is bytes over bandwidth. The scores of n means with m are 2 n m D operations, and n m numbers that are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.block_sparse import head_at
from polyattn_triton.kernels.rounding import cast

__all__ = ["MOST", "gather", "halves", "integers", "product", "scatter", "scored", "split", "top"]

MOST = 8192
"""Scores of a row that `top` can choose from: they are all in registers."""


@triton.jit(do_not_specialize=["rows_here", "blocks", "listed"])
def _gather(
    source, order, starts, sizes, rows, means, x_b, x_h, x_s, rows_here, blocks, listed, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, FILLED: tl.constexpr, MEANS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """One block of one head: its tokens, and their mean. OWN: heads have blocks of their own."""
    n, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if OWN:
        own = b.to(tl.int64) * tl.num_programs(1) + head
        order += own * listed
        starts += own * blocks
        sizes += own * blocks
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
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COARSE: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one head. `out` is [B, S, H, D]. OWN: heads have places of their own."""
    n, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if OWN:
        places += (b.to(tl.int64) * tl.num_programs(1) + head) * tokens
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


@triton.jit
def halves(x):
    """A float32 number as two of bfloat16, whose sum it is but for 2**-17 of it."""
    first = x.to(tl.bfloat16)
    return first, (x - first.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product(x, y, acc, EXACT: tl.constexpr):
    """acc + x y of float32 matrices: as they are, or in halves of bfloat16 without the product of the second ones."""
    if EXACT:
        acc = tl.dot(x, y, acc, input_precision="ieee")
    else:
        x_1, x_2 = halves(x)
        y_1, y_2 = halves(y)
        acc = tl.dot(x_1, y_1, acc)
        acc = tl.dot(x_1, y_2, acc)
        acc = tl.dot(x_2, y_1, acc)
    return acc


@triton.jit(do_not_specialize=["n_rows", "m_rows", "scale"])
def _scored(
    query, query_rest, key, key_rest, value, value_rest, scores, out, n_rows, m_rows, scale, D: tl.constexpr,
    D_V: tl.constexpr, K: tl.constexpr, K_V: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    VALUE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """N means of queries against all means of keys. K, K_V: D and D_V, up to a power of two. EXACT: in float32; else
    tensors are halves of bfloat16, which are added."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    q_row = (b.to(tl.int64) * heads + head) * n_rows
    k_row = (b.to(tl.int64) * (heads // GROUP) + head // GROUP) * m_rows
    n, d, e = tile * N + tl.arange(0, N), tl.arange(0, K), tl.arange(0, K_V)
    inside = (n < n_rows)[:, None]
    q_at, q_there = (q_row + n)[:, None] * D + d[None, :], inside & (d < D)[None, :]
    q = tl.load(query + q_at, mask=q_there, other=0.0)
    q_rest = tl.load(query_rest + q_at, mask=q_there, other=0.0)
    top = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    acc = tl.zeros([N, K_V], tl.float32)
    for first in range(0, m_rows, M):
        m = first + tl.arange(0, M)
        here = m < m_rows
        k_at, k_there = (k_row + m)[:, None] * D + d[None, :], here[:, None] & (d < D)[None, :]
        k = tl.load(key + k_at, mask=k_there, other=0.0)
        if EXACT:
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            k_rest = tl.load(key_rest + k_at, mask=k_there, other=0.0)
            s = tl.dot(q, tl.trans(k))
            s = tl.dot(q, tl.trans(k_rest), s)
            s = tl.dot(q_rest, tl.trans(k), s)
        s = s * scale
        tl.store(scores + (q_row + n)[:, None] * m_rows + m[None, :], s, mask=inside & here[None, :])
        if VALUE:
            s = tl.where(here[None, :], s, float("-inf"))
            highest = tl.maximum(top, tl.max(s, 1))
            weights = tl.exp(s - highest[:, None])
            factor = tl.exp(top - highest)
            total = total * factor + tl.sum(weights, 1)
            v_at, v_there = (k_row + m)[:, None] * D_V + e[None, :], here[:, None] & (e < D_V)[None, :]
            v = tl.load(value + v_at, mask=v_there, other=0.0)
            acc = acc * factor[:, None]
            if EXACT:
                acc = tl.dot(weights, v, acc, input_precision="ieee")
            else:
                v_rest = tl.load(value_rest + v_at, mask=v_there, other=0.0)
                first_half, second_half = halves(weights)
                acc = tl.dot(first_half, v, acc)
                acc = tl.dot(first_half, v_rest, acc)
                acc = tl.dot(second_half, v, acc)
            top = highest
    if VALUE:
        tl.store(out + (q_row + n)[:, None] * D_V + e[None, :], acc / total[:, None], mask=inside & (e < D_V)[None, :])


@triton.jit
def integers(x):
    """Float32 numbers as integers in the same order; -0 is 0."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, bits ^ 2147483647, bits)


@triton.jit
def limit(ordered, low, high, count, kept):
    """What exactly `kept` of `count` numbers from `low` to `high` reach, or else the last of the highest, and how many
    are known to reach it. `kept` is at most `count`, and that at most 32,767.

    Each round counts for two numbers at once. They lie about where the counts that are known would have it if numbers
    were spread evenly, a sixteenth of the range apart from there; or at thirds of the range, where a round before left
    more than a quarter of it. So numbers of a common spread take half as many rounds as halving does, and no numbers
    take more than 42."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    # How many reach `low`, and how many what lies above `high`.
    enough, beyond = count, 0
    thirds = 0
    while (low < high) & (enough != kept):
        width = high - low + 1
        share = (enough - kept).to(tl.float32) / (enough - beyond).to(tl.float32)
        about = low + (width.to(tl.float32) * share).to(tl.int64)
        first = tl.where(thirds != 0, low + width // 3, about - (width >> 4))
        first = tl.minimum(tl.maximum(first, low + 1), high)
        second = tl.where(thirds != 0, low + 2 * (width // 3), about + (width >> 4))
        second = tl.minimum(tl.maximum(second, first), high)
        # Two counts in one number.
        both = (ordered >= first.to(tl.int32)).to(tl.int32) + ((ordered >= second.to(tl.int32)).to(tl.int32) << 16)
        both = tl.sum(both, 0)
        reached, further = both & 0xFFFF, both >> 16
        low = tl.where(further >= kept, second, tl.where(reached >= kept, first, low))
        enough = tl.where(further >= kept, further, tl.where(reached >= kept, reached, enough))
        high = tl.where(further >= kept, high, tl.where(reached >= kept, second - 1, first - 1))
        beyond = tl.where(further >= kept, beyond, tl.where(reached >= kept, further, reached))
        thirds = ((thirds == 0) & (high - low + 1 > width >> 2)).to(tl.int32)
    return low.to(tl.int32), enough


@triton.jit(do_not_specialize=["count", "kept"])
def _top(scores, chosen, count, kept, WIDE: tl.constexpr):
    """The `kept` highest of one row. Numbers are compared as integers, whose range is halved until it is found."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    # What is behind the end is below everything, and last among its equals.
    ordered = integers(tl.load(scores + row * count + i, mask=i < count, other=float("-inf")))
    least, enough = limit(ordered, tl.min(ordered, 0), tl.max(ordered, 0), count, kept)
    take = (ordered >= least) & (i < count)
    if enough != kept:
        # Of equal ones the first.
        alike = take & (ordered == least)
        wanted = kept - tl.sum((take & ~alike).to(tl.int32), 0)
        take = take & (~alike | (tl.cumsum(alike.to(tl.int32), 0) <= wanted))
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(chosen + row * kept + place, i, mask=take)


@runtime.on_its_device
def gather(
    tensor: Tensor, blocks: tuple[Tensor, Tensor, Tensor], block: int, *, filled: bool, means: bool
) -> tuple[Tensor, Tensor | None]:
    """See `polyattn.contract.BlockOps`. `block` is a power of two."""
    order, starts, sizes = blocks
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    B, H, _, D = tensor.shape
    n, listed = sizes.shape[-1], order.shape[-1]
    width = n * block if filled else listed
    rows = tensor.new_empty(B, H, width, D)
    found = tensor.new_empty(B, H, n, D, dtype=torch.float32) if means else None
    if rows.numel():
        _gather[n, H, B](
            tensor, order, starts, sizes, rows, rows if found is None else found, *tensor.stride()[:3], width, n,
            listed, D=D, WIDTH=triton.next_power_of_2(D), BLOCK=block, FILLED=filled, MEANS=means, OWN=order.dim() > 1,
            num_warps=4,
        )  # fmt: skip
    return rows, found


@runtime.on_its_device
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
    tokens, added = places.shape[-1], gate is not None and coarse is not None and owners is not None
    out = rows.new_empty(B, tokens, H, D)
    if out.numel():
        more = (gate, coarse, owners) if added else (rows, rows, places)
        strides = gate.stride() if gate is not None else (0, 0, 0, 0)
        _scatter[triton.cdiv(tokens, 64), H, B](
            rows, places, out, *more, width, coarse.shape[2] if coarse is not None else 0, tokens, *strides, D=D,
            WIDTH=triton.next_power_of_2(D), BLOCK=64, COARSE=added, OWN=places.dim() > 1, num_warps=4,
        )  # fmt: skip
    return out


@runtime.on_its_device
def scored(query: Tensor, key: Tensor, value: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """See `polyattn.contract.BlockOps`."""
    (B, H, n, D), (H_kv, m) = query.shape, key.shape[1:3]
    D_V = D if value is None else value.shape[3]
    scores = query.new_empty(B, H, n, m)
    out = None if value is None else query.new_empty(B, H, n, D_V)
    if scores.numel():
        exact = query.device.type != "cuda"
        given = (query, key, key if value is None else value)
        halves = ((t, t) if exact else split(t) for t in given)
        _scored[triton.cdiv(n, 64), H, B](
            *(t for pair in halves for t in pair), scores, scores if out is None else out, n, m, scale, D=D, D_V=D_V,
            K=triton.next_power_of_2(D), K_V=triton.next_power_of_2(D_V), GROUP=H // H_kv, N=64, M=64,
            VALUE=value is not None, EXACT=exact, num_warps=4, num_stages=2,
        )  # fmt: skip
    return scores, out


def split(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor as halves of bfloat16, see `halves`."""
    first = tensor.to(torch.bfloat16)
    return first, (tensor - first).to(torch.bfloat16)


@runtime.on_its_device
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
        _top[rows,](scores, chosen, count, kept, WIDE=wide, num_warps=2 if wide <= 2048 else 4)
    return chosen
