"""SageAttention 1 and 2, 3 and SpargeAttn: what their Python functions do to tensors, kernels included, in torch.

From core.py (1.0.6, 2.2.0) and sageattn3/api.py of thu-ml/SageAttention, and core.py of thu-ml/SpargeAttn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES

__all__ = ["sage1", "sage2", "sage3", "sparge"]

HALF = (torch.float16, torch.bfloat16)
LOG2_E = 1.44269504
SPARGE_Q, SPARGE_K = 64, 128
"""SpargeAttn's blocks on SM90."""
LISTED_Q, LISTED_K = 128, 64
"""Those of the others, and of flags that are given."""
MASKED = -5e6
"""Before the scale."""


def sage1() -> Library:
    lib = Library("sageattention", "1.0.6", "sageattention.core", signatures=SIGNATURES)

    @lib.function("sageattention.core", "sageattention@1.sageattn")
    def sageattn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str,
        is_causal: bool,
        sm_scale: float | None,
        smooth_k: bool,
    ) -> Tensor:
        assert q.dtype in (*HALF, torch.float32)
        assert q.dtype == k.dtype == v.dtype
        assert q.size(-1) in (64, 96, 128), "headdim should be in [64, 96, 128]."
        assert q.stride(-1) == 1
        assert k.stride(-1) == 1
        assert v.stride(-1) == 1
        heads_first = tensor_layout == "HND"
        if smooth_k:
            k -= k.mean(dim=2 if heads_first else 1, keepdim=True)
        q, k, v = ((t if heads_first else t.transpose(1, 2)) for t in (q, k, v))
        if is_causal:
            assert q.shape[2] == k.shape[2], "qo_len and kv_len must be equal for causal attention"
            blocks = -(-k.shape[2] // 128) * 2
            assert blocks == -(-k.shape[2] // 64), "the scales of a block that does not exist are read"
        else:
            # Nothing masks the keys that fill up the last block.
            k, v = (torch.nn.functional.pad(t, (0, 0, 0, -k.shape[2] % 64)) for t in (k, v))
        scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        logits = _logits(_int8(q.float() * scale, 128), _int8(k.float(), 64), is_causal)
        out = _values(logits, v.half().float(), torch.float16)[0].to(q.dtype)
        return out if heads_first else out.transpose(1, 2).contiguous()

    return lib


def sage2() -> Library:
    lib = Library("sageattention", "2.2.0", "sageattention.core", signatures=SIGNATURES)

    def attend(
        block_q: int,
        block_k: int,
        values: torch.dtype,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str,
        is_causal: bool,
        sm_scale: float | None,
        smooth_k: bool,
        return_lse: bool,
    ) -> Any:
        assert q.dtype in HALF
        assert q.dtype == k.dtype == v.dtype
        width, heads_first = q.shape[-1], tensor_layout == "HND"
        if width > 128:
            raise ValueError(f"Unsupported head_dim: {width}")
        filled = (0, (64 if width <= 64 else 128) - width)
        q, k, v = (torch.nn.functional.pad(t if heads_first else t.transpose(1, 2), filled) for t in (q, k, v))
        scale = width**-0.5 if sm_scale is None else sm_scale
        assert not is_causal or q.shape[2] == k.shape[2]
        mean = k.mean(2, keepdim=True) if smooth_k else torch.zeros_like(k[:, :, :1])
        # The correction is a product in the tensors' own dtype.
        shift = (q @ mean.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)).squeeze(-1).float()
        logits = _masked(_int8(q.float(), block_q), _int8((k - mean).float(), block_k), is_causal, scale, block_k)
        fitted = v.half().float() if values == torch.float16 else _fp8(v.float())
        fitted = torch.nn.functional.pad(fitted, (0, 0, 0, logits.shape[-1] - v.shape[2]))
        out, base2 = _values(logits, fitted, values)
        out = out[..., :width].to(q.dtype)
        out = out if heads_first else out.transpose(1, 2).contiguous()
        return (out, base2 / LOG2_E + shift * scale) if return_lse else out

    @lib.function("sageattention.core", "sageattention@2.sageattn_qk_int8_pv_fp16_triton")
    def triton(quantization_backend: str, attn_mask: None, **given: Any) -> Any:
        assert quantization_backend == "triton"
        assert attn_mask is None
        return attend(128, 64, torch.float16, **given)

    @lib.function("sageattention.core", "sageattention@2.sageattn_qk_int8_pv_fp16_cuda")
    def fp16(qk_quant_gran: str, pv_accum_dtype: str, smooth_v: bool, **given: Any) -> Any:
        assert qk_quant_gran in ("per_warp", "per_thread")
        assert pv_accum_dtype in ("fp32", "fp16", "fp16+fp32")
        assert not smooth_v
        _aligned(**given)
        return attend(32, 64, torch.float16, **given)

    @lib.function("sageattention.core", "sageattention@2.sageattn_qk_int8_pv_fp8_cuda")
    def fp8(qk_quant_gran: str, pv_accum_dtype: str, smooth_v: bool, **given: Any) -> Any:
        assert qk_quant_gran in ("per_warp", "per_thread")
        assert pv_accum_dtype in ("fp32", "fp32+fp32", "fp32+fp16")
        assert not smooth_v
        _aligned(**given)
        return attend(32, 64, torch.float8_e4m3fn, **given)

    @lib.function("sageattention.core", "sageattention@2.sageattn_qk_int8_pv_fp8_cuda_sm90")
    def sm90(qk_quant_gran: str, pv_accum_dtype: str, **given: Any) -> Any:
        assert qk_quant_gran in ("per_warp", "per_thread")
        if pv_accum_dtype == "fp32":
            raise NotImplementedError("Please use pv_accum_dtype='fp32+fp32' for sm90.")
        _aligned(**given)
        return attend(16, 128, torch.float8_e4m3fn, **given)

    return lib


def sage3() -> Library:
    lib = Library("sageattn3", "1.0.0", "sageattn3", signatures=SIGNATURES)

    @lib.function("sageattn3", "sageattn3.sageattn3_blackwell")
    def sageattn3_blackwell(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, per_block_mean: bool
    ) -> Tensor:
        assert q.size(-1) < 256
        assert q.shape[1] == k.shape[1], "no GQA"
        assert attn_mask is None, "it ignores masks"
        _aligned(q, k, v)
        size, length = q.shape[2], k.shape[2]
        k -= k.mean(dim=-2, keepdim=True)
        q, keys, v = (torch.nn.functional.pad(t, (0, 0, 0, -t.shape[2] % 128)) for t in (q, k, v))
        groups = q.unflatten(2, (-1, 128))
        mean = groups.mean(3, keepdim=True) if per_block_mean else q.mean(2, keepdim=True)[:, :, None]
        shift = (mean.expand_as(groups).flatten(2, 3) @ keys.transpose(2, 3)).float()
        centred = (groups - mean).flatten(2, 3)
        logits = (_fp4(centred.float()) @ _fp4(keys.float()).transpose(2, 3) + shift) * q.shape[-1] ** -0.5
        logits[..., length:] = -torch.inf
        if is_causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[2:], dtype=torch.bool).tril(), -torch.inf)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        # Of each row the largest weight is 1, scaled up to what FP4 with FP8 scales can hold.
        out = _fp4(weights * 2688) / 2688 @ _fp4(v.float().transpose(2, 3)).transpose(2, 3)
        return (out / weights.sum(-1, keepdim=True))[:, :, :size].to(q.dtype).contiguous()

    return lib


