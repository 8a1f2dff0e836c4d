"""The causal convolution before linear attention, over the tails that a pool keeps: prompts, steps, drafts.

A program has some channels of some tokens of one sequence: W rows of the input for each of them, from the cache but for
one, so that the time is that of reading the input and writing the output once. The tail of a sequence is read and
written by the program of its first tokens alone: no other one sees it while it changes.
"""

from __future__ import annotations

from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.delta_chunks import cut_of, numbers
from polyattn_triton.kernels.linear_recurrent import sigmoid
from polyattn_triton.kernels.rounding import cast

__all__ = ["causal_conv"]

TOKENS = 16
"""Tokens of a program, at most."""
CHANNELS = 256


@triton.jit
def _earlier(parents, at, row, step, TREE: tl.constexpr):
    """The token before each of these; -1 is the last number of the tail, -2 the one before it."""
    if TREE:
        return tl.where(at >= 0, tl.load(parents + row + at * step, mask=at >= 0, other=-1).to(tl.int32), at - 1)
    else:
        return at - 1


@triton.jit(do_not_specialize=["tokens", "sequences", "steps"])
def _conv(
    x, weight, bias, tails, slots, starts, parents, out, drafted,
    x_b, x_t, w_c, w_w, s_n, s_c, s_w, o_b, o_t, d_n, d_t, d_c, d_w, p_b, p_t, tokens, sequences, steps,
    C: tl.constexpr, W: tl.constexpr, T: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
    EVERY: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """N channels of T tokens. EVERY: the tail after each token goes to `drafted`, and that of the pool stays."""
    c, b = tl.program_id(1) * N + tl.arange(0, N), tl.program_id(2)
    n, begin, first, count = cut_of(starts, tl.program_id(0), b, tokens, sequences, steps, T, PACKED)
    row = b.to(tl.int64) * 0 if PACKED else b.to(tl.int64)
    slot, in_c = tl.load(slots + n).to(tl.int64), c < C
    inputs, tail = x + row * x_b + begin * x_t + c[None, :], tails + slot * s_n + c[None, :] * s_c
    t = first + tl.arange(0, T)
    inside = (t < count)[:, None] & in_c[None, :]
    total = tl.zeros([T, N], tl.float32)
    if BIAS:
        total += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    at = tl.where(t < count, t, -1)
    for back in tl.static_range(W):
        given = tl.load(inputs + at[:, None].to(tl.int64) * x_t, mask=inside & (at >= 0)[:, None], other=0.0)
        kept = tl.load(tail + (at + (W - 1))[:, None] * s_w, mask=inside & (at < 0)[:, None] & (slot >= 0), other=0.0)
        seen = tl.where((at >= 0)[:, None], given, kept.to(x.dtype.element_ty))
        factor = tl.load(weight + c * w_c + (W - 1 - back) * w_w, mask=in_c, other=0.0).to(tl.float32)
        total += seen.to(tl.float32) * factor[None, :]
        if EVERY and back < W - 1:
            left = drafted + slot * d_n + t[:, None].to(tl.int64) * d_t + c[None, :] * d_c + (W - 2 - back) * d_w
            tl.store(left, cast(seen, drafted.dtype.element_ty), mask=inside & (slot >= 0))
        at = _earlier(parents, at, b.to(tl.int64) * p_b, p_t, TREE)
    places = out + row * o_b + (begin + t)[:, None] * o_t + c[None, :]
    tl.store(places, cast(total * sigmoid(total), out.dtype.element_ty), mask=inside)
    if not EVERY:  # noqa: SIM102 the compiler asks this one
        if (first == 0) & (count > 0) & (slot >= 0):
            V: tl.constexpr = triton.next_power_of_2(W)
            w = tl.arange(0, V)
            end = (count - (W - 1) + w)[:, None]
            real = (w < W - 1)[:, None] & in_c[None, :]
            fresh = tl.load(inputs + end.to(tl.int64) * x_t, mask=real & (end >= 0), other=0.0)
            old = tl.load(tail + (end + (W - 1)) * s_w, mask=real & (end < 0), other=0.0)
            # What other threads of this program read of the old tail must have been read.
            tl.debug_barrier()
            tl.store(tail + w[:, None] * s_w, tl.where(end >= 0, cast(fresh, old.dtype), old), mask=real)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, slots: Tensor, *, cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None, drafted: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `polyattn.contract.TailedConv`."""
    (B, S, C), W = x.shape, weight.shape[1]
    x = x if x.stride(2) == 1 or C == 1 else x.contiguous()
    slots, bias = slots.contiguous(), None if bias is None else bias.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    out = x.new_empty(B, S, C)
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # The tail of a sequence is for the tokens of one program.
    T = triton.next_power_of_2(max(S, 1) if S <= TOKENS else max(TOKENS, W - 1))
    # The interpreter takes as long for a large tile as for a small one.
    N = triton.next_power_of_2(C) if runtime.INTERPRETED else min(CHANNELS, triton.next_power_of_2(C))
    chunks, batch, _ = numbers(B, S, cu_seqlens, T)
    left = (0, 0, 0, 0) if drafted is None else drafted.stride()
    if not out.numel():
        return out
    with runtime.device_of(x):
        _conv[chunks, triton.cdiv(C, N), batch](
            x, weight, x if bias is None else bias, tails, slots,
            *(slots if t is None else t for t in (cu_seqlens, parents)), out, out if drafted is None else drafted,
            *x.stride()[:2], *weight.stride(), *tails.stride(), *out.stride()[:2], *left,
            *((0, 0) if parents is None else parents.stride()), S, sequences, sequences.bit_length(), C=C, W=W, T=T,
            N=N, BIAS=bias is not None, PACKED=cu_seqlens is not None, EVERY=drafted is not None,
            TREE=parents is not None, num_warps=4,
        )  # fmt: skip
    return out
