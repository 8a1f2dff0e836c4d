"""The linear branch beside exact attention: phi(Q) (sum phi(K)^T V) / (phi(Q) sum phi(K) + epsilon).

Keys and values are read once for the sums, which are 2 S D D_v operations and D x D_v numbers a head; queries are read
once for the result, which is added to what exact attention found. Both are bytes over bandwidth. Parts of the sums are
added in one order, so that results are the same bits on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.block_sparse import head_at
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rows import product

__all__ = ["linear_add", "linear_sums", "pooled"]

_PART = 1024
"""Tokens that one program sums up."""
_TILES = 8
"""Tiles of queries of one program, for which the sums are loaded once."""


@triton.jit
def _mapped(x, here, FEATURE: tl.constexpr):
    """phi of rows [N, D] in float32; 0 where nothing is."""
    if FEATURE == "softmax":
        x = tl.where(here, x, float("-inf"))
        # A row past the end has no numbers at all.
        top = tl.max(x, 1)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = tl.sum(weights, 1)
        x = weights / tl.where(total > 0, total, 1.0)[:, None]
    elif FEATURE == "elu":
        x = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    else:
        x = tl.maximum(x, 0.0)
    return tl.where(here, x, 0.0)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _pooled(source, means, x_b, x_h, x_s, tokens, blocks, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The mean of one block of one head."""
    n, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, d = n * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    there = (s < tokens)[:, None] & (d < D)[None, :]
    at = head_at(source, b, head, x_b, x_h) + s[:, None].to(tl.int64) * x_s + d[None, :]
    total = tl.sum(tl.load(at, mask=there, other=0.0).to(tl.float32), 0)
    row = (b.to(tl.int64) * tl.num_programs(1) + head) * blocks + n
    tl.store(means + row * D + d, total / tl.minimum(tokens - n * BLOCK, BLOCK), mask=d < D)