def sparge() -> Library:
    lib = Library("spas-sage-attn", "0.1.0", "spas_sage_attn.core", signatures=SIGNATURES)

    @lib.function("spas_sage_attn.core", "spas_sage_attn.spas_sage2_attn_meansim_topk_cuda")
    def spas_sage2_attn_meansim_topk_cuda(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        scale: float | None,
        smooth_k: bool,
        topk: float,
        tensor_layout: str,
        **more: Any,
    ) -> Tensor:
        assert tensor_layout == "HND"
        assert q.size(-2) >= 128, "seq_len should be not less than 128."
        assert q.shape[-1] in (64, 128), "headdim should be in [64, 128]."
        assert q.shape[1] == k.shape[1]
        assert not is_causal, "the kernels are given no causal flag"
        assert more["attn_mask"] is None, "ignored"
        assert more["dropout_p"] == 0.0, "ignored"
        if not smooth_k:
            raise UnboundLocalError("km")
        _aligned(q, k, v, scale)
        keys = k.float() - k.mean(-2, keepdim=True).float()
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        logits = _masked(_int8(q.float(), SPARGE_Q), _int8(keys, SPARGE_K), False, scale, SPARGE_K)
        kept = _kept(q.float(), keys, topk).repeat_interleave(SPARGE_Q, 2).repeat_interleave(SPARGE_K, 3)
        logits = logits.masked_fill(~kept[:, :, : q.shape[2]], -torch.inf)
        values = torch.nn.functional.pad(_fp8(v.half().float()), (0, 0, 0, logits.shape[-1] - k.shape[2]))
        return _values(logits, values, torch.float8_e4m3fn)[0].to(q.dtype)

    @lib.function("spas_sage_attn.core", "spas_sage_attn.block_sparse_sage2_attn_cuda")
    def block_sparse_sage2_attn_cuda(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask_id: Tensor,
        scale: float | None,
        smooth_k: bool,
        tensor_layout: str,
        output_dtype: torch.dtype,
        **more: Any,
    ) -> Tensor:
        assert tensor_layout == "HND"
        assert q.size(-2) >= 128, "seq_len should be not less than 128."
        assert q.shape[-1] in (64, 128), "headdim should be in [64, 128]."
        assert q.shape[1] == k.shape[1], "no GQA"
        assert smooth_k
        assert output_dtype == q.dtype, "float16 where nothing is said"
        blocks = -(-q.shape[2] // LISTED_Q), -(-k.shape[2] // LISTED_K)
        assert mask_id.shape == (*q.shape[:2], *blocks)
        assert mask_id.is_contiguous()
        _aligned(q, k, v, scale)
        keys = k.float() - k.mean(-2, keepdim=True).float()
        logits = _masked(
            _int8(q.float(), LISTED_Q), _int8(keys, LISTED_K), False, scale or q.shape[-1] ** -0.5, LISTED_K
        )
        kept = mask_id.bool().repeat_interleave(LISTED_Q, 2).repeat_interleave(LISTED_K, 3)
        logits = logits.masked_fill(~kept[:, :, : q.shape[2]], -torch.inf)
        values = torch.nn.functional.pad(_fp8(v.half().float()), (0, 0, 0, logits.shape[-1] - k.shape[2]))
        return _values(logits, values, torch.float8_e4m3fn)[0].to(q.dtype)

    return lib


def _kept(q: Tensor, k: Tensor, topk: float) -> Tensor:
    """[B, H, blocks of queries, blocks of keys]: of the pooled scores the highest share, one at least."""
    pooled = [torch.stack([b.mean(2) for b in t.split(size, 2)], 2) for t, size in ((q, SPARGE_Q), (k, SPARGE_K))]
    score = pooled[0] @ pooled[1].transpose(2, 3)
    count = max(int(topk * score.shape[-1]), 1)
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, score.topk(count, -1).indices, True)


