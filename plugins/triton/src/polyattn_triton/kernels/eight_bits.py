"""Block-sparse attention whose scores are products of 8-bit integers: SageSLA's exact branch. Forward only.

Queries and keys, the mean of the keys taken away, become integers with one scale for each block of a head. Products of
integers are exact in int32, and their scales become part of the running softmax's multiply-add. Weights and values are
multiplied in the dtype of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.adapters import launch_slices
from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.block_sparse import Lists, Tiles, _entry, head_at, tiles_for
from polyattn_triton.kernels.rounding import cast, int8_codes
from polyattn_triton.kernels.rules import LOG2E, accumulate, dot, share

__all__ = ["attend", "quantised"]

_LEAST = tl.constexpr(1e-12)
"""The smallest scale: a block of zeros has none."""


@triton.jit(do_not_specialize=["tokens", "t_b", "t_h"])
def _quantise(
    tensor, mean, codes, scales, t_b, t_h, t_s, tokens, D: tl.constexpr, BLOCK: tl.constexpr, MEAN: tl.constexpr
):  # fmt: skip
    """One block of a head, [BLOCK, D]. mean: float32 [B, H, D]."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, d = b.to(tl.int64) * tl.num_programs(1) + h, tl.arange(0, D)
    m = block * BLOCK + tl.arange(0, BLOCK)
    far, inside = m[:, None].to(tl.int64), m[:, None] < tokens
    x = tl.load(head_at(tensor, b, h, t_b, t_h) + far * t_s + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if MEAN:
        x = tl.where(inside, x - tl.load(mean + row * D + d)[None, :], 0.0)
    scale = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0) / 127.0, _LEAST)
    tl.store(codes + (row * tokens + far) * D + d[None, :], int8_codes(x / scale), mask=inside)
    tl.store(scales + row * tl.num_programs(0) + block, scale)


@triton.jit(do_not_specialize=["c_b", "c_h", "i_b", "i_h", "i_q", "s_q", "s_k"])
def _attend(
    query, key, value, out, query_scale, key_scale, counts, indices, scale, v_b, v_h, v_s, o_b, o_h, o_s,
    c_b, c_h, i_b, i_h, i_q, s_q, s_k, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One tile of M queries. `scale`: of the products, times log2(e). EDGE: the last block may hold fewer keys."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block, kv_head, kv_heads = tile // (BLOCK_Q // M), head // GROUP, tl.num_programs(1) // GROUP
    m, d, n = tile * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    inside = m[:, None] < s_q
    row = b.to(tl.int64) * tl.num_programs(1) + head
    kv_row = b.to(tl.int64) * kv_heads + kv_head
    q = tl.load(query + (row * s_q + m[:, None]) * D + d[None, :], mask=inside, other=0)
    scale *= tl.load(query_scale + row * tl.cdiv(s_q, BLOCK_Q) + block)
    keys = key + kv_row * s_k * D
    values, key_scales = head_at(value, b, kv_head, v_b, v_h), key_scale + kv_row * tl.cdiv(s_k, BLOCK_K)
    end = tl.load(head_at(counts, b, head, c_b, c_h) + block) * (BLOCK_K // N)
    entries = head_at(indices, b, head, i_b, i_h) + block.to(tl.int64) * i_q
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    start, limit = _entry(entries, counts, 0, end, s_k, BLOCK_K, N, False, False)
    unit = tl.load(key_scales + start // BLOCK_K)
    for i in tl.range(0, end, num_stages=STAGES):
        # One step ahead, as in exact attention.
        next_start, next_limit = _entry(entries, counts, i + 1, end, s_k, BLOCK_K, N, False, False)
        next_unit = tl.load(key_scales + next_start // BLOCK_K)
        at = (start + n).to(tl.int64)
        some = n < limit
        k_at, v_at = keys + at[None, :] * D + d[:, None], values + at[:, None] * v_s + d[None, :]
        k = tl.load(k_at, mask=some[None, :], other=0) if EDGE else tl.load(k_at)
        products = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32)
        if EDGE:
            products = tl.where(some[None, :], products, float("-inf"))
        weights, factor, top, total = accumulate(top, total, products, scale * unit)
        v = tl.load(v_at, mask=some[:, None], other=0.0) if EDGE else tl.load(v_at)
        acc = dot(cast(weights, v.dtype), v, acc * factor[:, None])
        start, limit, unit = next_start, next_limit, next_unit
    o_at = head_at(out, b, head, o_b, o_h) + m[:, None].to(tl.int64) * o_s + d[None, :]
    tl.store(o_at, cast(acc * share(total)[:, None], out.dtype.element_ty), mask=inside)


@runtime.on_its_device
def quantised(tensor: Tensor, block: int, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round to 8 bits, with one scale for each block of tokens of a head.

    Args:
        tensor: [B, H, S, D], last axis dense. block: tokens of a block, a power of 2. mean: float32 [B, H, D],
            contiguous, taken away first.

    Returns:
        (int8 [B, H, S, D]; float32 [B, H, ceil(S / block)], what 1 stands for).
    """
    B, H, S, D = tensor.shape
    codes = torch.empty(tensor.shape, dtype=torch.int8, device=tensor.device)
    scales = torch.empty(B, H, triton.cdiv(S, block), dtype=torch.float32, device=tensor.device)
    for some in launch_slices(B, 1):
        own = tensor[some]
        _quantise[scales.shape[2], H, own.shape[0]](
            own, None if mean is None else mean[some], codes[some], scales[some], *own.stride()[:3], S,
            D=D, BLOCK=block, MEAN=mean is not None, num_warps=4,
        )  # fmt: skip
    return codes, scales


@runtime.on_its_device
def attend(
    query: Tensor, key: Tensor, value: Tensor, lists: Lists, *, scale: float, tiles: Tiles | None = None
) -> Tensor:
    """Attention of each query to the key blocks that its block lists.

    Args:
        query: [B, H_q, S_q, D]; key, value: [B, H_kv, S_k, D], of float16, bfloat16 or float32; D a power of 2, 32 or
            more. lists: counts and indices alone, of blocks that are powers of 2. scale: of the products, above 0.
            tiles: instead of those of exact attention.

    Returns:
        [B, H_q, S_q, D] of the values' dtype, contiguous. 0 where a list is empty.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    B, H, S_q, D = query.shape
    block_q, block_k, S_k = lists.block_q, lists.block_k, key.shape[2]
    # A constant in all keys shifts all scores of a query alike, so softmax does not see that it is gone.
    mean = key.mean(2, dtype=torch.float32)
    (q, q_scale), (k, k_scale) = quantised(query, block_q), quantised(key, block_k, mean)
    out = torch.empty(query.shape, dtype=value.dtype, device=query.device)
    t = tiles or tiles_for("forward", value, block_q, block_k)
    for some in launch_slices(B, 1):
        mine, own = lists.of(some), out[some]
        _attend[triton.cdiv(S_q, t.m), H, own.shape[0]](
            q[some], k[some], value[some], own, q_scale[some], k_scale[some], mine.counts, mine.indices,
            scale * LOG2E.value, *value.stride()[:3], *out.stride()[:3], *mine.strides(), S_q, S_k,
            GROUP=H // key.shape[1], D=D, BLOCK_Q=block_q, BLOCK_K=block_k, M=t.m, N=t.n, STAGES=t.stages,
            EDGE=S_k % block_k != 0, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out
