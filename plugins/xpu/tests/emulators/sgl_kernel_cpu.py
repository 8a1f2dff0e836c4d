"""SGLang's CPU kernels as sgl-kernel/csrc/cpu/{decode,extend,torch_extension_cpu}.cpp have them, in three builds: 0.3
with 13 and 14 arguments, 0.4 with scales of FP8 caches and cross attention, 0.4.5 with windows, sinks and tree masks in
place of the scales.

Traps: decode stores key and value at `loc` first, whatever was there; of a sequence without keys it makes NaN; in 0.3
it counts the LSE in `attn_logits` of parts that got no keys, which it does not write; extend reads the new keys from
its arguments only, is causal and ignores the softcap; its widths are multiples of 32; latent caches are recognised by K
and V at one address.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES, attend, check

__all__ = ["library"]

OPS = "torch.ops.sgl_kernel"


def library(build: str = "0.4") -> Library:
    lib = Library("sgl-kernel-cpu", build, "sgl_kernel", OPS, signatures=SIGNATURES)

    @lib.function(OPS, f"sgl_kernel_cpu@{build}.decode_attention_cpu", name="decode_attention_cpu")
    def decode_attention_cpu(
        query: Tensor,
        k_cache: Tensor,
        output: Tensor,
        key: Tensor,
        value: Tensor,
        loc: Tensor,
        attn_logits: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        sm_scale: float,
        logit_cap: float,
        **spelled: Tensor,
    ) -> None:
        v_cache = spelled["v_cache" if "v_cache" in spelled else "v_cahce"]
        N, H, _ = query.shape
        _check_indices(req_to_token, req_pool_indices, seq_lens)
        _check_off(spelled)
        check(query.dim() == k_cache.dim() == v_cache.dim() == 3 and loc.dim() == 1, "CHECK_DIM")
        check(attn_logits.shape[:2] == (N, H) and attn_logits.shape[3] == v_cache.shape[2] + 1, "CHECK_EQ")
        check(attn_logits.dtype == torch.float32 and loc.numel() == seq_lens.numel() == N, "CHECK_EQ")
        check(output.is_contiguous(), "must be contiguous")
        assert query.dtype == torch.bfloat16, "its products of float16 are wrong without AMX-FP16"
        latent = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.shape[1] == 1
        latent = latent and query.shape[2] == v_cache.shape[2] + 64
        check(not latent or logit_cap == 0.0, "decode MLA: expect no logit_cap.")
        k_cache[loc] = key
        if not latent:
            v_cache[loc] = value
        for n, size in enumerate(seq_lens.tolist()):
            check(size <= req_to_token.shape[1], "seq_len_kv out of scope!")
            slots = req_to_token[req_pool_indices[n], :size].long()
            if not size:
                output[n] = torch.nan
                continue
            out, lse = attend(query[n : n + 1], k_cache[slots], v_cache[slots], sm_scale, softcap=logit_cap)
            if build == "0.3":
                parts = attn_logits.shape[2]
                used = -(-size // -(-size // parts))
                every = torch.cat([lse, attn_logits[n, :, used:, -1]], 1).logsumexp(1, keepdim=True)
                out = (out.float() * (lse - every).exp()).to(out.dtype)
            output[n] = out[0]

    @lib.function(OPS, f"sgl_kernel_cpu@{build}.extend_attention_cpu", name="extend_attention_cpu")
    def extend_attention_cpu(
        q_extend: Tensor,
        k_extend: Tensor,
        v_extend: Tensor,
        o_extend: Tensor,
        k_buffer: Tensor,
        v_buffer: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_seq_lens: Tensor,
        extend_start_loc: Tensor,
        max_len_extend: int,
        sm_scale: float,
        **more: object,
    ) -> None:
        _check_indices(req_to_token, req_pool_indices, seq_lens)
        _check_off(more)
        check(extend_seq_lens.dtype == extend_start_loc.dtype == req_to_token.dtype, "same dtype as req_to_token")
        assert q_extend.dtype == torch.bfloat16, "its products of float16 are wrong without AMX-FP16"
        check(q_extend.is_contiguous() and o_extend.is_contiguous(), "must be contiguous")
        check(k_extend.stride(-1) == v_extend.stride(-1) == k_buffer.stride(-1) == v_buffer.stride(-1) == 1, "last dim")
        check(q_extend.shape[2] % 32 == 0, f"invalid head_size {q_extend.shape[2]}")
        check(v_extend.shape[2] % 32 == 0, f"invalid head_size_v {v_extend.shape[2]}")
        check(k_buffer.shape[1] == v_buffer.shape[1] and v_extend.shape[1] == k_extend.shape[1], "CHECK_EQ")
        starts, counts = extend_start_loc.tolist(), extend_seq_lens.tolist()
        for n, size in enumerate(seq_lens.tolist()):
            prefix, rows = size - counts[n], slice(starts[n], starts[n] + min(counts[n], max_len_extend))
            check(prefix >= 0, "prefix len < 0!")
            check(size <= req_to_token.shape[1], "seq_len out of scope!")
            slots = req_to_token[req_pool_indices[n], :prefix].long()
            keys, values = torch.cat([k_buffer[slots], k_extend[rows]]), torch.cat([v_buffer[slots], v_extend[rows]])
            o_extend[rows] = attend(q_extend[rows], keys, values, sm_scale, causal=True)[0]

    return lib


def _check_off(more: Mapping[str, object]) -> None:
    for name in ("is_cross_attn", "sliding_window_size", "encoder_lens", "sinks", "tree_mask"):
        check(not more.get(name), f"emulator: no {name}")


def _check_indices(table: Tensor, pool: Tensor, lengths: Tensor) -> None:
    check(
        table.dtype in (torch.int32, torch.int64) and table.is_contiguous(), "expect req_to_token to be int32 or int64"
    )
    check(lengths.dtype == torch.int64, "expect req_lens to be int64")
    check(pool.dtype == torch.int64, "expect req_pool_indices to be int64")
