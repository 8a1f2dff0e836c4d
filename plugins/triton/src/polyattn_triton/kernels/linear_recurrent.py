"""Linear attention token by token: decode, short prompts and drafts, of packed sequences, with states in slots.

A program holds the columns of one state in registers, float32, and goes through the tokens of one sequence. The state
is read and written once, which is all the time that decode takes: bytes over bandwidth. Raw gates and rows of any
length are computed on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.semantics.delta_rule import LEAST
from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.rounding import cast

__all__ = ["held_back", "log_decay", "recurrent", "sequence", "sigmoid", "unit"]

_LEAST = tl.constexpr(LEAST[torch.float32])
_TILE = 4096
"""Numbers of a state that a program holds."""


@triton.jit
def sigmoid(x):
    # Of the size, so that nothing overflows.
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def log_decay(raw, rate, bound, RAW: tl.constexpr):
    """The log decay of a raw gate, its bias added. rate: exp(a_log)."""
    if RAW == "softplus":
        return -rate * (tl.maximum(raw, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raw))))
    else:
        return bound * sigmoid(rate * raw)


@triton.jit
def held_back(gate):
    """A log decay of which sums can be made: one whose decay is 0 is the least that is (`delta_rule.held_back`)."""
    return tl.where(gate < _LEAST, _LEAST, gate)  # a NaN stays


@triton.jit
def unit(x):
    """A row divided by its length (S10)."""
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def sequence(starts, n, tokens, PACKED: tl.constexpr):
    """(row of the batch, first token in it, tokens) of a sequence. Packed ones lie behind each other in row 0."""
    if PACKED:
        begin = tl.load(starts + n).to(tl.int64)
        return n * 0, begin, (tl.load(starts + n + 1) - begin).to(tl.int32)
    else:
        return n, n * 0, tokens


@triton.jit(do_not_specialize=["tokens", "scale", "bound", "beta_range"])
def _recurrent(
    query, key, value, gate, beta, a_log, dt_bias, state, slots, parents, starts, out, last,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, b_b, b_t, b_h, o_b, o_t, o_h,
    s_n, s_h, s_k, s_v, l_n, l_t, l_h, l_k, l_v, p_b, p_t, tokens, scale, bound, beta_range,
    D: tl.constexpr, D_V: tl.constexpr, K: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, KDA: tl.constexpr,
    RAW: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, FIRST: tl.constexpr, SLOTS: tl.constexpr,
    PACKED: tl.constexpr, EVERY: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """N columns of the state of a head and sequence. FIRST: a state is given. EVERY: `last` has one for each token."""
    tile, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d, e = tl.arange(0, K), tile * N + tl.arange(0, N)
    in_d, in_e = d < D, e < D_V
    both = in_d[:, None] & in_e[None, :]
    row, begin, count = sequence(starts, n, tokens, PACKED)
    slot = n
    if SLOTS:
        slot = tl.load(slots + n).to(tl.int64)
    queries, keys = query + row * q_b + head // GROUP * q_h, key + row * k_b + head // GROUP * k_h
    values, outs = value + row * v_b + head * v_h + e, out + row * o_b + head * o_h + e
    gates, betas = gate + row * g_b + head * g_h, beta + row * b_b + head * b_h
    if slot < 0:
        for step in range(count):
            t = begin + step
            tl.store(outs + t * o_t, tl.zeros([N], out.dtype.element_ty), mask=in_e)
            if EVERY:
                at = last + n * l_n + t * l_t + head * l_h + d[:, None] * l_k + e[None, :] * l_v
                tl.store(at, tl.zeros([K, N], tl.float32), mask=both)
    else:
        before = state + slot * s_n + head * s_h + d[:, None] * s_k + e[None, :] * s_v
        after = last + slot * l_n + head * l_h + d[:, None] * l_k + e[None, :] * l_v
        if EVERY:
            after = last + n * l_n + head * l_h + d[:, None] * l_k + e[None, :] * l_v
        held = tl.zeros([K, N], tl.float32)
        if FIRST:
            held = tl.load(before, mask=both, other=0.0).to(tl.float32)
        rate, bias = 1.0, 0.0
        if RAW != "":
            rate = tl.exp(tl.load(a_log + head).to(tl.float32))
            if BIAS:
                if KDA:
                    bias = tl.load(dt_bias + head * D + d, mask=in_d, other=0.0).to(tl.float32)
                else:
                    bias = tl.load(dt_bias + head).to(tl.float32)
        for step in range(count):
            t = begin + step
            if TREE:
                parent = tl.load(parents + row * p_b + step * p_t).to(tl.int64)
                # What other threads of this program wrote for the parent must be there.
                tl.debug_barrier()
                if parent >= 0:
                    held = tl.load(after + parent * l_t, mask=both, other=0.0)
                else:
                    held = tl.zeros([K, N], tl.float32)
                    if FIRST:
                        held = tl.load(before, mask=both, other=0.0).to(tl.float32)
            q = tl.load(queries + t * q_t + d, mask=in_d, other=0.0).to(tl.float32)
            k = tl.load(keys + t * k_t + d, mask=in_d, other=0.0).to(tl.float32)
            v = tl.load(values + t * v_t, mask=in_e, other=0.0).to(tl.float32)
            b = tl.load(betas + t * b_t).to(tl.float32)
            if NORM:
                q, k = unit(q), unit(k)
            if RAW != "":
                b = beta_range * sigmoid(b)
            if KDA:
                g = tl.load(gates + t * g_t + d, mask=in_d, other=0.0).to(tl.float32)
                if RAW != "":
                    g = log_decay(g + bias, rate, bound, RAW)
                held = held * tl.exp(g)[:, None]
            else:
                g = tl.load(gates + t * g_t).to(tl.float32)
                if RAW != "":
                    g = log_decay(g + bias, rate, bound, RAW)
                held = held * tl.exp(g)
            fresh = b * (v - tl.sum(held * k[:, None], 0))
            held += k[:, None] * fresh[None, :]
            tl.store(outs + t * o_t, cast(tl.sum(held * q[:, None], 0) * scale, out.dtype.element_ty), mask=in_e)
            if EVERY:
                tl.store(after + t * l_t, held, mask=both)
        if not EVERY:
            tl.store(after, held, mask=both)


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    out: Tensor,
    last: Tensor,
    scale: float,
    turned: bool,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    raw: str = "",
    bound: float = 0.0,
    beta_range: int = 1,
    norm: bool = False,
    slots: Tensor | None = None,
    parents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    every: bool = False,
    cut: tuple[int, int] | None = None,
) -> None:
    """Write `out` and `last`, see `polyattn.contract.LinearForward`. Rows have a dense last axis. turned: VK.

    last: the new states, [N, ...] or the pool; with `every` [B, T, ...]. cut: columns of a state in a
    program, and its warps.
    """
    (B, T, H_v, D_V), (H, D) = value.shape, query.shape[2:]
    count = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if not count or not (T or last.numel()):
        return
    K = triton.next_power_of_2(D)
    # The interpreter takes as long for a large tile as for a small one.
    N, warps = cut or (max(_TILE // K if not runtime.INTERPRETED else D_V, 16), 4)
    N = triton.next_power_of_2(min(N, max(triton.next_power_of_2(D_V), 16)))
    first, nothing = state, query
    state = last if state is None else state
    axes = (-1, -2) if turned else (-2, -1)
    # (sequence, head, D, D_v); of all states of drafts also (token).
    before = (state.stride(0), state.stride(-3), state.stride(axes[0]), state.stride(axes[1]))
    after = (last.stride(0), last.stride(1) if every else 0, *(last.stride(axis) for axis in (-3, *axes)))
    kda = gate.ndim == 4
    given: dict[str, Any] = {"KDA": kda, "RAW": raw, "BIAS": dt_bias is not None, "NORM": norm, "EVERY": every}
    with runtime.device_of(query):
        _recurrent[triton.cdiv(D_V, N), H_v, count](
            query, key, value, gate, beta, *(nothing if t is None else t for t in (a_log, dt_bias)), state,
            *(nothing if t is None else t for t in (slots, parents, cu_seqlens)), out, last,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *gate.stride()[:3], *beta.stride(),
            *out.stride()[:3], *before, *after, *((0, 0) if parents is None else parents.stride()), T, scale, bound,
            float(beta_range), D=D, D_V=D_V, K=K, N=N, GROUP=H_v // H, FIRST=first is not None,
            SLOTS=slots is not None, PACKED=cu_seqlens is not None, TREE=parents is not None, **given,
            num_warps=warps,
        )  # fmt: skip
