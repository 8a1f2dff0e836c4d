"""Gradients of linear attention in chunks: the names and equations of `delta_chunks`, the other way round.

With dS the gradient of the state after a chunk, R = v - (k e^G) S and u = (I + L diag(beta))^-1 R:

    dV = P^T do + (k e^(G_C - G)) dS        dR = (I + L diag(beta))^-T beta dV = dv
    dS <- e^G_C dS + scale (q e^G)^T do - (k e^G)^T dR
    dP = do V^T      dL = -dR V^T           both below the diagonal, P on it as well
    dbeta = sum_e u (dV - L^T dR)

`returned` goes through the chunks from the last to the first with columns of dS in registers; the states that it meets
were computed again and kept. `collected` takes all chunks at once: dP, dL and the states' gradients are what those of
queries, keys and decays are made of. A decay's gradient is q dq + k dk, with a minus where k is the older token. That
is three times the operations of the forward call, and 16 bytes more for each number of the state of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.delta_chunks import (
    Cut,
    Prepared,
    cut_for,
    level,
    matrices,
    narrowed,
    near_blocks,
    numbers,
    place,
    through,
)
from polyattn_triton.kernels.linear_recurrent import held_back, sequence
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import dot

__all__ = ["gradients"]

_COLLECT = Cut(32, 4, 2)
"""How `collected` is cut, N being channels."""
_COLUMNS = 64
"""Of values that it computes with at a time."""


@triton.jit(do_not_specialize=["tokens", "chunks", "size", "scale"])
def _returned(
    query, key, inverse, seen, sums, betas, rows, ends, starts, fresh, dout, dlast, dvalue, dbeta, dstate, dstates,
    q_b, q_t, q_h, k_b, k_t, k_h, tokens, chunks, size, scale, l_n, l_h, l_k, l_v,
    D: tl.constexpr, D_V: tl.constexpr, K: tl.constexpr, N: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, KDA: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """N columns of dS of a head, through the chunks of one sequence, the last one first."""
    tile, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    size = tl.cast(size, tl.int64)
    heads: tl.constexpr = H * GROUP
    i, d, e = tl.arange(0, C), tl.arange(0, K), tile * N + tl.arange(0, N)
    in_d, in_e = d < D, e < D_V
    both = in_d[:, None] & in_e[None, :]
    row, begin, count = sequence(starts, n, tokens, PACKED)
    number = begin // C + n if PACKED else n * chunks
    dtype: tl.constexpr = query.dtype.element_ty
    states_at = n * l_n + head * l_h + d[:, None] * l_k + e[None, :] * l_v
    held = tl.load(dlast + states_at, mask=both, other=0.0).to(tl.float32)
    if KDA:
        keys, k_step, q_step = rows + head * D + d[None, :], heads * D, heads * D
        queries = keys + size * (heads * D)
        ends += head * D
    else:
        keys, k_step = key + row * k_b + head // GROUP * k_h + d[None, :], k_t
        queries, q_step = query + row * q_b + head // GROUP * q_h + d[None, :], q_t
    first = row * tokens
    steps = tl.cdiv(count, C)
    for step in tl.range(0, steps, num_stages=STAGES):
        c = steps - 1 - step
        t = begin + c * C + i
        inside = c * C + i < count
        wide, there = inside[:, None] & in_d[None, :], inside[:, None] & in_e[None, :]
        token = first + t
        at = token if KDA else t
        k = tl.load(keys + at[:, None] * k_step, mask=wide, other=0.0)
        q = tl.load(queries + at[:, None] * q_step, mask=wide, other=0.0)
        own = (token[:, None] * heads + head) * D_V + e[None, :]
        do = tl.load(dout + own, mask=there, other=0.0)
        u = tl.load(fresh + own, mask=there, other=0.0)
        X, P, weight = matrices(inverse, seen, betas, token, inside, head, heads, C)
        now = cast(held, dtype)
        tl.store(dstates + (((number + c) * heads + head) * D + d[:, None]) * D_V + e[None, :], now, mask=both)
        if KDA:
            k_last = tl.load(keys + 2 * size * (heads * D) + at[:, None] * k_step, mask=wide, other=0.0)
            end = tl.load(ends + (number + c) * (heads * D) + d, mask=in_d, other=0.0)[:, None]
            change = dot(k_last, now)
        else:
            G = tl.load(sums + token * heads + head, mask=inside, other=0.0)
            end = tl.load(sums + (first + begin + tl.minimum(c * C + C, count) - 1) * heads + head)
            change = dot(k, now) * tl.exp(end - G)[:, None]
        change = dot(tl.trans(P), do, change)
        tl.store(dbeta + (tile * size + token) * heads + head, tl.sum(change * u.to(tl.float32), 1), mask=inside)
        dv = dot(tl.trans(X), cast(change * weight[:, None], dtype))
        tl.store(dvalue + own, cast(dv, dtype), mask=there)
        held *= tl.exp(end)
        if not KDA:
            before = tl.exp(G)[:, None]
            dv *= before
            do = cast(do.to(tl.float32) * (before * scale), dtype)
        held = dot(tl.trans(q), do, held)
        held -= dot(tl.trans(k), cast(dv, dtype))
    tl.store(dstate + states_at, held, mask=both)


@triton.jit(do_not_specialize=["tokens", "sequences", "steps", "size", "scale"])
def _collected(
    query, key, gate, sums, betas, starts, fresh, states, dout, dvalue, dstates, dquery, dkey, dgate, dbeta,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, tokens, sequences, steps, size, scale,
    D: tl.constexpr, D_V: tl.constexpr, K: tl.constexpr, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, KDA: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg and what is left of dbeta, of a value head in one chunk. W, N: channels and columns that are computed
    with at a time; E: D_v up to a power of two."""
    b, begin, count, number = place(starts, tokens, sequences, steps, C, PACKED)
    h = tl.program_id(1)
    if count > 0:
        heads: tl.constexpr = H * GROUP
        dtype: tl.constexpr = query.dtype.element_ty
        i, j, t = tl.arange(0, C), tl.arange(0, C)[None, :], begin + tl.arange(0, C)
        inside, token = i < count, b * tokens + t
        weight = tl.load(betas + token * heads + h, mask=inside, other=0.0)
        dP, dL = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        for column in range(0, E, N):
            e = column + tl.arange(0, N)
            there = inside[:, None] & (e < D_V)[None, :]
            own = (token[:, None] * heads + h) * D_V + e[None, :]
            u = tl.trans(tl.load(fresh + own, mask=there, other=0.0))
            dP = dot(tl.load(dout + own, mask=there, other=0.0), u, dP)
            dL = dot(tl.load(dvalue + own, mask=there, other=0.0), u, dL)
        # dL is not yet multiplied by the betas of its columns: their gradients are made of it.
        dP, dL = tl.where(i[:, None] >= j, dP * (weight * scale)[None, :], 0.0), tl.where(i[:, None] > j, -dL, 0.0)
        if KDA:
            same = tl.sum(tl.where(i[:, None] == j, dP, 0.0), 1)[:, None]
        else:
            G = tl.load(sums + token * heads + h, mask=inside, other=0.0)
            end = tl.load(sums + (b * tokens + begin + count - 1) * heads + h)
            decay = tl.exp(tl.where((i[:, None] >= j) & inside[:, None], G[:, None] - G[None, :], 0.0))
            dP, dL = cast(dP * decay, dtype), cast(dL * decay, dtype)
            before, after = tl.exp(G)[:, None], tl.where(inside, tl.exp(end - G), 0.0)[:, None]
        change, backs, rest = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), 0.0
        for first in range(0, K, W):
            d = first + tl.arange(0, W)
            wide = inside[:, None] & (d < D)[None, :]
            dq, older = tl.zeros([C, W], tl.float32), tl.zeros([C, W], tl.float32)
            younger = tl.zeros([C, W], tl.float32)
            kept = tl.zeros([W], tl.float32)
            for column in range(0, E, N):
                e = column + tl.arange(0, N)
                there = inside[:, None] & (e < D_V)[None, :]
                own = (token[:, None] * heads + h) * D_V + e[None, :]
                # Transposed: [N, W].
                at = ((number * heads + h) * D + d[None, :]) * D_V + e[:, None]
                both = (e < D_V)[:, None] & (d < D)[None, :]
                S, dS = tl.load(states + at, mask=both, other=0.0), tl.load(dstates + at, mask=both, other=0.0)
                kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
                dq = dot(tl.load(dout + own, mask=there, other=0.0), S, dq)
                younger = dot(tl.load(dvalue + own, mask=there, other=0.0), S, younger)
                older = dot(tl.load(fresh + own, mask=there, other=0.0), dS, older)
            q = tl.load(query + b * q_b + h // GROUP * q_h + t[:, None] * q_t + d[None, :], mask=wide, other=0.0)
            k = tl.load(key + b * k_b + h // GROUP * k_h + t[:, None] * k_t + d[None, :], mask=wide, other=0.0)
            q_wide, k_wide = q.to(tl.float32), k.to(tl.float32)
            older *= weight[:, None]
            back = tl.zeros([C, W], tl.float32)
            made = (token[:, None] * heads + h) * D + d[None, :]
            if KDA:
                g_at = gate + b * g_b + t[:, None] * g_t + h * g_h + d[None, :]
                g = held_back(tl.load(g_at, mask=wide, other=0.0).to(tl.float32))
                G, end = tl.cumsum(g, 0), tl.sum(g, 0)
                before = tl.exp(G)
                dq, younger, older = dq * (before * scale), -younger * before, older * tl.exp(end[None, :] - G)
                kept = kept * tl.exp(end) + tl.sum(k_wide * older, 0)
                dq += same * k_wide
                older += same * q_wide
                n_near, pairs, to, fro = near_blocks(G, C, W, LEVELS, dtype)
                P_here, L_here = cast(tl.where(pairs, dP, 0.0), dtype), cast(tl.where(pairs, dL, 0.0), dtype)
                k_from = k_wide * fro
                dq += to * dot(P_here, cast(k_from, dtype))
                younger += to * dot(L_here, cast(k_from * weight[:, None], dtype))
                older += fro * dot(tl.trans(P_here), cast(q_wide * to, dtype))
                back += fro * dot(tl.trans(L_here), cast(k_wide * to, dtype))
                for n in range(n_near, LEVELS):
                    pairs, factor = level(G, n, C, W)
                    k_here, q_here = cast(k_wide * factor, dtype), cast(q_wide * factor, dtype)
                    P_here, L_here = cast(tl.where(pairs, dP, 0.0), dtype), cast(tl.where(pairs, dL, 0.0), dtype)
                    dq += factor * dot(P_here, k_here)
                    younger += factor * dot(L_here, cast(k_wide * factor * weight[:, None], dtype))
                    older += factor * dot(tl.trans(P_here), q_here)
                    back += factor * dot(tl.trans(L_here), k_here)
                older += back * weight[:, None]
                dg = tl.cumsum(q_wide * dq + k_wide * (younger - older), 0, reverse=True) + kept[None, :]
                tl.store(dgate + made, dg, mask=wide)
            else:
                dq, younger, older = dq * (before * scale), -younger * before, older * after
                rest += tl.exp(end) * tl.sum(kept, 0) + tl.sum(tl.sum(k_wide * older, 1), 0)
                dq, younger = dot(dP, k, dq), dot(dL, cast(k_wide * weight[:, None], dtype), younger)
                back = dot(tl.trans(dL), k, back)
                older = dot(tl.trans(dP), q, older) + back * weight[:, None]
                change += tl.sum(q_wide * dq + k_wide * (younger - older), 1)
            backs += tl.sum(k_wide * back, 1)
            tl.store(dquery + made, cast(dq, dtype), mask=wide)
            tl.store(dkey + made, cast(younger + older, dtype), mask=wide)
        tl.store(dbeta + token * heads + h, backs, mask=inside)
        if not KDA:
            tl.store(dgate + token * heads + h, tl.cumsum(change, 0, reverse=True) + rest, mask=inside)


def gradients(
    dout: Tensor, dlast: Tensor, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor,
    state: Tensor | None, made: Prepared, *, scale: float, turned: bool, cu_seqlens: Tensor | None = None,
    cut: Cut | None = None, collect: Cut | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv, dg, dbeta, dstate), in the dtypes of the inputs, the last float32.

    Args:
        dout: [B, T, H_v, D_v]. dlast: as the state. made: of `prepare`, for the same inputs, whose rows have a dense
            last axis. turned: states are VK. cut, collect: of the two launches.
    """
    (B, T, H_V, D_V), (H, D) = value.shape, query.shape[2:]
    fresh, states = through(query, key, value, state, made, scale=scale, turned=turned, cu_seqlens=cu_seqlens)
    chunk, kda, size, K = made.inverse.shape[-1], gate.ndim == 4, B * T, max(triton.next_power_of_2(D), 16)
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    N, warps, stages = cut or narrowed(cut_for(query, H_V, D_V, sequences), query, key, D_V=D_V)
    stages = min(stages, 2)
    dout, dlast = dout.to(query.dtype).contiguous(), dlast.contiguous()
    dvalue, dstates, dstate = torch.empty_like(dout), torch.empty_like(states), torch.empty_like(dlast)
    tiles = triton.cdiv(D_V, N)
    dbeta = made.betas.new_empty(tiles + 1, *made.betas.shape)
    dquery, dkey = (query.new_empty(B, T, H, H_V // H, D) for _ in range(2))
    dgate = torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    axes = (-1, -2) if turned else (-2, -1)
    starts = query if cu_seqlens is None else cu_seqlens
    shared = {"D": D, "D_V": D_V, "K": K, "H": H, "GROUP": H_V // H, "C": chunk, "KDA": kda}
    shared["PACKED"] = cu_seqlens is not None
    strides = (*query.stride()[:3], *key.stride()[:3])
    chunks, batch, _ = numbers(B, T, cu_seqlens, chunk)
    E = max(triton.next_power_of_2(D_V), 16)
    W, collecting, ahead = collect or narrowed(_COLLECT, query, key, D_V=D_V, held=E <= _COLUMNS)
    with runtime.device_of(query):
        _returned[tiles, H_V, sequences](
            query, key, made.inverse, made.seen, made.sums, made.betas, made.rows, made.ends, starts, fresh, dout,
            dlast, dvalue, dbeta, dstate, dstates, *strides, T, triton.cdiv(T, chunk), size, scale, *dlast.stride()[:2],
            *(dlast.stride(axis) for axis in axes), N=N, STAGES=stages, num_warps=warps, **shared,
        )  # fmt: skip
        _collected[chunks, H_V, batch](
            query, key, gate, made.sums, made.betas, starts, fresh, states, dout, dvalue, dstates, dquery, dkey, dgate,
            dbeta[tiles], *strides, *gate.stride()[:3], T, sequences, sequences.bit_length(), size, scale,
            E=E, W=min(K, W), N=min(E, _COLUMNS), LEVELS=chunk.bit_length() - 1, num_warps=collecting, num_stages=ahead,
            **shared,
        )  # fmt: skip
    return (
        dquery.sum(3), dkey.sum(3), dvalue.to(value.dtype), dgate.to(gate.dtype),
        dbeta.sum(0).view(beta.shape).to(beta.dtype), dstate,
    )  # fmt: skip
