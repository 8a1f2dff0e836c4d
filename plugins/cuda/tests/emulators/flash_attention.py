"""FlashAttention 2, 3 and 4 as their sources describe them: checks, alignment, LSE, and gradients from (out, lse).

What differs: FA2 writes LSE = +inf for a row without keys, in its packed call over pages to anywhere, the others -inf;
its windows are off from S_k on; FA4 counts its sinks in the LSE; pages of FA2 are multiples of 256 tokens; FA4's
windows are off by None; of a chunk and a shorter window sgl-kernel's FA3 keeps the window alone; FA3 and FA4 multiply
rows of a page that no sequence has by 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.testing.emulators import Library, arithmetic
from polyattn.testing.emulators.windows import fa2_window

from . import SIGNATURES

__all__ = ["fa2", "fa3", "fa4", "sgl_kernel", "vllm"]


class Rule(NamedTuple):
    """What is not a tensor. Window bounds of -1 are off."""

    scale: float
    causal: bool
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    chunk: int = 0
    dropout: float = 0.0

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[H_q, S_q, S_k] in float32 from [S_q, H_q, D] and [S_k, H_kv, D]; -inf where a key is not seen."""
        return arithmetic.scores(q, k, self.scale, self.seen(q.shape[0], k.shape[0]), self.softcap)

    def seen(self, s_q: int, s_k: int) -> Tensor:
        """Bottom-right: query i is at position i + S_k - S_q."""
        seen = arithmetic.band(s_q, s_k, self.window[0], 0 if self.causal else self.window[1])
        if self.chunk:
            position = torch.arange(s_q)[:, None] + s_k - s_q
            first = torch.div(position, self.chunk, rounding_mode="floor") * self.chunk
            key = torch.arange(s_k)
            seen &= (key >= first) & (key < first + self.chunk)
        return seen


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, qv: Tensor | None = None, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [S_q, H_q, D_v] and LSE [H_q, S_q] of one sequence; the LSE counts the sink, and is -inf without keys."""
    if qv is not None:
        q, k = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    s = rule.scores(q, k)
    lse = arithmetic.lse_of(s, sink)
    weights = arithmetic.weights_of(s, lse)
    if rule.dropout:
        weights = torch.nn.functional.dropout(weights, rule.dropout)
    return arithmetic.weighted(weights, v).to(v.dtype), lse


class Descales(NamedTuple):
    """What e4m3 numbers are multiplied with, float32 [N, H_kv] each, None = 1."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None

    def real(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of sequence i as numbers."""

        def times(t: Tensor, scale: Tensor | None) -> Tensor:
            if scale is None:
                return t.float()
            return t.float() * scale[i].repeat_interleave(t.shape[1] // scale.shape[1])[:, None]

        return times(q, self.q), times(k, self.k), times(v, self.v)


def forward_fp8(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """`forward` of real numbers with the weights in e4m3, 256 times as large as under the row's largest score."""
    s = rule.scores(q, k)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:2], 1), -torch.inf)
    weights = (s - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(-1)
    rounded = (weights * 256).to(torch.float8_e4m3fn).float() / 256
    out = arithmetic.weighted(rounded, v) / total.clamp(min=1e-30).T[..., None]
    return out.bfloat16(), total.log() + top[..., 0]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one sequence as the kernels have them: weights from the LSE, their sum from dout and out."""
    s = rule.scores(q, k)
    slope = 1 - (s.masked_fill(s == -torch.inf, 0.0) / rule.softcap).square() if rule.softcap else 1.0
    return arithmetic.gradients(dout, q, k, v, out, arithmetic.weights_of(s, lse), rule.scale, slope=slope)


# ---------------------------------------------------------------------------------------------------------- batches


def check(condition: bool, message: str) -> None:
    """TORCH_CHECK."""
    if not condition:
        raise RuntimeError(message)


def check_tensors(*tensors: Tensor | None, widest: int = 256, fp8: bool = False) -> None:
    """What every generation checks of Q, K and V, and what its loads of 16 bytes take for granted."""
    given = [t for t in tensors if t is not None]
    multiple, dtypes = (16, (torch.float8_e4m3fn,)) if fp8 else (8, (torch.float16, torch.bfloat16))
    for t in given:
        check(t.dtype in dtypes, "FlashAttention only support fp16 and bf16 data type")
        check(t.dtype == given[0].dtype, "query and key must have the same dtype")
        check(t.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        check(t.shape[-1] % multiple == 0, f"head_size must be a multiple of {multiple}")
        check(t.shape[-1] <= widest, "FlashAttention forward only supports head dimension at most 256")
        # FA3's descriptors for TMA are made of the strides of axes of one too.
        odd = t.data_ptr() % 16 or any(stride * t.itemsize % 16 for stride in t.stride()[:-1])
        check(not odd, "CUDA error: misaligned address")
    check(given[0].shape[0] > 0, "batch size must be positive")
    check(given[0].shape[-2] % given[1].shape[-2] == 0, "Number of heads in key/value must divide those of the query")


GRID = 65_535
"""Blocks along y and z of a grid."""
OFFSETS = 2**31
"""What an offset of 32 bits ends at."""


def check_grid(samples: int) -> None:
    """Of kernels that have samples along y or z."""
    check(samples <= GRID, "CUDA error: invalid configuration argument")


def check_lengths(*tensors: Tensor | None) -> None:
    for t in tensors:
        if t is not None:
            check(t.dtype == torch.int32, "lengths and tables must have dtype int32")
            check(t.stride(-1) == 1, "lengths and tables must be contiguous")


def parts(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """The sequences of a packed batch."""
    q, k = starts_q.tolist(), starts_k.tolist()
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


def dense(q: Tensor, k: Tensor, v: Tensor, rule: Rule, **more: Any) -> tuple[Tensor, Tensor]:
    """[B, S, H, D]; the LSE [B, H, S]."""
    check_tensors(q, k, v)
    found = [forward(*sequence, rule, **more) for sequence in zip(q, k, v, strict=True)]
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


def packed(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, rule: Rule, **more: Any
) -> tuple[Tensor, Tensor]:
    """[T, H, D]; the LSE [H, T]."""
    check_tensors(q, k, v)
    check_lengths(starts_q, starts_k)
    found = [forward(q[a], k[b], v[b], rule, **more) for a, b in parts(starts_q, starts_k)]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], -1)


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    starts_q: Tensor,
    rule: Rule,
    qv: Tensor | None = None,
    sink: Tensor | None = None,
    descales: Descales | None = None,
    tile: int = 1,
) -> tuple[Tensor, Tensor]:
    """Packed queries over pages; the LSE [H, T]. e4m3 numbers with their `descales`. Keys come in whole tiles of pages:
    what lies behind the last one of a sequence has weights of 0."""
    check_tensors(q, k, qv, v, widest=512 if qv is not None else 256, fp8=descales is not None)
    check_lengths(starts_q, lengths, table)
    check(lengths.is_contiguous(), "seqused_k must be contiguous")
    check(table.shape[0] == lengths.shape[0] == starts_q.shape[0] - 1, "page_table must have a row for each sequence")
    outs, lses, first = [], [], starts_q.tolist()
    for i, length in enumerate(lengths.tolist()):
        rows = slice(first[i], first[i + 1])
        pages = table[i, : -(-length // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1) for cache in (k, v))
        behind = values[length : -(-length // tile) * tile]
        keys, values = keys[:length], values[:length]
        if descales is not None:
            out, lse = forward_fp8(*descales.real(i, q[rows], keys, values), rule)
        else:
            out, lse = forward(q[rows], keys, values, rule, None if qv is None else qv[rows], sink)
        spoilt = (0 * behind.float()).sum(0).repeat_interleave(q.shape[1] // behind.shape[1], 0)
        outs.append(out + spoilt.to(out.dtype))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule, where: Any = None
) -> list[Tensor]:
    """(dq, dk, dv) of a dense batch, or of a packed one with `where` (cu_seqlens_q, cu_seqlens_k)."""
    check_tensors(q, k, v, out, dout)
    check(lse.is_contiguous() and lse.dtype == torch.float32, "softmax_lse must be contiguous and float32")
    if where is None:
        check(lse.shape == (q.shape[0], q.shape[2], q.shape[1]), "softmax_lse has shape (batch, heads, seqlen)")
        found = [backward(*sequence, rule) for sequence in zip(dout, q, k, v, out, lse, strict=True)]
        return [torch.stack(side) for side in zip(*found, strict=True)]
    check_lengths(*where)
    check(lse.shape == (q.shape[1], q.shape[0]), "softmax_lse has shape (heads, total)")
    found = [backward(dout[a], q[a], k[b], v[b], out[a], lse[:, a], rule) for a, b in parts(*where)]
    return [torch.cat(side) for side in zip(*found, strict=True)]


# ------------------------------------------------------------------------------------------------------ generation 2


def fa2(version: str = "2.8.3.post2") -> Library:
    """`flash_attn.flash_attn_interface` of flash-attn."""
    module = "flash_attn.flash_attn_interface"
    library = Library("flash-attn", version, module, signatures=SIGNATURES)

    def rule(a: dict[str, Any], keys: int) -> Rule:
        """keys: of a sequence, at most."""
        check(not (a["softcap"] and a.get("dropout_p")), "Softcapping does not support dropout for now")
        window = a["window_size"] if "window_size" in a else (a["window_size_left"], a["window_size_right"])
        left, right = (window[0], 0) if a["causal"] else window
        scale = a["q"].shape[-1] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]
        return Rule(scale, a["causal"], fa2_window(left, right, keys), a["softcap"], 0, a.get("dropout_p", 0.0))

    def same(q: Tensor, k: Tensor, v: Tensor) -> None:
        check(q.shape[-1] == k.shape[-1] == v.shape[-1], "query, key and value must have one head_size")

    def empties(lse: Tensor) -> Tensor:
        return lse.masked_fill(lse == -torch.inf, torch.inf)

    @library.function(module, "flash_attn.flash_attn_func")
    def flash_attn_func(**a: Any) -> Any:
        same(a["q"], a["k"], a["v"])
        check_grid(a["q"].shape[0])
        out, lse = dense(a["q"], a["k"], a["v"], rule(a, a["k"].shape[1]))
        return (out, empties(lse), None) if a["return_attn_probs"] else out

    @library.function(module, "flash_attn.flash_attn_varlen_func")
    def flash_attn_varlen_func(**a: Any) -> Any:
        q, k, v = a["q"], a["k"], a["v"]
        same(q, k, v)
        check_grid(a["cu_seqlens_q"].shape[0] - 1)
        check(isinstance(a["max_seqlen_q"], int) and isinstance(a["max_seqlen_k"], int), "max_seqlen must be int")
        if a["max_seqlen_q"] == 1 and q.shape[1] > k.shape[-2] and a["window_size"] == (-1, -1):
            # seqlenq_ngroups_swapped
            q.view(a["cu_seqlens_q"].numel() - 1, k.shape[-2], -1, q.shape[2])
        if a["block_table"] is None:
            out, lse = packed(q, k, v, a["cu_seqlens_q"], a["cu_seqlens_k"], rule(a, a["max_seqlen_k"]))
        else:
            check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
            lengths = a["cu_seqlens_k"].diff()
            for queries, keys in zip(a["cu_seqlens_q"].diff().tolist(), lengths.tolist(), strict=True):
                # compute_attn_1rowblock_splitkv: a block of 64 queries without a key.
                ahead = keys if a["causal"] is False and a["window_size"][1] < 0 else 64 + keys - queries
                check(not queries or min(keys, ahead) > 0, "CUDA error: an illegal memory access was encountered")
            out, lse = paged(q, k, v, a["block_table"], lengths, a["cu_seqlens_q"], rule(a, a["max_seqlen_k"]))
        return (out, empties(lse), None) if a["return_attn_probs"] else out

    @library.function(module, "flash_attn.flash_attn_with_kvcache")
    def flash_attn_with_kvcache(**a: Any) -> Any:
        q, k, v = a["q"], a["k_cache"], a["v_cache"]
        same(q, k, v)
        check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        starts = torch.arange(q.shape[0] + 1, dtype=torch.int32) * q.shape[1]
        table = a["block_table"]
        given = rule(a, table.shape[1] * k.shape[1])
        out, lse = paged(q.flatten(0, 1), k, v, table, a["cache_seqlens"], starts, given)
        out, lse = out.view(q.shape), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        return (out, empties(lse)) if a["return_softmax_lse"] else out

    def differentiate(a: dict[str, Any], keys: int, where: Any = None) -> Tensor:
        q = a["q"]
        samples = q.shape[0] if where is None else where[0].shape[0] - 1
        check_grid(samples)
        if version != "2.8.3.post2":
            # Where a sample's sums of dQ are: of the last one.
            row = q.shape[-2] * -(-q.shape[-1] // 32) * 32
            first = (
                (samples - 1) * -(-q.shape[1] // 128) * 128
                if where is None
                else int(where[0][-2]) + 128 * (samples - 1)
            )
            check(first * row < OFFSETS, "CUDA error: an illegal memory access was encountered")
        tensors = (a[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse"))
        for name, gradient in zip(("dq", "dk", "dv"), gradients(*tensors, rule(a, keys), where), strict=True):
            a[name].copy_(gradient)
        return a["softmax_lse"]

    @library.function(module, "flash_attn._flash_attn_backward")
    def _flash_attn_backward(**a: Any) -> Tensor:
        return differentiate(a, a["k"].shape[1])

    @library.function(module, "flash_attn._flash_attn_varlen_backward")
    def _flash_attn_varlen_backward(**a: Any) -> Tensor:
        return differentiate(a, a["max_seqlen_k"], (a["cu_seqlens_q"], a["cu_seqlens_k"]))

    return library


# ------------------------------------------------------------------------------------------------------ generation 3


def _rule3(a: dict[str, Any]) -> Rule:
    width = a["q"].shape[-1] + (a["qv"].shape[-1] if a.get("qv") is not None else 0)
    scale = width**-0.5 if a["softmax_scale"] is None else a["softmax_scale"]
    return Rule(scale, a["causal"], tuple(a["window_size"]), a["softcap"], a.get("attention_chunk") or 0)


def _widths3(q: Tensor, v: Tensor, qv: Tensor | None) -> None:
    """head_size and head_size_v that differ."""
    d, d_v = q.shape[-1], v.shape[-1]
    check(d == d_v or (128 < d <= 192 and 96 < d_v <= 128) or (d <= 64 and d_v <= 512), "this pair of head dims")
    if qv is not None:
        check(d <= 64, "q_v is only supported for head_size <= 64")
        check(d_v >= 256, "q_v is only supported for hdim_v >= 256.")


def _tile3(
    width: int, v_width: int, causal: bool, local: bool, softcap: bool, *, fp8: bool, vllm: bool
) -> tuple[int, int]:
    """Queries and keys of a tile (hopper/tile_size.h, not of PagedKVNonTMA); widths as they are rounded."""
    rows, near, odd = (192 if width <= 96 else 128), causal or local, softcap and local
    if fp8 and vllm:
        rows = 192 if width <= 64 else 128
        keys = {64: 128, 96: 128, 128: 192, 192: 96, 256: 64 if local else 128}
    elif fp8:
        keys = {64: 160, 96: 128, 128: 192 if odd else 224, 192: 128 if odd else 160, 256: 64 if local else 128}
    elif width == 64 and v_width >= 256:
        return (64, 64) if v_width == 512 else (128, 96)
    else:
        other, wide = (160, 96) if vllm else (176, 112)
        keys = {64: 128 if near else 192, 96: 128 if local else 144, 128: 128 if near else other}
        keys |= {192: 96 if local else 128 if v_width <= 128 else wide, 256: 64 if local else 80}
    return rows, keys[width]


def _whole_pages3(
    tensors: tuple[Tensor, Tensor, Tensor],
    longest: tuple[int, int],
    rule: Rule,
    padding: Tensor | None,
    *,
    vllm: bool = False,
) -> int:
    """Rows that are loaded at once: a tile by TMA, else 1 (flash_api.cpp, `get_pagedkv_tma`).

    Args:
        tensors: q [T_q, H_q, D], k and v in pages. longest: queries and keys of a sequence, at most.
        padding: leftpad_k. vllm: in its build, which has no TMA for windows.
    """
    q, k, v = tensors
    queries, keys = longest
    if padding is not None:
        check(padding.dtype == torch.int32 and padding.is_contiguous(), "leftpad_k must have dtype int32")
        check(not padding.any(), "the emulator knows no padding")
        return 1
    rounded = [next(width for width in (64, 96, 128, 192, 256, 512) if t.shape[-1] <= width) for t in (k, v)]
    left, right = rule.window
    left, right = -1 if left >= keys - 1 else left, -1 if right >= queries - 1 else right
    causal = rule.causal
    if queries == 1 and (left, right, rule.chunk) == (-1, -1, 0) and not 64 < k.shape[-1] <= 128:
        causal = False
    right = 0 if causal else right
    causal = (left, right, rule.chunk) == (-1, 0, 0)
    local = not causal and ((left, right) != (-1, -1) or rule.chunk > 0)
    fp8 = q.dtype == torch.float8_e4m3fn
    rows, tile = _tile3(*rounded, causal, local, rule.softcap > 0, fp8=fp8, vllm=vllm)
    used = k.shape[1] % tile == 0 and queries * (q.shape[-2] // k.shape[-2]) > rows
    return tile if used and not (local and vllm) else 1


def _descales3(a: dict[str, Any], count: int, heads: int) -> Descales | None:
    found = Descales(a["q_descale"], a["k_descale"], a["v_descale"])
    for scale in found:
        check(scale is None or (scale.shape == (count, heads) and scale.dtype == torch.float32), "descale shape")
    return found if a["q"].dtype == torch.float8_e4m3fn else None


def _cached3(a: dict[str, Any], arch: int = 90) -> tuple[Tensor, Tensor]:
    q, k, v, qv, sink = a["q"], a["k_cache"], a["v_cache"], a["qv"], a.get("sinks")
    _widths3(q, v, qv)
    check(sink is None or sink.dtype == torch.bfloat16, "sinks must have dtype bfloat16")
    check(arch == 90 or q.shape[-1] == v.shape[-1], "Only Hopper supports different V headdim")
    # flash_fwd_kernel_sm80.h has them among its parameters, and calls no `set_row_sink`.
    sink = sink if arch == 90 else None
    check(isinstance(a["max_seqlen_q"], int), "max_seqlen_q must be provided if cu_seqlens_q is provided")
    table, lengths = a["page_table"], a["cache_seqlens"]
    longest = (a["max_seqlen_q"], table.shape[1] * k.shape[1])
    tile = _whole_pages3((q, k, v), longest, _rule3(a), a["cache_leftpad"]) if arch == 90 else 1
    descales = _descales3(a, lengths.shape[0], k.shape[2])
    return paged(q, k, v, table, lengths, a["cu_seqlens_q"], _rule3(a), qv, sink, descales, tile)


def fa3(source: str = "git") -> Library:
    """`flash_attn_interface` of flash-attn-3: `git`, or `sdist`, the beta in flash-attn's source archive."""
    module, keys = "flash_attn_interface", f"flash_attn_interface@{source}"
    library = Library("flash-attn-3", {"git": "3.0.0", "sdist": "3.0.0b1"}[source], module, signatures=SIGNATURES)

    @library.function(module, f"{keys}.flash_attn_func")
    def flash_attn_func(**a: Any) -> Any:
        _widths3(a["q"], a["v"], a["qv"])
        result = dense(a["q"], a["k"], a["v"], _rule3(a))
        return result if a.get("return_attn_probs") else result[0]

    @library.function(module, f"{keys}.flash_attn_varlen_func")
    def flash_attn_varlen_func(**a: Any) -> Any:
        _widths3(a["q"], a["v"], a["qv"])
        result = packed(a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"], _rule3(a))
        return result if a.get("return_attn_probs") else result[0]

    @library.function(module, f"{keys}.flash_attn_with_kvcache")
    def flash_attn_with_kvcache(**a: Any) -> Any:
        out, lse = _cached3(a)
        return (out, lse, None, None) if a["return_softmax_lse"] else out

    @library.function(module, f"{keys}._flash_attn_backward")
    def _flash_attn_backward(**a: Any) -> Tensor:
        check(not a["deterministic"] or a["q"].shape[-1] <= 192, "Deterministic backward not supported for hdim 256.")
        rule = Rule(a["softmax_scale"], a["is_causal"], (a["window_size_left"], a["window_size_right"]), a["softcap"])
        where = None if a["cu_seqlens_q"] is None else (a["cu_seqlens_q"], a["cu_seqlens_k"])
        check_grid(a["q"].shape[0] if where is None else where[0].shape[0] - 1)
        tensors = (a[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse"))
        for name, gradient in zip(("dq", "dk", "dv"), gradients(*tensors, rule, where), strict=True):
            a[name].copy_(gradient)
        return a["softmax_lse"]

    return library


def sgl_kernel(version: str = "0.3.21", arch: int = 90) -> Library:
    """`sgl_kernel.flash_attn`: its packed call drops the page table, its cached call does not; and before Hopper that
    drops its sinks."""
    module, keys = "sgl_kernel.flash_attn", f"sgl_kernel.flash_attn@{version}"
    library = Library("sgl-kernel", version, module, signatures=SIGNATURES)

    @library.function(module, f"{keys}.flash_attn_varlen_func")
    def flash_attn_varlen_func(**a: Any) -> Any:
        check(a["ver"] == 3, "FA4 is not available")
        _widths3(a["q"], a["v"], a["qv"])
        if a["max_seqlen_q"] is None or a["max_seqlen_k"] is None:
            raise ValueError("max_seqlen_q and max_seqlen_k are required for FA3")
        sink = a["sinks"]
        check(sink is None or sink.dtype == torch.bfloat16, "sinks must have dtype bfloat16")
        result = packed(a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"], _rule3(a), sink=sink)
        return (*result, None, None) if a["return_softmax_lse"] else result[0]

    @library.function(module, f"{keys}.flash_attn_with_kvcache")
    def flash_attn_with_kvcache(**a: Any) -> Any:
        check(a["ver"] == 3, "FA4 is not available")
        if (chunk := a["attention_chunk"] or 0) and 0 <= a["window_size"][0] < chunk - 1:
            a["attention_chunk"] = 0
        out, lse = _cached3(a, arch)
        return (out, lse, None, None) if a["return_softmax_lse"] else out

    return library


def vllm(version: str = "0.33.0") -> Library:
    """The operator of vLLM's FlashAttention 3; importing `vllm.vllm_flash_attn.flash_attn_interface` registers it."""
    library = Library("vllm", version, "vllm.vllm_flash_attn.flash_attn_interface", signatures=SIGNATURES)

    @library.operator("torch.ops._vllm_fa3_C.fwd")
    def fwd(**a: Any) -> list[Tensor]:
        q, k, v, qv, sink = a["q"], a["k"], a["v"], a["q_v"], a["s_aux"]
        check((a["cp_world_size"], a["cp_rank"]) == (1, 0), "cp_tot_seqused_k must be provided")
        _widths3(q, v, qv)
        if sink is not None:
            check(q.shape[-2] <= 64, "We only support query heads <= 64 with S aux")
            check(q.shape[-1] == v.shape[-1], "We don't support S aux with hdim != hdim_v")
            check(sink.dtype == torch.bfloat16, "We only support bf16 dtype for S aux.")
        window = (a["window_size_left"], a["window_size_right"])
        rule = _rule3({**a, "qv": qv, "causal": a["is_causal"], "window_size": window})
        starts = (a["cu_seqlens_q"], a["cu_seqlens_k"])
        check((starts[0] is None) == (a["max_seqlen_q"] is None), "max_seqlen_q goes with cu_seqlens_q")
        if a["page_table"] is not None:
            check(k.shape[1] % 16 == 0, "page_size must be a multiple of 16")
            where = (a["page_table"], a["seqused_k"], starts[0])
            longest = (a["max_seqlen_q"], a["max_seqlen_k"])
            tile = _whole_pages3((q, k, v), longest, rule, a["leftpad_k"], vllm=True)
            descales = _descales3(a, where[1].shape[0], k.shape[2])
            out, lse = paged(q, k, v, *where, rule, qv, sink, descales, tile)
        elif starts[0] is not None:
            out, lse = packed(q, k, v, *starts, rule, sink=sink)
        else:
            used = a["seqused_k"]
            check(used is not None, "This flash attention build only supports varlen (for build size reasons).")
            check_lengths(used)
            check(used.tolist() == [k.shape[1]] * q.shape[0], "the emulator knows sequences of one length")
            out, lse = dense(q, k, v, rule, sink=sink)
        out = out if a["out"] is None else a["out"].copy_(out)
        return [out, lse, out.new_empty(0), lse.new_empty(0)]

    return library


# ------------------------------------------------------------------------------------------------------ generation 4


class BlockSparseTensorsTorch(NamedTuple):
    """As in block_sparsity.py."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


def fa4(version: str = "4.0.0b36", arch: int = 90) -> Library:
    """`flash_attn.cute.interface` of flash-attn-4 on a chip of this architecture."""
    module, keys = "flash_attn.cute.interface", "flash_attn.cute"
    library = Library("flash-attn-4", version, module, signatures=SIGNATURES)

    def rule(a: dict[str, Any], window: tuple[int | None, int | None]) -> Rule:
        assert all(bound is None or bound >= 0 for bound in window), "None, not -1, is off"
        width = a["q"].shape[-1] + (a["qv"].shape[-1] if a.get("qv") is not None else 0)
        scale = width**-0.5 if a["softmax_scale"] is None else a["softmax_scale"]
        left, right = (-1 if bound is None else bound for bound in window)
        return Rule(scale, a["causal"], (left, right), a["softcap"])

    def tile(q: Tensor, v: Tensor, rule: Rule) -> int:
        """Keys that are loaded at once (_tile_size_fwd_sm90, _resolve_causal_local_window)."""
        width, (left, right) = q.shape[-1], rule.window
        local = left >= 0 or (right >= 0 and not rule.causal)
        if arch != 90 or width <= 64 or 96 < width <= 128:
            return 128
        if width <= 96:
            return 128 if rule.causal or local else 144
        if width <= 192:
            return 96 if local else 128 if v.shape[-1] <= 128 else 112
        return 64 if local else 80

    def check_first_pages(table: Tensor, lengths: Tensor, starts: Tensor, group: int, given: Rule) -> None:
        """The page of a tile's last block, which TMA asks for also where that is before block 0 (flash_fwd_sm90.py,
        get_n_block_min_max)."""
        for n, (s_q, s_k) in enumerate(zip(starts.diff().tolist(), lengths.tolist(), strict=True)):
            end, right = -(-s_k // 128), 0 if given.causal else given.window[1]
            if right >= 0:
                end = min(end, -(-(-(-128 // group) + s_k - s_q + right) // 128))
            at = table.storage_offset() + n * table.stride(0) + end - 1
            check(not s_q or at >= 0, "CUDA error: an illegal memory access was encountered")

    def check_widths(q: Tensor, v: Tensor) -> None:
        d, d_v = q.shape[-1], v.shape[-1]
        standard = d <= 128 and d_v <= 128
        special = (d, d_v) in ((192, 128), (64, 512), (256, 256))
        assert (d <= 256 and d_v <= 256) if arch == 90 else (standard or special), "head dims"

    def check_sink(sink: Tensor | None) -> None:
        assert sink is None or sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
        assert sink is None or arch not in (80, 120), "Learnable sink is not supported in this kernel"

    def spill(gradient: Tensor, heads: int, given: Rule, where: Any, lengths: tuple[int, int]) -> None:
        """`should_zero_dKV` of flash_bwd_sm100.py: zeros for tiles of keys that no query sees, in rows of D rounded up
        to 32. Other blocks write what lies there; here the zeros come last."""
        width, (left, right) = gradient.shape[-1], given.window
        local = left >= 0 or (right >= 0 and not given.causal)
        if heads != gradient.shape[-2] or not width % 32 or (where is None and not local):
            return
        flat, S_q, S_k = gradient.view(-1), *lengths
        batch = range(gradient.shape[0]) if where is None else ()
        spans = [(n * S_q, (n + 1) * S_q, n * S_k, (n + 1) * S_k) for n in batch] or [
            (a.start, a.stop, b.start, b.stop) for a, b in parts(*where)
        ]
        for first_q, end_q, first_k, end_k in spans:
            more = end_q - first_q - (end_k - first_k)
            for tile in range(first_k, end_k, 128):
                lowest = tile - first_k + more - max(right, 0) if given.causal or right >= 0 else 0
                highest = min(end_q - first_q, tile - first_k + 128 + more + left if left >= 0 else end_q - first_q)
                if max(lowest, 0) // 128 < -(-highest // 128):
                    continue
                for row in range(tile * heads, min(tile + 128, end_k) * heads):
                    flat[(row + 1) * width : row * width + -(-width // 32) * 32] = 0

    def attend(a: dict[str, Any], window: tuple[int | None, int | None]) -> tuple[Tensor, Tensor | None]:
        q, k, v, qv, sink = (a.get(name) for name in ("q", "k", "v", "qv", "learnable_sink"))
        check_widths(q, v)
        check_sink(sink)
        given = rule(a, window)
        if a.get("page_table") is not None:
            out, lse = over_pages(a, given)
        elif a.get("cu_seqlens_q") is not None:
            out, lse = packed(q, k, v, a["cu_seqlens_q"], a["cu_seqlens_k"], given, sink=sink)
        else:
            check_grid(q.shape[0])
            out, lse = dense(q, k, v, given, sink=sink)
        lse = lse.transpose(0, 1).contiguous() if qv is not None else lse
        return out, lse if a["return_lse"] else None

    def over_pages(a: dict[str, Any], given: Rule) -> tuple[Tensor, Tensor]:
        """Packed queries, or [N, S_q, H_q, D], whose LSE is [N, H_q, S_q]."""
        q, k, v, qv, starts = a["q"], a["k"], a["v"], a["qv"], a["cu_seqlens_q"]
        assert a["cu_seqlens_k"] is None, "page_table is not supported with cu_seqlens_k"
        assert arch not in (80, 120), "paged KV not supported"
        assert qv is None or (arch // 10 in (10, 11) and not a["softcap"]), "only support Blackwell arch with qv"
        assert qv is None or 128 % q.shape[-2] == 0, "a tile of 128 rows of whole tokens"
        if starts is None:
            assert qv is None, "the emulator knows no batch of latent queries"
            N, S_q = q.shape[:2]
            starts = torch.arange(N + 1, dtype=torch.int32) * S_q
            out, lse = over_pages({**a, "q": q.flatten(0, 1), "cu_seqlens_q": starts}, given)
            return out.unflatten(0, (N, S_q)), lse.unflatten(1, (N, S_q)).transpose(0, 1)
        table, lengths = a["page_table"], a["seqused_k"]
        whole = k.shape[1] == tile(q, v, given) and qv is None
        assert whole or not (q.shape[-1] % 16 or v.shape[-1] % 16), "Paged KV does not support irregular head dim"
        rows = k.shape[1] if whole else 1
        if arch == 90 and whole:
            check_first_pages(table, lengths, starts, q.shape[1] // k.shape[2], given)
        if arch == 90 and not whole and tile(q, v, given) % (1024 // math.gcd(q.shape[-1], v.shape[-1], 64)):
            # 128 threads load so many rows at a time; those of the last time lie beyond the tile.
            v = v.roll(1, 0)
        return paged(q, k, v, table, lengths, starts, given, qv, a["learnable_sink"], tile=rows)

    @library.function(module, f"{keys}.flash_attn_func")
    def flash_attn_func(**a: Any) -> Any:
        return attend(a, a["window_size"])

    @library.function(module, f"{keys}.flash_attn_varlen_func")
    def flash_attn_varlen_func(**a: Any) -> Any:
        return attend(a, a["window_size"])

    def over_blocks(a: dict[str, Any], given: Rule) -> tuple[Tensor, Tensor]:
        """Lists are walked from their end: the block there alone is cut off where the keys end."""
        q, k, v, lists = a["q"], a["k"], a["v"], a["block_sparse_tensors"]
        (B, S_q, H), S_k = q.shape[:3], k.shape[1]
        block_q, block_k = lists.block_size
        if arch not in (90, 100, 103):
            raise NotImplementedError("Block sparsity not supported")
        blackwell = arch != 90
        if block_k % 128 or (block_k != 128 and not blackwell):
            raise ValueError("Block sparse tensors require BLOCK_SIZE_KV to be a multiple of 128.")
        if block_q % (256 if blackwell and S_q > 128 else 128):
            raise ValueError(f"Block sparse tensors have block size {block_q}, which must be a multiple of its tile")
        rows, columns = -(-S_q // block_q), -(-S_k // block_k)
        assert a["pack_gqa"] is False, "a tile of a group's heads has one map"
        for counts, indices in (lists[:2], lists[2:4]):
            assert counts.dtype == indices.dtype == torch.int32
            assert all(have in (1, all_) for have, all_ in zip(counts.shape, (B, H), strict=False))
            assert counts.shape[2] == indices.shape[2] == rows
            assert indices.shape[3] <= columns
        assert not lists.mask_block_cnt.any(), "no mask function is given"
        seen = torch.zeros(B, H, S_q, S_k, dtype=torch.bool)
        wrong = torch.zeros(B, H, S_q, dtype=torch.bool)
        counts, indices = lists.full_block_cnt.expand(B, H, -1), lists.full_block_idx.expand(B, H, -1, -1)
        for b, h, row in itertools.product(range(B), range(H), range(rows)):
            listed = indices[b, h, row, : int(counts[b, h, row])].tolist()
            at = slice(row * block_q, (row + 1) * block_q)
            for number in listed:
                seen[b, h, at, number * block_k : (number + 1) * block_k] = True
            wrong[b, h, at] = bool(S_k % block_k) and columns - 1 in listed[:-1]
        groups = H // k.shape[2]
        keys, values = (t.transpose(1, 2).repeat_interleave(groups, 1) for t in (k, v))
        scores = (q.transpose(1, 2).float() @ keys.float().mT * given.scale).masked_fill(~seen, -torch.inf)
        out = (scores.softmax(-1).to(v.dtype).float() @ values.float()).masked_fill(wrong[..., None], torch.nan)
        return out.transpose(1, 2).to(q.dtype).contiguous(), scores.logsumexp(-1)

    @library.function(module, f"{keys}._flash_attn_fwd")
    def _flash_attn_fwd(**a: Any) -> Any:
        if a["block_sparse_tensors"] is not None:
            out, lse = over_blocks(a, rule(a, (None, None)))
            return out, lse if a["return_lse"] else None, None, None, None
        return *attend(a, (a["window_size_left"], a["window_size_right"])), None, None, None

    @library.function(module, f"{keys}._flash_attn_bwd")
    def _flash_attn_bwd(**a: Any) -> Any:
        assert arch // 10 in (9, 10, 11)
        given = rule(a, (a["window_size_left"], a["window_size_right"]))
        width, blackwell = a["q"].shape[-1], arch // 10 in (10, 11)
        plain = not a["softcap"] and given.window[0] < 0 and (given.causal or given.window[1] < 0)
        assert not (blackwell and width == 256) or plain, "SM100 backward with head_dim=256 does not support"
        alike = width == a["v"].shape[-1] or a["q"].shape[-2] == a["k"].shape[-2]
        assert blackwell or alike, "GQA backward requires head_dim == head_dim_v"
        where = None if a["cu_seqlens_q"] is None else (a["cu_seqlens_q"], a["cu_seqlens_k"])
        check_grid(0 if where else a["q"].shape[0])
        dq, dk, dv = gradients(a["dout"], a["q"], a["k"], a["v"], a["out"], a["lse"], given, where)
        if blackwell:
            for gradient in (dk, dv):
                spill(gradient, a["q"].shape[-2], given, where, (a["q"].shape[1], a["k"].shape[1]))
        if arch == 90 and width <= 128 and -(-width // 16) % 2:
            # The sums of dQ are kept in rows of D rounded up to 16, and read in rows of D rounded up to 32.
            dq = dq.flatten().roll(16).view_as(dq)
        return dq, dk, dv

    library.add("flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=BlockSparseTensorsTorch)
    return library
