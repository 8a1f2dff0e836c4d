"""vllm-xpu-kernels as vllm_xpu_kernels/flash_attn_interface.py of 0.1.16.2 and csrc/{flash_attn,xpu/attn} of
https://github.com/vllm-project/vllm-xpu-kernels (4543b580) have it; every configuration counts as compiled.

Traps: (q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k); softcap and ALiBi slopes are ignored; sinks are read as the
queries' dtype; an FP8 scale must be alone in its storage; the LSE is for calls without pages, windows and sinks, and
nothing is written into it for rows of decode; the decode kernel takes every sequence for one with a query; a short
causal verify runs as many decodes of at least one key; beside one bound of a window a missing one is max_seqlen_k.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES, attend, check, poisoned

__all__ = ["library"]

MODULE = "vllm_xpu_kernels.flash_attn_interface"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def library(version: str = "0.1.16.2") -> Library:
    lib = Library("vllm-xpu-kernels", version, MODULE, signatures=SIGNATURES)

    @lib.function(MODULE, "vllm_xpu_kernels.flash_attn_varlen_func")
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: Tensor | None,
        seqused_k: Tensor | None,
        softmax_scale: float,
        causal: bool,
        window_size: list[int] | None,
        softcap: float,
        block_table: Tensor | None,
        return_softmax_lse: bool,
        out: Tensor | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        s_aux: Tensor | None,
        is_mix_batch: bool,
        **_: object,
    ) -> object:
        assert cu_seqlens_k is not None or seqused_k is not None, "cu_seqlens_k or seqused_k must be provided"
        assert cu_seqlens_k is None or seqused_k is None, "cannot be provided at the same time"
        assert block_table is None or seqused_k is not None, "when enable block_table, seqused_k is needed"
        assert block_table is not None or cu_seqlens_k is not None, (
            "when block_table is disabled, cu_seqlens_k is needed"
        )
        left, right = (-1, -1) if window_size is None else window_size
        paged = block_table is not None
        check(q.dtype in (torch.float16, torch.bfloat16), "VLLM Kernel XPU only supports fp16 and bf16 type")
        check(k.dtype == v.dtype, "key and value must have the same dtype")
        check(k.dtype in FP8 or k.dtype == q.dtype, "query and key must have the same dtype")
        for t in (q, k, v):
            check(
                t.stride(-1) == 1 and t.shape[-1] * t.itemsize % 16 == 0, "last dim size is not a multiple of 16 bytes"
            )
            check(all(s * t.itemsize % 16 == 0 for s in t.stride()[:-1]), "strides are not a multiple of 16 bytes")
        for t in (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table):
            check(t is None or (t.dtype == torch.int32 and t.is_contiguous()), "must have dtype torch.int32")
        check(q.shape[-1] <= 512, "FMHA forward only supports head dimension at most 512")
        local, scales = (left, right) != (-1, -1), []
        for name, scale in (("k_scale", k_descale), ("v_scale", v_descale)):
            check(k.dtype not in FP8 or scale is not None, f"FP8 KV cache requires {name}")
            if scale is not None:
                assert scale.untyped_storage().nbytes() == scale.element_size(), "must be view of single scalar tensor"
            scales.append(1.0 if scale is None else float(scale))
        check(
            not return_softmax_lse or not (paged or local or s_aux is not None),
            "softmax_lse output is only supported when is_paged=false, is_local=false, is_sink=false",
        )
        if paged:
            page = k.shape[1]
            check(page in (16, 32) or page % 64 == 0, f"chunk_prefill: unsupported block_size={page}")
        sink = None if s_aux is None else s_aux.contiguous().view(q.dtype)[: q.shape[1]]
        result = poisoned(*q.shape, dtype=q.dtype) if out is None else out.fill_(torch.nan)
        stats = poisoned(q.shape[1], q.shape[0], dtype=torch.float32)
        starts = cu_seqlens_q.tolist()
        assert max_seqlen_q >= max(b - a for a, b in itertools.pairwise(starts))
        N, group = len(starts) - 1, q.shape[1] // k.shape[-2]

        def sequence(n: int) -> tuple[Tensor, Tensor, Tensor]:
            """(keys, values, which outputs a NaN behind the last token spoils)."""
            if not paged:
                ends = cu_seqlens_k.tolist()
                part = slice(ends[n], ends[n + 1])
                return k[part], v[part], torch.zeros(q.shape[1], v.shape[-1], dtype=torch.bool)
            size = int(seqused_k[n])
            pages = block_table[n, : -(-size // k.shape[1])].long()
            keys, values = (
                (t[pages].flatten(0, 1).float() * s).to(q.dtype) for t, s in zip((k, v), scales, strict=True)
            )
            return keys[:size], values[:size], values[size:].isnan().any(0).repeat_interleave(group, 0)

        def launch(n: int, rows: slice, window: tuple[int, int], *, flag: bool, keys_up_to: int | None = None) -> None:
            keys, values, spoilt = sequence(n)
            keys, values = keys[:keys_up_to], values[:keys_up_to]
            if keys.shape[0]:
                found, lse = attend(q[rows], keys, values, softmax_scale, causal=flag, window=window, sink=sink)
                result[rows], stats[:, rows] = found.masked_fill(spoilt, torch.nan), lse

        uniform = q.shape[0] == N * max_seqlen_q
        if paged and causal and not return_softmax_lse and softcap == 0 and 1 < max_seqlen_q <= 16 and uniform:
            for row in range(q.shape[0]):
                n, j = divmod(row, max_seqlen_q)
                count = max(int(seqused_k[n]) - (max_seqlen_q - 1 - j), 1)
                launch(n, slice(row, row + 1), (left, -1), flag=False, keys_up_to=count)
            return result
        if local:
            left, right = (max_seqlen_k if bound == -1 else bound for bound in (left, right))
        whole = not paged or (not is_mix_batch and max_seqlen_q > 1)
        if not whole:
            for n in sorted(range(N), key=lambda n: starts[n] - starts[n + 1]):
                if starts[n + 1] - starts[n] < 2:
                    check(starts[n] < q.shape[0], "UR_RESULT_ERROR_DEVICE_LOST: a row behind the last one")
                    launch(n, slice(starts[n], starts[n] + 1), (left, -1), flag=False)
        for n in range(N):
            count = starts[n + 1] - starts[n]
            if count > 1 or (count and whole):
                launch(n, slice(starts[n], starts[n + 1]), (left, right), flag=causal)
        return (result, stats) if return_softmax_lse else result

    return lib
