"""sgl-kernel for XPU as src/sycl/{flash_attention,mla_decode,mla_prefill}.cpp and python/sgl_kernel/{flash_attn,
attention}.py of https://github.com/sgl-project/sgl-kernel-xpu (9cf16bf9) have it.

Traps: the LSE is allocated and never written, empty in batches of mixed lengths; a softcap is ignored; sinks are read
as the queries' dtype whatever theirs is; a decode launch writes a row for a sequence without queries; rows that see
nothing are never written over pages; max_seqlen_k = 0 by default bounds windows; strides of packed tensors are not
looked at.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES, attend, check, poisoned

__all__ = ["library"]

FLASH = "sgl_kernel.flash_attn"
MLA = "sgl_kernel.attention"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDTHS = {True: (64, 96, 128, 192, 256, 512), False: (64, 72, 80, 96, 128, 192, 256, 512)}


def library(version: str = "0.11.0") -> Library:
    lib = Library("sgl-kernel-xpu", version, FLASH, MLA, signatures=SIGNATURES)

    @lib.function(FLASH, "sgl_kernel_xpu.flash_attn.flash_attn_varlen_func")
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        sinks: Tensor | None,
        causal: bool,
        window_size: tuple[int, int],
        return_softmax_lse: bool,
        **_: object,
    ) -> object:
        _check_packed(q, k, v)
        check(k.dtype == q.dtype == v.dtype, "query and key must have the same dtype")
        check(q.shape[-1] in WIDTHS[False], f"Unsupported head size for non-paged prefill attention: {q.shape[-1]}")
        check(sinks is None, "No-page attention does not support sink logits (softmax_sink_ptr must be null)")
        group = q.shape[1] // k.shape[1]
        check(max_seqlen_q > 1 or group <= 16, f"Unsupported q_group_size for decode attention: {group}")
        starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        check(len(starts) == len(ends), "cu_seqlens_q and cu_seqlens_k must describe the same batch")
        check(max_seqlen_q >= max(b - a for a, b in itertools.pairwise(starts)), "max_seqlen_q")
        out = torch.zeros(q.shape, dtype=q.dtype)
        window = _bounds(window_size, causal, max_seqlen_q, max_seqlen_k)
        for n in range(len(starts) - 1):
            rows, keys = slice(starts[n], starts[n + 1]), slice(ends[n], ends[n + 1])
            if keys.stop > keys.start:
                out[rows] = attend(_packed(q)[rows], _packed(k)[keys], _packed(v)[keys], softmax_scale, window=window)[
                    0
                ]
        lse = poisoned(q.shape[1], q.shape[0], dtype=torch.float32)
        return (out, lse, None, None) if return_softmax_lse else out

    @lib.function(FLASH, "sgl_kernel_xpu.flash_attn.flash_attn_with_kvcache")
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        softmax_scale: float,
        sinks: Tensor | None,
        causal: bool,
        window_size: tuple[int, int],
        return_softmax_lse: bool,
        out: Tensor | None,
        **more: object,
    ) -> object:
        if cache_seqlens is None:
            raise UnboundLocalError("cannot access local variable 'cu_seqlens_k'")
        check(
            all(more[n] is None for n in ("qv", "q_descale", "rotary_cos", "scheduler_metadata")), "not supported yet"
        )
        _check_packed(q)
        page, width, quantised = k_cache.shape[1], q.shape[-1], k_cache.dtype in FP8
        check(page in (64, 128), f"Unsupported page size for decode attention: {page}")
        check(width in WIDTHS[True], f"Unsupported head size for paged decode attention: {width}")
        check(quantised or k_cache.dtype == q.dtype, "query and key must have the same dtype")
        check(k_cache.dtype == v_cache.dtype, "fp8 KV cache requires key and value to have the same fp8 dtype")
        group = q.shape[1] // k_cache.shape[2]
        check(group <= 16, f"Unsupported q_group_size for decode attention: {group}")
        for t in (cu_seqlens_q, cache_seqlens, page_table):
            check(t.dtype == torch.int32 and t.is_contiguous(), "must have dtype torch.int32")
        check(page_table.shape[0] == cache_seqlens.shape[0], "batch_size must be equal to batch_size_k")
        if sinks is not None:
            check(width == 64, f"sink is only supported for head_size == 64, got {width}")
            check(not quantised, "fp8 KV cache decode does not support sink logits")
            sinks = sinks.contiguous().view(q.dtype)[: q.shape[1]]
        scales = []
        for scale in (k_descale, v_descale):
            check(not quantised or scale is not None, "fp8 KV cache requires k_descale and v_descale")
            check(scale is None or (scale.dtype == torch.float32 and scale.numel() == 1), "per-tensor descale")
            scales.append(1.0 if scale is None else float(scale))
        if out is not None:
            check(out.shape == q.shape and out.dtype == q.dtype and out.stride(-1) == 1, "out")
        result = poisoned(*q.shape, dtype=q.dtype) if out is None else out.fill_(torch.nan)
        decode_only, mixed = max_seqlen_q == 1, max_seqlen_q > 1 and cache_seqlens.shape[0] > 1
        starts, lengths, queries = cu_seqlens_q.tolist(), cache_seqlens.tolist(), _packed(q)
        window = _bounds(window_size, causal, max_seqlen_q, max_seqlen_k if decode_only else page_table.shape[1] * page)

        def gathered(cache: Tensor, scale: float, n: int) -> Tensor:
            pages = page_table[n, : -(-lengths[n] // page)].long()
            return (cache[pages].flatten(0, 1).float() * scale).to(q.dtype)

        def launch(n: int, rows: slice, *, decode: bool) -> None:
            right = window[1] if not decode else -1
            # Prefill reads pages as one contiguous block.
            caches = (t if decode else _packed(t) for t in (k_cache, v_cache))
            k, v = (gathered(t, scale, n) for t, scale in zip(caches, scales, strict=True))
            size = lengths[n]
            found = attend(queries[rows], k[:size], v[:size], softmax_scale, window=(window[0], right), sink=sinks)[0]
            # The values of a whole last page are multiplied, by weights of 0 behind the end.
            spoilt = v[size:].isnan().any(0).repeat_interleave(group, 0)
            result[rows] = found.masked_fill(spoilt, torch.nan)

        every = [(n, starts[n + 1] - starts[n]) for n in range(len(lengths)) if lengths[n]]
        if decode_only or mixed:
            for n, count in sorted(every, key=lambda pair: -pair[1]):
                # One query for each: a sequence without any takes the row where it would be.
                if count < 2:
                    check(starts[n] < q.shape[0], "UR_RESULT_ERROR_DEVICE_LOST: a row behind the last one")
                    launch(n, slice(starts[n], starts[n] + 1), decode=True)
        if not decode_only:
            for n, count in every:
                if count > 1 or (count and not mixed):
                    launch(n, slice(starts[n], starts[n + 1]), decode=False)
        empty = torch.empty(0) if mixed else poisoned(q.shape[1], q.shape[0], dtype=torch.float32)
        return (result, empty, None, None) if return_softmax_lse else result

    _add_latent(lib)
    return lib


def _packed(t: Tensor) -> Tensor:
    """What lies at its address if it were contiguous, which is what kernels read."""
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride())


def _bounds(window: tuple[int, int], causal: bool, max_seqlen_q: int, max_seqlen_k: int) -> tuple[int, int]:
    left, right = window
    left = -1 if left >= max_seqlen_k - 1 else left
    right = min(right, max_seqlen_q)
    return left, 0 if causal else right


def _check_packed(*tensors: Tensor) -> None:
    for t in tensors:
        check(t.dtype in (torch.float16, torch.bfloat16), f"mha_fwd only supports Half and BFloat16, got{t.dtype}")
        check(t.dim() == 3 and t.stride(-1) == 1, "query must be in ragged format (total_q, h, d)")


def _add_latent(lib: Library) -> None:
    def splits(batch: int, pages: int, page: int, asked: int) -> int:
        return asked if asked > 0 else max(min(pages * page // 64, 4 // batch), 1)

    def check_latent(nope: Tensor, rope: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, room: Tensor) -> None:
        assert nope.ndim == rope.ndim == cache.ndim == 3
        assert nope.shape[2] == 512
        assert rope.shape[2] == 64
        assert cache.shape[2] == 576
        assert nope.dtype in (torch.float16, torch.bfloat16)
        assert nope.dtype == rope.dtype == cache.dtype
        assert lengths.dtype == table.dtype == torch.int32
        page = cache.shape[1]
        check(page in (16, 32, 64, 128), f"Unsupported page size for MLA: {page}. Supported: 16, 32, 64, 128")
        for t in (nope, rope, cache, table, lengths, room):
            check(t.is_contiguous(), "must be contiguous")

    def one(q: Tensor, cache: Tensor, table: Tensor, length: int, scale: float, *, causal: bool) -> Tensor:
        page = cache.shape[1]
        rows = cache[table[: -(-length // page)].long()].flatten(0, 1)
        found = attend(q, rows[:length, None], rows[:length, None, :512], scale, causal=causal)[0]
        return found.masked_fill(rows[length:, :512].isnan().any(0), torch.nan)

    @lib.function(MLA, "sgl_kernel_xpu.flash_mla_get_workspace_size")
    def flash_mla_get_workspace_size(
        max_seq_len: int, num_batches: int, num_heads: int, page_size: int, num_kv_splits: int
    ) -> int:
        check(num_kv_splits > 0 or num_heads > 0, "num_heads must be > 0 when num_kv_splits is auto-selected")
        parts = splits(num_batches, max_seq_len // page_size, page_size, num_kv_splits)
        return 0 if parts == 1 else num_batches * num_heads * parts * 512 * 4

    @lib.function(MLA, "sgl_kernel_xpu.flash_mla_prefill_get_workspace_size")
    def flash_mla_prefill_get_workspace_size(**_: object) -> int:
        return 0

    @lib.function(MLA, "sgl_kernel_xpu.flash_mla_decode")
    def flash_mla_decode(
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        workspace: Tensor,
        sm_scale: float,
        num_kv_splits: int,
    ) -> Tensor:
        cache, page = kv_c_and_k_pe_cache, kv_c_and_k_pe_cache.shape[1]
        check_latent(q_nope, q_pe, cache, page_table, seq_lens, workspace)
        N, H = q_nope.shape[:2]
        assert H <= 128, f"H must be <= 128, but got {H}"
        assert page_table.shape[0] == N
        assert page_table.shape[1] > 0
        assert page_table.shape[1] % (128 / page) == 0
        parts = splits(N, page_table.shape[1], page, num_kv_splits)
        check(parts == 1 or workspace.numel() >= N * H * parts * 512 * 4, "MLA workspace too small")
        out = poisoned(N, H, 512, dtype=q_nope.dtype)
        for n, length in enumerate(seq_lens.tolist()):
            if length:
                q = torch.cat([q_nope[n : n + 1], q_pe[n : n + 1]], -1)
                out[n : n + 1] = one(q, cache, page_table[n], length, sm_scale, causal=False)
        return out

    @lib.function(MLA, "sgl_kernel_xpu.flash_mla_prefill")
    def flash_mla_prefill(
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens_k: Tensor,
        max_seqlen_q: int,
        page_table: Tensor,
        workspace: Tensor,
        sm_scale: float,
        causal: bool,
        num_kv_splits: int,
    ) -> Tensor:
        check_latent(q_nope, q_pe, kv_c_and_k_pe_cache, page_table, seq_lens_k, workspace)
        check(num_kv_splits <= 1, "Manual KV splits are not supported yet.")
        check(causal, "Non-causal MLA prefill is not supported yet.")
        starts = cu_seqlens_q.tolist()
        assert max_seqlen_q >= max(b - a for a, b in itertools.pairwise(starts))
        out = poisoned(*q_nope.shape, dtype=q_nope.dtype)
        for n, length in enumerate(seq_lens_k.tolist()):
            rows = slice(starts[n], starts[n + 1])
            if length and rows.stop > rows.start:
                q = torch.cat([q_nope[rows], q_pe[rows]], -1)
                out[rows] = one(q, kv_c_and_k_pe_cache, page_table[n], length, sm_scale, causal=True)
        return out
