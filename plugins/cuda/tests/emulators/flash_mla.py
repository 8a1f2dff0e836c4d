"""FlashMLA as csrc/api/{dense,sparse}_decode.h and tests/ref.py of deepseek-ai say, its copy in vLLM, SGLang's fork."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from polyattn.testing.emulators import Library
from polyattn.testing.emulators.arithmetic import lse_of, scores, weighted, weights_of

from . import SIGNATURES

__all__ = ["library"]

Build = Literal["git", "sgl", "vllm"]
BUILDS: dict[Build, tuple[str, str, str]] = {
    "git": ("flash-mla", "1.0.0+9241ae3", "flash_mla.flash_mla_interface"),
    "sgl": ("sgl-flash-mla", "1.0.0", "flash_mla.flash_mla_interface"),
    "vllm": ("vllm", "0.33.0", "vllm.third_party.flashmla.flash_mla_interface"),
}
BYTES = 656
SHARED = 227 * 1024
"""Bytes of shared memory that a block can have."""
GRID = 65_535
"""Blocks of the second axis of a grid, which were the queries of a sequence before 9241ae3."""
OFFSETS = 2**31


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Empty until a call fills it; then good for the same shapes and the same lengths only."""

    planned: tuple[Any, ...] | None = None


def library(build: Build = "git", hopper: bool = True) -> Library:
    """One build, on Hopper or on Blackwell."""
    distribution, version, module = BUILDS[build]
    lib = Library(distribution, version, module, signatures=SIGNATURES)
    lib.add(module, FlashMLASchedMeta=FlashMLASchedMeta)

    @lib.function(module, f"flash_mla@{build}.get_mla_metadata")
    def get_mla_metadata(**_: Any) -> tuple[FlashMLASchedMeta, None]:
        return FlashMLASchedMeta(), None

    @lib.function(module, f"flash_mla@{build}.flash_mla_with_kvcache")
    def flash_mla_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: FlashMLASchedMeta,
        num_splits: None,
        softmax_scale: float | None,
        causal: bool,
        is_fp8_kvcache: bool | None,
        indices: Tensor | None,
        **more: Any,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
        assert num_splits is None
        if build == "sgl":
            assert more["use_legacy"], "dense decoding and rows of 656 bytes exist only on the legacy side"
        assert all(more[name] is None for name in ("attn_sink", "extra_k_cache", "topk_length"))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        _check(q.stride(-1) == 1 and k_cache.stride(-1) == 1, "last dimension must be contiguous")
        _check(q.data_ptr() % 16 == 0, "misaligned address")
        _check_sizes(q, head_dim_v, indices)
        if indices is None:
            assert not is_fp8_kvcache
            assert block_table is not None
            assert cache_seqlens is not None
            _check(hopper, "Dense decode MLA is only supported on SM90a architecture")
            _planned(tile_scheduler_metadata, (q.shape, causal, cache_seqlens.tolist()))
            return _dense(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal)
        assert not causal, "causal must be False when sparse attention is enabled"
        assert is_fp8_kvcache, "is_fp8_kvcache must be True when sparse attention is enabled"
        _planned(tile_scheduler_metadata, (q.shape, indices.shape))
        return _sparse(q, k_cache, indices, head_dim_v, scale)

    @lib.function(module, f"flash_mla@{build}.flash_mla_sparse_fwd")
    def flash_mla_sparse_fwd(
        q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, **more: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        if build == "sgl":
            assert more["use_legacy"], "these rows exist only on the legacy side"
        assert more["attn_sink"] is more["topk_length"] is None
        return _sparse_rows(q, kv, indices, sm_scale, d_v)

    return lib


def _check(held: bool, message: str) -> None:
    if not held:
        raise RuntimeError(message)


def _check_sizes(q: Tensor, width: int, indices: Tensor | None) -> None:
    """CHECK_CUDA of csrc/utils.h ends the process; offsets of 32 bits wrap."""
    if 4 * (5 * q.shape[0] + 1) > SHARED or q.shape[1] > GRID:
        raise SystemExit(1)
    elements = [q.shape[:-1].numel() * width] + ([] if indices is None else [indices.numel()])
    _check(max(elements) <= OFFSETS, "CUDA error: an illegal memory access was encountered")


def _planned(schedule: FlashMLASchedMeta, what: tuple[Any, ...]) -> None:
    """The vendor checks shapes and trusts lengths: a stale schedule gives wrong numbers there, an error here."""
    schedule.planned = schedule.planned or what
    _check(schedule.planned == what, "Your input arguments are inconsistent with sched_meta.")


def _dense(
    q: Tensor, k_cache: Tensor, block_table: Tensor, seqlens: Tensor, width: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    count, rows, _, dim = q.shape
    _check(q.dtype in (torch.bfloat16, torch.float16) and k_cache.dtype == q.dtype, "query and key: one dtype")
    _check(seqlens.dtype == torch.int32 and block_table.dtype == torch.int32, "must have dtype int32")
    _check(seqlens.is_contiguous() and block_table.stride(-1) == 1, "must be contiguous")
    _check(dim in (576, 512) and width == 512, "Only head_size_k == 576 or 512 is supported")
    _check(k_cache.shape[1:] == (64, 1, dim), "Currently page_block_size must be 64")
    _check(count > 0 and seqlens.shape == (count,) and block_table.shape[0] == count, "batch size")
    out, lse = q.new_empty(count, rows, q.shape[2], width), q.new_empty(count, q.shape[2], rows, dtype=torch.float32)
    for n, length in enumerate(seqlens.tolist()):
        pages = block_table[n, : -(-length // 64)].long()
        keys = k_cache[pages].reshape(-1, dim)[:length].float()
        seen = torch.ones(rows, length, dtype=torch.bool)
        out[n], lse[n] = _attend(q[n], keys, seen.tril(length - rows) if causal and rows > 1 else seen, width, scale)
    return out, lse


def _sparse(q: Tensor, k_cache: Tensor, indices: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor]:
    count, rows, heads, dim = q.shape
    _check(q.dtype == torch.bfloat16, "q must be bfloat16")
    _check(heads in (64, 128), f"Unsupported h_q: {heads}")
    _check(k_cache.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn), "key must have dtype fp8_e4m3fn, ...")
    _check(dim == 576 and width == 512 and k_cache.shape[2:] == (1, BYTES), "shape")
    _check(k_cache.stride(1) == BYTES, "The whole block must be contiguous when is_fp8_cache is True")
    _check(indices.dtype == torch.int32 and indices.shape[:2] == (count, rows), "indices")
    _check(indices.shape[2] > 0 and indices.shape[2] % 64 == 0, "topk % TOPK_BLOCK_SIZE")
    _check(bool((indices >= -1).all()) and int(indices.max()) < k_cache.shape[0] * k_cache.shape[1], "illegal access")
    keys = _unpacked(k_cache.reshape(-1, BYTES))[indices.clamp(min=0).long()]
    keys = keys.masked_fill((indices < 0)[..., None], 0.0)
    logits = torch.einsum("nrhd,nrsd->nhrs", q.float(), keys) * scale
    out, lse = _finished(logits.masked_fill((indices < 0)[:, None], -torch.inf), q.dtype)
    return torch.einsum("nhrs,nrsd->nrhd", out, keys[..., :width]).to(q.dtype), lse


def _sparse_rows(q: Tensor, kv: Tensor, indices: Tensor, scale: float, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """sparse_attn_prefill_interface of csrc/api/sparse_fwd.h."""
    count, heads, dim = q.shape
    _check(q.dtype == kv.dtype == torch.bfloat16, "must have dtype bfloat16")
    _check(heads in (64, 128), f"Unsupported h_q: {heads}")
    _check(dim == 576 and width == 512 and kv.shape[1:] == (1, dim), "shape")
    _check(all(t.stride(-1) == 1 for t in (q, kv, indices)), "last dimension must be contiguous")
    _check(q.data_ptr() % 16 == 0, "misaligned address")
    _check(indices.dtype == torch.int32 and indices.shape[:2] == (count, 1), "indices")
    _check(indices.shape[2] > 0 and indices.shape[2] % 128 == 0, "topk % (2 * B_TOPK)")
    # Numbers of -1, or past the last row, are no tokens.
    none = ((indices < 0) | (indices >= len(kv)))[:, 0]
    keys = kv[:, 0][indices[:, 0].clamp(0, len(kv) - 1).long()].float().masked_fill(none[..., None], 0.0)
    logits = (torch.einsum("thd,tsd->ths", q.float(), keys) * scale).masked_fill(none[:, None], -torch.inf)
    weights, lse = _finished(logits, q.dtype)
    return torch.einsum("ths,tsd->thd", weights, keys[..., :width]).to(q.dtype), logits.amax(-1), lse


def _unpacked(rows: Tensor) -> Tensor:
    """512 e4m3 in four groups, each with a float32 scale, then 64 bfloat16."""
    rows = rows.view(torch.uint8).contiguous()
    groups = rows[:, :512].view(torch.float8_e4m3fn).float().unflatten(1, (4, 128))
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).float()
    # The kernel dequantises to bfloat16.
    return torch.cat([(groups * scales[..., None]).flatten(1).bfloat16().float(), rope], 1)


def _attend(q: Tensor, keys: Tensor, seen: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """q [rows, heads, dim], keys [S, dim], seen [rows, S] -> out [rows, heads, width], lse [heads, rows]."""
    weights, lse = _finished(scores(q, keys[:, None], scale, seen), q.dtype)
    return weighted(weights, keys[:, None, :width]).to(q.dtype), lse


def _finished(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weights as `dtype` holds them, LSE); of a row without keys 0 and +inf."""
    lse = lse_of(logits)
    weights = weights_of(logits, lse).to(dtype).float()
    return weights, lse.masked_fill(lse == -torch.inf, torch.inf)