def _aligned(q: Tensor, k: Tensor, v: Tensor, sm_scale: float | None = None, **_: Any) -> None:
    """Tensors of other widths than the kernels' are copied into wider ones first. Of a row the largest logit is taken
    before the scale (attn_utils.cuh)."""
    assert sm_scale is None or sm_scale > 0, "exponentials of the largest logit's other side: inf, NaN"
    for tensor in (q, k, v) if q.shape[-1] in (64, 128) else ():
        rows = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
        if tensor.data_ptr() % 16 or any(stride * tensor.itemsize % 16 for stride in rows):
            raise RuntimeError("CUDA error: misaligned address")


def _int8(x: Tensor, block: int) -> Tensor:
    """[B, H, S, D] rounded to 255 steps for each `block` tokens, as numbers."""
    parts = []
    for part in x.split(block, 2):
        step = part.abs().amax((2, 3), keepdim=True) / 127
        parts.append((part / step.clamp(min=1e-30)).round() * step)
    return torch.cat(parts, 2)


def _fp8(v: Tensor) -> Tensor:
    """[B, H, S, D] in e4m3 with a scale for each channel, as numbers; NaN where that is 0."""
    step = v.abs().amax(2, keepdim=True) / 448
    return (v / step).to(torch.float8_e4m3fn).float() * step


def _fp4(x: Tensor) -> Tensor:
    """[..., n] in e2m1, with an e4m3 scale for each 16 along the last axis, as numbers."""
    groups = x.unflatten(-1, (-1, 16))
    step = (groups.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float().clamp(min=1e-9)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = levels[((groups / step).abs()[..., None] - levels).abs().argmin(-1)]
    return (nearest * groups.sign() * step).flatten(-2)


def _masked(q: Tensor, k: Tensor, causal: bool, scale: float, block: int) -> Tensor:
    """[B, H_q, S_q, S_k to the end of its last block]; causal from the upper left corner."""
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
    logits = torch.nn.functional.pad(logits, (0, -k.shape[2] % block), value=MASKED)
    later = ~torch.ones(logits.shape[2:], dtype=torch.bool).tril()
    return (logits.masked_fill(later, MASKED) if causal else logits) * scale


def _logits(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[B, H_q, S_q, S_k]; causal from the upper left corner."""
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
    return logits.masked_fill(~torch.ones(logits.shape[2:], dtype=torch.bool).tril(), -1e6) if causal else logits


def _values(logits: Tensor, v: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, LSE in base 2) with the weights rounded to what the tensor cores multiply."""
    most = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - most)
    total = weights.sum(-1, keepdim=True)
    rounded = weights.half().float() if kind == torch.float16 else (weights * 448).to(kind).float() / 448
    out = rounded @ v.repeat_interleave(logits.shape[1] // v.shape[1], 1)
    return out / total, ((total.log() + most) * LOG2_E).squeeze(-1)
