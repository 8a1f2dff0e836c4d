"""Prompts of linear attention in chunks of C tokens: products of matrices in place of a step for each token.

With G the running sum of the log decays in a chunk, L_ij = sum_d k_id k_jd exp(G_id - G_jd) below the diagonal, and P
the same of queries and keys, scaled, with the diagonal:

    u = (I + L diag(beta))^-1 (v - (k e^G) S)      V = beta u
    o = scale (q e^G) S + P V                      S <- e^G_C S + (k e^(G_C - G))^T V

`prepare` computes the inverse and P of all chunks at once, `through` goes from chunk to chunk with some columns of a
state in registers. That is 11 C D D_v operations or so for each chunk and head: at B=1, T=8192, 32 heads of 128 and
C=64, 0.05 PFLOP, 0.1 ms of an H100's tensor cores at half their rate. Inputs, outputs and the two matrices, each read
once, are 0.33 GB, 0.1 ms. What takes longer is that chunks follow each other: 128 times 5 small products, of which
three wait for one another. So the loop has nothing that can be computed before it, and states never go to memory.

The inverse is that of blocks of twice the size by those of the size before, (X - X M X), from 1 to C: unlike a sum of
powers of M, no term is larger than the result. With a decay for each channel (KDA), exp(G_i - G_j) is split into two
factors, around the middle of what the channel decays by in the chunk. Where that is more than numbers have room for,
blocks of half the size are taken so, and pairs with a boundary of blocks between them by a product of their own, whose
factors, to the boundary and from it, are at most 1: however fast a channel decays, nothing overflows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.arguments import known_aligned
from polyattn_triton.kernels.choices import architecture
from polyattn_triton.kernels.linear_recurrent import held_back, log_decay, sequence, sigmoid
from polyattn_triton.kernels.room import shared_memory
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import dot

__all__ = [
    "Cut",
    "Prepared",
    "chunk_of",
    "cut_for",
    "cut_of",
    "level",
    "matrices",
    "narrowed",
    "numbers",
    "place",
    "prepare",
    "through",
]


@triton.jit
def cut_of(starts, slot, row, tokens, sequences, steps, C: tl.constexpr, PACKED: tl.constexpr):
    """(sequence, its first token in the row, first token of the chunk in it, its tokens) of a chunk of a row.

    Packed sequences have one chunk more than they may need, so that a number says whose it is.
    """
    if PACKED:
        low, high = 0, sequences - 1
        for _ in range(steps):
            middle = (low + high + 1) >> 1
            its = tl.load(starts + middle).to(tl.int32) // C + middle <= slot
            low, high = tl.where(its, middle, low), tl.where(its, high, middle - 1)
        start = tl.load(starts + low).to(tl.int32)
        return low, start.to(tl.int64), (slot - start // C - low) * C, tl.load(starts + low + 1).to(tl.int32) - start
    else:
        return row, tl.cast(0, tl.int64), slot * C, tokens


@triton.jit
def place(starts, tokens, sequences, steps, C: tl.constexpr, PACKED: tl.constexpr):
    """(row of the batch, first token, how many tokens, number) of the chunk of this program, on axes 0 and 2."""
    slot, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    _, start, first, count = cut_of(starts, slot, tl.program_id(2), tokens, sequences, steps, C, PACKED)
    return b, start + first, tl.minimum(count - first, C), b * tl.num_programs(0) + slot


@triton.jit
def near_blocks(G, C: tl.constexpr, W: tl.constexpr, LEVELS: tl.constexpr, half: tl.constexpr):
    """(n, pairs in one block of 2^n tokens, the earlier of them second [C, C], decays from a middle to the first and
    from the second [C, W]). No channel decays in such a block by more than what numbers of the dtype have room for."""
    MOST: tl.constexpr = 4 if half == tl.float16 else 40
    i, n = tl.arange(0, C), LEVELS
    top, bottom = _ends(G, n, C, W)
    while (n > 0) & (tl.max(top - bottom) > 2 * MOST):
        n -= 1
        top, bottom = _ends(G, n, C, W)
    apart = G - 0.5 * (top + bottom)
    pairs = (i[:, None] > i[None, :]) & (i[:, None] >> n == i[None, :] >> n)
    return n, pairs, tl.exp(apart), tl.exp(-apart)


@triton.jit
def _ends(G, n, C: tl.constexpr, W: tl.constexpr):
    """G of the first and of the last token of each token's block."""
    first = tl.arange(0, C) >> n << n
    last = first + (1 << n) - 1
    return tl.gather(G, tl.broadcast_to(first[:, None], [C, W]), 0), tl.gather(
        G, tl.broadcast_to(last[:, None], [C, W]), 0
    )