@triton.jit(do_not_specialize=["tokens", "parts"])
def _linear_sums(
    key, value, states, totals, k_b, k_h, k_s, v_b, v_h, v_s, tokens, parts, D: tl.constexpr, D_V: tl.constexpr,
    K: tl.constexpr, K_V: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, FEATURE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Sums of one part of the tokens of one head: phi(K)^T V, and phi(K)."""
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, e = tl.arange(0, K), tl.arange(0, K_V)
    keys, values = head_at(key, b, head, k_b, k_h), head_at(value, b, head, v_b, v_h)
    state = tl.zeros([K, K_V], tl.float32)
    total = tl.zeros([K], tl.float32)
    for first in range(0, PART, N):
        s = part * PART + first + tl.arange(0, N)
        here, far = s < tokens, s[:, None].to(tl.int64)
        k_there, v_there = here[:, None] & (d < D)[None, :], here[:, None] & (e < D_V)[None, :]
        k = tl.load(keys + far * k_s + d[None, :], mask=k_there, other=0.0).to(tl.float32)
        v = tl.load(values + far * v_s + e[None, :], mask=v_there, other=0.0).to(tl.float32)
        k = _mapped(k, k_there, FEATURE)
        state = product(tl.trans(k), v, state, EXACT)
        total += tl.sum(k, 0)
    row = (b.to(tl.int64) * tl.num_programs(1) + head) * parts + part
    kept = (d < D)[:, None] & (e < D_V)[None, :]
    tl.store(states + (row * D + d[:, None]) * D_V + e[None, :], state, mask=kept)
    tl.store(totals + row * D + d, total, mask=d < D)


@triton.jit(do_not_specialize=["tokens", "epsilon"])
def _linear_add(
    query, state, total, bias, base, out, q_b, q_h, q_s, a_b, a_h, a_s, o_b, o_h, o_s, tokens, epsilon,
    D: tl.constexpr, D_V: tl.constexpr, K: tl.constexpr, K_V: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr, BIAS: tl.constexpr, FEATURE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """TILES times N tokens of one head: base + phi(Q) state / (phi(Q) total + epsilon) + bias."""
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, e = tl.arange(0, K), tl.arange(0, K_V)
    queries, bases = head_at(query, b, head, q_b, q_h), head_at(base, b, head, a_b, a_h)
    outs = head_at(out, b, head, o_b, o_h)
    row = b.to(tl.int64) * (tl.num_programs(1) // GROUP) + head // GROUP
    whole = (d < D)[:, None] & (e < D_V)[None, :]
    sums = tl.load(state + (row * D + d[:, None]) * D_V + e[None, :], mask=whole, other=0.0)
    all_keys = tl.load(total + row * D + d, mask=d < D, other=0.0)
    for tile in range(TILES):
        s = (part * TILES + tile) * N + tl.arange(0, N)
        far, there = s[:, None].to(tl.int64), (s < tokens)[:, None]
        q_there, o_there = there & (d < D)[None, :], there & (e < D_V)[None, :]
        q = tl.load(queries + far * q_s + d[None, :], mask=q_there, other=0.0).to(tl.float32)
        q = _mapped(q, q_there, FEATURE)
        share = tl.sum(q * all_keys[None, :], 1) + epsilon
        found = product(q, sums, tl.zeros([N, K_V], tl.float32), EXACT) / share[:, None]
        if BIAS:
            found += tl.load(bias + e, mask=e < D_V, other=0.0).to(tl.float32)[None, :]
        found += tl.load(bases + far * a_s + e[None, :], mask=o_there, other=0.0).to(tl.float32)
        tl.store(outs + far * o_s + e[None, :], cast(found, out.dtype.element_ty), mask=o_there)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _exact(tensor: Tensor) -> bool:
    """Whether products are those of float32: elsewhere halves of bfloat16 are far finer than what is rounded after."""
    return tensor.device.type != "cuda" or tensor.dtype == torch.float32


@runtime.on_its_device
def pooled(tensor: Tensor, block: int) -> Tensor | None:
    """See `polyattn.contract.BlockOps`."""
    if block & (block - 1):
        return None
    tensor = _dense(tensor)
    B, H, S, D = tensor.shape
    n = triton.cdiv(S, block)
    means = tensor.new_empty(B, H, n, D, dtype=torch.float32)
    if means.numel():
        _pooled[n, H, B](
            tensor, means, *tensor.stride()[:3], S, n, D=D, WIDTH=triton.next_power_of_2(D), BLOCK=block, num_warps=4
        )
    return means


@runtime.on_its_device
def linear_sums(key: Tensor, value: Tensor, feature_map: str) -> tuple[Tensor, Tensor]:
    """See `polyattn.contract.BlockOps`."""
    key, value = _dense(key), _dense(value)
    (B, H, S, D), D_V = key.shape, value.shape[3]
    parts = triton.cdiv(S, _PART)
    states = key.new_empty(B, H, parts, D, D_V, dtype=torch.float32)
    totals = key.new_empty(B, H, parts, D, dtype=torch.float32)
    if states.numel():
        _linear_sums[parts, H, B](
            key, value, states, totals, *key.stride()[:3], *value.stride()[:3], S, parts, D=D, D_V=D_V,
            K=triton.next_power_of_2(D), K_V=triton.next_power_of_2(D_V), N=64, PART=_PART, FEATURE=feature_map,
            EXACT=_exact(key), num_warps=8, num_stages=2,
        )  # fmt: skip
    return states.sum(2), totals.sum(2)


@runtime.on_its_device
def linear_add(
    query: Tensor, state: Tensor, total: Tensor, bias: Tensor | None, base: Tensor, feature_map: str, epsilon: float
) -> Tensor:
    """See `polyattn.contract.BlockOps`."""
    query, base = _dense(query), _dense(base)
    (B, H, S, D), D_V = query.shape, base.shape[3]
    out = torch.empty_like(base)
    if out.numel():
        _linear_add[triton.cdiv(S, 64 * _TILES), H, B](
            query, state.contiguous(), total.contiguous(), total if bias is None else bias.contiguous(), base, out,
            *query.stride()[:3], *base.stride()[:3], *out.stride()[:3], S, epsilon, D=D, D_V=D_V,
            K=triton.next_power_of_2(D), K_V=triton.next_power_of_2(D_V), GROUP=H // state.shape[1], N=64,
            TILES=_TILES, BIAS=bias is not None, FEATURE=feature_map, EXACT=_exact(query), num_warps=8,
        )  # fmt: skip
    return out