@triton.jit
def level(G, n, C: tl.constexpr, W: tl.constexpr):
    """(which pairs have a boundary of blocks of 2^n between them and none of larger ones [C, C], decays to it and from
    it [C, W])."""
    i = tl.arange(0, C)
    later = (i >> n) % 2 == 1
    edge = tl.gather(G, tl.broadcast_to((((i >> (n + 1)) * 2 + 1 << n) - 1)[:, None], [C, W]), 0)
    pairs = later[:, None] & ~later[None, :] & (i[:, None] >> (n + 1) == i[None, :] >> (n + 1))
    return pairs, tl.exp(tl.where(later[:, None], G - edge, edge - G))


@triton.jit
def _inverse(M, C: tl.constexpr, LEVELS: tl.constexpr, half: tl.constexpr):
    """(I + M)^-1 of a matrix that is 0 on and above the diagonal. half: what is multiplied; halves are corrected once,
    by the rest that they leave: X + X (I - (I + M) X)."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    X = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, M, 0.0)
    for n in tl.static_range(1, LEVELS):
        below = tl.where((i // (2 * 2**n) == j // (2 * 2**n)) & (i // 2**n != j // 2**n), M, 0.0)
        known = cast(X, half)
        X -= dot(cast(dot(known, cast(below, half)), half), known)
    if half != tl.float32:
        known, high = cast(X, half), cast(M, half)
        X = known.to(tl.float32)
        rest = tl.where(i == j, 1.0, 0.0) - X - dot(high, known)
        rest -= dot(cast(M - high.to(tl.float32), half), known)
        X += dot(known, cast(rest, half))
    return X


@triton.jit(do_not_specialize=["tokens", "sequences", "steps", "size", "scale", "bound", "beta_range"])
def _prepare(
    query, key, gate, beta, a_log, dt_bias, starts, inverse, seen, sums, betas, norms, rows, ends,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, b_b, b_t, b_h, tokens, sequences, steps, size, scale, bound,
    beta_range, D: tl.constexpr, K: tl.constexpr, W: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr, KDA: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    PACKED: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """A value head in one chunk. W: channels that are computed with at a time. size: B T."""
    b, begin, count, number = place(starts, tokens, sequences, steps, C, PACKED)
    h, size = tl.program_id(1), tl.cast(size, tl.int64)
    if count > 0:
        heads: tl.constexpr = H * GROUP
        i, j, t = tl.arange(0, C), tl.arange(0, C)[None, :], begin + tl.arange(0, C)
        inside, token = i < count, b * tokens + t
        queries = query + b * q_b + h // GROUP * q_h + t[:, None] * q_t
        keys = key + b * k_b + h // GROUP * k_h + t[:, None] * k_t
        dtype: tl.constexpr = query.dtype.element_ty
        weight = tl.load(beta + b * b_b + t * b_t + h * b_h, mask=inside, other=0.0).to(tl.float32)
        rate = 1.0
        if RAW != "":
            rate = tl.exp(tl.load(a_log + h).to(tl.float32))
            weight = tl.where(inside, beta_range * sigmoid(weight), 0.0)
        tl.store(betas + token * heads + h, weight, mask=inside)
        near, far = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        q_sum, k_sum = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for first in range(0, K, W):
            d = first + tl.arange(0, W)
            wide = inside[:, None] & (d < D)[None, :]
            q = tl.load(queries + d[None, :], mask=wide, other=0.0)
            k = tl.load(keys + d[None, :], mask=wide, other=0.0)
            q_wide, k_wide = q.to(tl.float32), k.to(tl.float32)
            if NORM:
                q_sum += tl.sum(q_wide * q_wide, 1)
                k_sum += tl.sum(k_wide * k_wide, 1)
            if KDA:
                g_at = gate + b * g_b + t[:, None] * g_t + h * g_h + d[None, :]
                g = tl.load(g_at, mask=wide, other=0.0).to(tl.float32)
                if RAW != "":
                    if BIAS:
                        g += tl.load(dt_bias + h * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
                    g = tl.where(wide, log_decay(g, rate, bound, RAW), 0.0)
                g = held_back(g)
                G, end = tl.cumsum(g, 0), tl.sum(g, 0)
                far += tl.where(i[:, None] == j, tl.sum(q_wide * k_wide, 1)[:, None], 0.0)
                n_near, pairs, to, back = near_blocks(G, C, W, LEVELS, dtype)
                earlier = tl.trans(cast(k_wide * back, dtype))
                near += tl.where(pairs, dot(cast(k_wide * to, dtype), earlier), 0.0)
                far += tl.where(pairs, dot(cast(q_wide * to, dtype), earlier), 0.0)
                for n in range(n_near, LEVELS):
                    pairs, decay = level(G, n, C, W)
                    k_here, q_here = cast(k_wide * decay, dtype), cast(q_wide * decay, dtype)
                    near += tl.where(pairs, dot(k_here, tl.trans(k_here)), 0.0)
                    far += tl.where(pairs, dot(q_here, tl.trans(k_here)), 0.0)
                own, step = rows + (token[:, None] * heads + h) * D + d[None, :], size * (heads * D)
                before = tl.exp(G)
                tl.store(own, cast(k_wide * before, dtype), mask=wide)
                tl.store(own + step, cast(q_wide * (before * scale), dtype), mask=wide)
                tl.store(own + 2 * step, cast(k_wide * tl.exp(end[None, :] - G), dtype), mask=wide)
                tl.store(ends + (number * heads + h) * D + d, end, mask=d < D)
            else:
                far, near = dot(q, tl.trans(k), far), dot(k, tl.trans(k), near)
        if NORM:
            q_norm, k_norm = 1.0 / tl.sqrt(q_sum + 1e-6), 1.0 / tl.sqrt(k_sum + 1e-6)
            tl.store(norms + token * heads + h, q_norm, mask=inside)
            tl.store(norms + (size + token) * heads + h, k_norm, mask=inside)
            far *= q_norm[:, None] * k_norm[None, :]
            near *= k_norm[:, None] * k_norm[None, :]
        if not KDA:
            g = tl.load(gate + b * g_b + t * g_t + h * g_h, mask=inside, other=0.0).to(tl.float32)
            if RAW != "":
                if BIAS:
                    g += tl.load(dt_bias + h).to(tl.float32)
                g = tl.where(inside, log_decay(g, rate, bound, RAW), 0.0)
            G = tl.cumsum(held_back(g), 0)
            decay = tl.exp(tl.where(i[:, None] >= j, G[:, None] - G[None, :], 0.0))
            near, far = near * decay, far * decay
            tl.store(sums + token * heads + h, G, mask=inside)
        at = (token[:, None] * heads + h) * C + j
        tl.store(seen + at, cast(tl.where(i[:, None] >= j, far * scale, 0.0), dtype), mask=inside[:, None])
        near = tl.where(i[:, None] > j, near * weight[None, :], 0.0)
        tl.store(inverse + at, cast(_inverse(near, C, LEVELS, half), dtype), mask=inside[:, None])


@triton.jit
def matrices(inverse, seen, betas, token, inside, head, heads: tl.constexpr, C: tl.constexpr):
    """The inverse, P and betas of a chunk: what `prepare` wrote of these tokens."""
    square = (token[:, None] * heads + head) * C + tl.arange(0, C)[None, :]
    X = tl.load(inverse + square, mask=inside[:, None], other=0.0)
    P = tl.load(seen + square, mask=inside[:, None], other=0.0)
    return X, P, tl.load(betas + token * heads + head, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tokens", "chunks", "size", "scale"])
def _through(
    query, key, value, inverse, seen, sums, betas, norms, rows, ends, starts, slots, state, out, last, fresh, states,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, s_n, s_h, s_k, s_v, l_n, l_h, l_k, l_v,
    tokens, chunks, size, scale,
    D: tl.constexpr, D_V: tl.constexpr, K: tl.constexpr, N: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, KDA: tl.constexpr, NORM: tl.constexpr, FIRST: tl.constexpr, SLOTS: tl.constexpr,
    PACKED: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """N columns of the state of a head, through the chunks of one sequence. KEEP: what `gradients` reads is written in
    place of out and last: u, and the state before each chunk."""
    tile, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    size = tl.cast(size, tl.int64)
    heads: tl.constexpr = H * GROUP
    i, d, e = tl.arange(0, C), tl.arange(0, K), tile * N + tl.arange(0, N)
    in_d, in_e = d < D, e < D_V
    both = in_d[:, None] & in_e[None, :]
    row, begin, count = sequence(starts, n, tokens, PACKED)
    number = begin // C + n if PACKED else n * chunks
    slot = n
    if SLOTS:
        slot = tl.load(slots + n).to(tl.int64)
    dtype: tl.constexpr = query.dtype.element_ty
    outs = out + row * o_b + head * o_h + e[None, :]
    if slot < 0:
        for c in range(0, count, C):
            t = begin + c + i
            there = (c + i < count)[:, None] & in_e[None, :]
            tl.store(outs + t[:, None] * o_t, tl.zeros([C, N], out.dtype.element_ty), mask=there)
    else:
        held = tl.zeros([K, N], tl.float32)
        if FIRST:
            given = state + slot * s_n + head * s_h + d[:, None] * s_k + e[None, :] * s_v
            held = tl.load(given, mask=both, other=0.0).to(tl.float32)
        values = value + row * v_b + head * v_h + e[None, :]
        if KDA:
            keys, k_step, q_step = rows + head * D + d[None, :], heads * D, heads * D
            queries = keys + size * (heads * D)
            ends += head * D
        else:
            keys, k_step = key + row * k_b + head // GROUP * k_h + d[None, :], k_t
            queries, q_step = query + row * q_b + head // GROUP * q_h + d[None, :], q_t
        first = row * tokens
        for c in tl.range(0, tl.cdiv(count, C), num_stages=STAGES):
            t = begin + c * C + i
            inside = c * C + i < count
            wide, there = inside[:, None] & in_d[None, :], inside[:, None] & in_e[None, :]
            token = first + t
            at = token if KDA else t
            k = tl.load(keys + at[:, None] * k_step, mask=wide, other=0.0)
            q = tl.load(queries + at[:, None] * q_step, mask=wide, other=0.0)
            v = tl.load(values + t[:, None] * v_t, mask=there, other=0.0)
            X, P, weight = matrices(inverse, seen, betas, token, inside, head, heads, C)
            now = cast(held, dtype)
            known, found = dot(k, now), dot(q, now)
            before, after = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
            if KDA:
                k_last = tl.load(keys + 2 * size * (heads * D) + at[:, None] * k_step, mask=wide, other=0.0)
                end = tl.load(ends + (number + c) * (heads * D) + d, mask=in_d, other=0.0)[:, None]
            else:
                k_last = k
                G = tl.load(sums + token * heads + head, mask=inside, other=0.0)
                end = tl.load(sums + (first + begin + tl.minimum(c * C + C, count) - 1) * heads + head)
                before, after = tl.exp(G), tl.exp(end - G)
                found *= (before * scale)[:, None]
            if NORM:
                found *= tl.load(norms + token * heads + head, mask=inside, other=0.0)[:, None]
                k_norm = tl.load(norms + (size + token) * heads + head, mask=inside, other=0.0)
                before, after = before * k_norm, after * k_norm
            rest = v.to(tl.float32) - known * before[:, None]
            u = dot(X, cast(rest, dtype))
            new = u * weight[:, None]
            if KEEP:
                own = (token[:, None] * heads + head) * D_V + e[None, :]
                tl.store(fresh + own, cast(u, dtype), mask=there)
                own = (((number + c) * heads + head) * D + d[:, None]) * D_V + e[None, :]
                tl.store(states + own, now, mask=both)
            else:
                found = dot(P, cast(new, dtype), found)
                tl.store(outs + t[:, None] * o_t, cast(found, out.dtype.element_ty), mask=there)
            held = dot(tl.trans(k_last), cast(new * after[:, None], dtype), held * tl.exp(end))
        if not KEEP:
            tl.store(last + slot * l_n + head * l_h + d[:, None] * l_k + e[None, :] * l_v, held, mask=both)


class Cut(NamedTuple):
    """How a launch is cut: columns of a state in a program, its warps, and the stages of its pipeline."""

    N: int
    warps: int
    stages: int


class Prepared(NamedTuple):
    """What `prepare` found. Of each token (t) and chunk (n), numbers of `place`:

    Attributes:
        inverse, seen: the rows of (I + L diag(beta))^-1 and of P, [t, H_v, C]. sums: G, [t, H_v], GDN only.
        betas: [t, H_v]. norms: what queries and keys are multiplied by, [2, t, H_v], if asked for.
        rows: k e^G, scale q e^G, k e^(G_C - G), [3, t, H_v, D], KDA only. ends: G_C, [n, H_v, D], KDA only.
    """

    inverse: Tensor
    seen: Tensor
    sums: Tensor
    betas: Tensor
    norms: Tensor
    rows: Tensor
    ends: Tensor


_PREPARE = {False: Cut(64, 4, 2), True: Cut(32, 4, 2)}
"""How `prepare` is cut, N being channels, without and with a decay for each."""


def chunk_of(query: Tensor) -> int:
    """Tokens of a chunk: what shared memory has room for."""
    limit = shared_memory(query.device)
    small = limit is not None and limit <= 120 << 10
    return 64 >> ((query.dtype.itemsize == 4 or small) + (query.shape[-1] > 128))


def numbers(batch: int, tokens: int, cu_seqlens: Tensor | None, chunk: int) -> tuple[int, int, int]:
    """(chunks of a row at most, rows, chunks of all)."""
    if cu_seqlens is None:
        chunks = triton.cdiv(tokens, chunk)
        return chunks, batch, batch * chunks
    # Of no sequences there is none to find: a program would read past the end of cu_seqlens.
    chunks = tokens // chunk + cu_seqlens.shape[0] if cu_seqlens.shape[0] > 1 else 0
    return chunks, 1, chunks


def prepare(
    query: Tensor, key: Tensor, gate: Tensor, beta: Tensor, *, scale: float, a_log: Tensor | None = None,
    dt_bias: Tensor | None = None, raw: str = "", bound: float = 0.0, beta_range: int = 1, norm: bool = False,
    cu_seqlens: Tensor | None = None, chunk: int = 64, cut: Cut | None = None,
) -> Prepared:  # fmt: skip
    """See the module. Rows have a dense last axis; gates and betas as `polyattn.contract.LinearForward` has them."""
    (B, T, H, D), H_V, kda = query.shape, beta.shape[2], gate.ndim == 4
    chunks, batch, count = numbers(B, T, cu_seqlens, chunk)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    none = torch.empty(0, **wide)
    made = Prepared(
        query.new_empty(B * T, H_V, chunk), query.new_empty(B * T, H_V, chunk),
        none if kda else torch.empty(B * T, H_V, **wide), torch.empty(B * T, H_V, **wide),
        torch.empty(2, B * T, H_V, **wide) if norm else none,
        query.new_empty(3, B * T, H_V, D) if kda else none, torch.empty(count, H_V, D, **wide) if kda else none,
    )  # fmt: skip
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K = max(triton.next_power_of_2(D), 16)
    W, warps, stages = cut or narrowed(_PREPARE[kda], query, key)
    # Halves of which no number is too large: also where inputs are float16.
    half = tl.float32 if query.dtype == torch.float32 else tl.bfloat16
    with runtime.device_of(query):
        _prepare[chunks, H_V, batch](
            query, key, gate, beta, *(query if t is None else t for t in (a_log, dt_bias, cu_seqlens)), *made,
            *query.stride()[:3], *key.stride()[:3], *gate.stride()[:3], *beta.stride(), T, sequences,
            sequences.bit_length(), B * T, scale, bound, float(beta_range), D=D, K=K, W=min(K, W), H=H,
            GROUP=H_V // H, C=chunk, LEVELS=chunk.bit_length() - 1, KDA=kda, RAW=raw, BIAS=dt_bias is not None,
            NORM=norm, PACKED=cu_seqlens is not None, half=half, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
    return made


def narrowed(cut: Cut, query: Tensor, *rows: Tensor, D_V: int = 0, held: bool = False) -> Cut:
    """Give `cut`, or two warps and fewer columns where ptxas 12.8 (in Triton 3.6) spoils it on Hopper.

    Four warps multiply by `wgmma`, from descriptors of tiles in shared memory. Tiles that come there by way of
    registers take each other's place, and are laid out in three ways: those of 16 columns, of 32, and of 64 or more.
    There ptxas mistakes a register that descriptors are made from, and results are wrong by any amount. Two warps
    multiply by `mma.sync`, which has no descriptors.

    Args:
        rows: what is multiplied as it is read, beside queries. Rows go by way of registers where the compiler does not
            know that they begin at 16 bytes. D_V: of rows that kernels write and read again, 0 = none.
        held: whether all columns of values are read at once. No loop copies them ahead then, and they go so as well.
    """
    if architecture(query.device) != "hopper" or query.dtype.itemsize != 2:
        return cut
    aligned = known_aligned(query, *rows) and not (query.shape[-1] & 7 or D_V & 7)
    return cut if aligned and not held else cut._replace(N=min(cut.N, 32), warps=2)


def cut_for(query: Tensor, heads: int, D_V: int, sequences: int) -> Cut:
    """Columns such that there is a program for each multiprocessor, or the fewest that products have."""
    wide = triton.next_power_of_2(query.shape[-1]) * query.dtype.itemsize
    N = max(min(triton.next_power_of_2(D_V), 64, (16 << 10) // wide), 16)
    while N > 16 and heads * sequences * triton.cdiv(D_V, N) < 0.9 * runtime.processors(query.device):
        N //= 2
    if query.dtype.itemsize == 4 or architecture(query.device) == "other":
        return Cut(N, 4, 1)
    # A third chunk on its way takes a quarter off the time of an H100, where it fits.
    room = shared_memory(query.device) or 0
    return Cut(N, 4, 3 if N <= 32 and wide <= 256 and room > 220 << 10 else 2)


def through(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, made: Prepared, *, scale: float, turned: bool,
    out: Tensor | None = None, last: Tensor | None = None, slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None, cut: Cut | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write `out` and `last`, or, without them, return what gradients are computed from: u of each token [t, H_v, D_v]
    and the state before each chunk [n, H_v, D, D_v]. turned: states are VK."""
    (B, T, H_V, D_V), (H, D) = value.shape, query.shape[2:]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunk, kda = made.inverse.shape[-1], made.rows.numel() > 0
    keep = last is None
    fresh, states = query, query
    if keep:
        fresh = query.new_empty(B * T, H_V, D_V)
        states = query.new_empty(numbers(B, T, cu_seqlens, chunk)[2], H_V, D, D_V)
    axes = (-1, -2) if turned else (-2, -1)
    results = (value if out is None else out, fresh if last is None else last)
    given = results[1] if state is None else state
    after = (0, 0, 0, 0) if last is None else (last.stride(0), last.stride(1), *(last.stride(a) for a in axes))
    before = (0, 0, 0, 0) if state is None else (state.stride(0), state.stride(1), *(state.stride(a) for a in axes))
    N, warps, stages = cut or narrowed(cut_for(query, H_V, D_V, sequences), query, key, value, D_V=D_V)
    with runtime.device_of(query):
        _through[triton.cdiv(D_V, N), H_V, sequences](
            query, key, value, *made, *(query if t is None else t for t in (cu_seqlens, slots)), given, *results,
            fresh, states, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *results[0].stride()[:3],
            *before, *after, T, triton.cdiv(T, chunk), B * T, scale, D=D, D_V=D_V,
            K=max(triton.next_power_of_2(D), 16), N=N, H=H, GROUP=H_V // H, C=chunk, KDA=kda,
            NORM=made.norms.numel() > 0, FIRST=state is not None, SLOTS=slots is not None,
            PACKED=cu_seqlens is not None, KEEP=keep, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return fresh, states
