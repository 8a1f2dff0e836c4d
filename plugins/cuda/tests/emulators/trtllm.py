"""TensorRT-LLM's and CuTe DSL's kernels as FlashInfer carries them, and SGLang's CUTLASS decode.

Traps that are here as they are there: the default scale is 1 and the default layout HND; a workspace that is not zero
when it is new gives no numbers; an LSE has base 2 and the sink in it; rows without keys are not written; latent outputs
are bfloat16, and their queries causal among themselves; XQA counts the heads of sinks from the start of each tile,
launches on the current device, which must be that of the first launch, and looks at no size of its scratch; of lengths
and sinks no strides are known, and of V those of K.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import aligned
from polyattn.testing.emulators import Library

from . import SIGNATURES
from . import flashinfer as wrappers
from .flashinfer import attention, check_out, rows_of, visible
from .gpus import launched

__all__ = ["cutlass", "library"]

PAGES = (16, 32, 64, 128)
PROCESSORS = 132
GRID = 65_535
"""Blocks of the third axis of a grid."""


def library(version: str = "0.7.2.post1", arch: int = 100) -> Library:
    """FlashInfer on a chip of compute capability `arch` / 10."""
    lib = wrappers.library(version)
    old = version.startswith("0.6")
    where = "flashinfer@0.6.18" if old else "flashinfer"
    _decode(lib, f"{where}.decode.trtllm_batch_decode_with_kv_cache", arch)
    _context(lib, f"{where}.prefill.trtllm_batch_context_with_kv_cache", arch)
    _xqa(lib, f"{where}.decode.xqa_batch_decode_with_kv_cache", arch)
    if not old:
        _latent(lib)
    return lib


def check_workspace(workspace: Tensor) -> None:
    """Semaphores are zero when they are new, and again after each call."""
    assert workspace.numel() >= 128 << 20, "128 MiB is what FlashInfer recommends"
    if bool(workspace[:4096].any()):
        raise RuntimeError("the kernel waits for a semaphore that nobody will set: the workspace was not zero")


def attend(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    layout: str,
    block_tables: Tensor,
    seq_lens: Tensor,
    starts: list[int],
    rule: Any,
    scale: Any,
    v_scale: Any,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, LSE of base 2 with the sink in it), packed. `rule(n, s_q, s_k)`: who sees whom in sequence n. `sinks`:
    [H_q], or [S, H_q] of each query of a sequence."""
    assert query.is_contiguous() or query.stride(-1) == 1
    for tables in (block_tables, seq_lens):
        assert tables.dtype == torch.int32
        assert tables.is_contiguous()
    size = caches[0].shape[2 if layout == "HND" else 1]
    outs, lses = [], []
    for n, s_k in enumerate(seq_lens.tolist()):
        queries, pages = query[starts[n] : starts[n + 1]], block_tables[n, : -(-s_k // size)]
        k, v = (rows_of(cache, layout, pages, s_k) for cache in caches)
        out, lse = attention(queries, k, v, float(scale), rule(n, queries.shape[0], s_k))
        if sinks is not None:
            assert sinks.dtype == torch.float32
            assert sinks.is_contiguous()
            own = sinks if sinks.ndim == 1 else sinks[: len(queries)]
            with_sink = torch.logaddexp(lse * math.log(2.0), own)
            out = out * torch.exp(lse * math.log(2.0) - with_sink)[..., None]
            lse = with_sink / math.log(2.0)
        outs.append(out * float(v_scale))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def finish(found: Tensor, lse: Tensor, query: Tensor, a: dict[str, Any], shape: tuple[int, ...] | None = None) -> Any:
    shape = tuple(found.shape) if shape is None else shape
    check_out(a["out"], shape, query.dtype)
    result = found.to(query.dtype).view(shape)
    if float(a["bmm1_scale"]) <= 0:
        result = result * math.nan
    if a["out"] is not None:
        assert a["out"].is_contiguous()
        result = a["out"].copy_(result)
    elif result.shape == query.shape and not query.is_contiguous():
        # torch.empty_like(query), which keeps its strides, and the kernel writes rows one behind another.
        memory = torch.empty_like(query)
        memory.as_strided((memory.numel(),), (1,)).copy_(result.reshape(-1))
        result = memory
    return (result, lse) if a.get("return_lse") else result


_SINKS = ("sinks",)
"""Annotated as a list of tensors, and handed on as the one tensor that the kernel reads, [H_q]."""


def check_paged(a: dict[str, Any]) -> None:
    check_workspace(a["workspace_buffer"])
    size = a["kv_cache"][0].shape[2 if a["kv_layout"] == "HND" else 1]
    if size not in PAGES:
        raise ValueError(f"page_size must be one of {PAGES}, got {size}")


def check_generated(a: dict[str, Any]) -> None:
    """What trtllm-gen's launcher takes from the keys' strides, and TMA from an address."""
    check_paged(a)
    key, value = a["kv_cache"]
    longest = -(-(a["max_q_len"] or a["q_len_per_req"]) // 256) * 256
    if (
        a["return_lse"]
        and a["workspace_buffer"].numel() < 8 * a["query"].shape[1] * len(a["seq_lens"]) * longest + 2**20
    ):
        raise RuntimeError("Failed to allocate memory for trtllm_gen_softmax_workspace in AlignedAllocator")
    assert key.stride() == value.stride(), "V is read by the strides of K"
    assert aligned(key, value), "cuTensorMapEncodeTiled"
    assert a["cum_seq_lens_q"] is None or a["cum_seq_lens_q"].is_contiguous()


def _decode(lib: Library, key: str, arch: int) -> None:
    @lib.function("flashinfer.decode", key, mistyped=_SINKS)
    def trtllm_batch_decode_with_kv_cache(**a: Any) -> Any:
        assert a["backend"] == "trtllm-gen"
        assert arch in (100, 103), "no cubin for this chip"
        check_generated(a)
        query, caches, lens = a["query"], a["kv_cache"], a["seq_lens"]
        if query.shape[1] // caches[0].shape[1 if a["kv_layout"] == "HND" else 2] > 128:
            raise RuntimeError("The numHeadsQ/numHeadsKv is not supported.")
        if caches[0].dtype == torch.float8_e4m3fn and query.dtype != torch.bfloat16:
            raise RuntimeError("no cubin for this pair of dtypes")
        if a["q_len_per_req"] is None:
            assert a["max_q_len"] is not None
            starts = a["cum_seq_lens_q"].tolist()
        else:
            assert a["cum_seq_lens_q"] is None
            starts = [n * a["q_len_per_req"] for n in range(len(lens) + 1)]
        counters = a["multi_ctas_kv_counter_buffer"]
        if counters is not None and (bool(counters.any()) or counters.numel() < 4 * len(lens) * query.shape[1]):
            raise ValueError("multi_ctas_kv_counter_buffer is too small, or was not zero")
        assert starts[-1] == query.shape[0]
        assert a["max_seq_len"] >= int(lens.max())
        left = a["window_left"]
        found, lse = attend(
            query, caches, a["kv_layout"], a["block_tables"], lens, starts,
            lambda n, s_q, s_k: visible(s_q, s_k, True, left), a["bmm1_scale"], a["bmm2_scale"], a["sinks"],
        )  # fmt: skip
        return finish(found, lse, query, a)


def _context(lib: Library, key: str, arch: int) -> None:
    @lib.function("flashinfer.prefill", key, mistyped=_SINKS)
    def trtllm_batch_context_with_kv_cache(**a: Any) -> Any:
        assert arch in (100, 103), "no cubin for this chip"
        check_generated(a)
        query, caches, lens, left = a["query"], a["kv_cache"], a["seq_lens"], a["window_left"]
        if not a["causal"] and left >= 0:
            raise NotImplementedError("Sliding-window non-causal attention is not supported")
        if caches[0].dtype != query.dtype:
            raise RuntimeError("no cubin for this pair of dtypes")
        starts = a["cum_seq_lens_q"].tolist()
        assert a["batch_size"] == len(lens) == len(starts) - 1
        assert a["cum_seq_lens_kv"].tolist() == [0, *lens.cumsum(0).tolist()]
        assert a["cum_seq_lens_kv"].dtype == torch.int32
        counts = [b - s for s, b in itertools.pairwise(starts)]
        assert a["max_q_len"] >= max(counts)
        before = any(0 < keys < new for keys, new in zip(lens.tolist(), counts, strict=True))
        assert not (a["causal"] and before), "what queries before the first key get is said nowhere"
        found, lse = attend(
            query, caches, a["kv_layout"], a["block_tables"], lens, starts,
            lambda n, s_q, s_k: visible(s_q, s_k, a["causal"], left), a["bmm1_scale"], a["bmm2_scale"], a["sinks"],
        )  # fmt: skip
        return finish(found, lse, query, a)


def check_launch(a: dict[str, Any], loaded: dict[Any, int]) -> None:
    """`launchMHAFlashInfer` of mha.cu. loaded: module -> the device on which it asked for its shared memory."""
    query, sequences = a["query"], len(a["seq_lens"])
    axes = (1, 2) if a["kv_layout"] == "HND" else (2, 1)
    kv_heads, size = (a["kv_cache"][0].shape[axis] for axis in axes)
    rows, width = a["q_len_per_req"] * (query.shape[-2] // kv_heads), query.shape[-1]
    on = launched(query)
    if loaded.setdefault((query.dtype, a["kv_cache"][0].dtype, size, width, rows, a["window_left"] >= 0), on) != on:
        raise RuntimeError("CUDA error: invalid argument")
    if sequences > GRID:
        raise RuntimeError("CUDA error: invalid configuration argument")
    split = min(PROCESSORS // (sequences * kv_heads), -(-a["block_tables"].shape[1] * size // 256))
    scratch = split * sequences * kv_heads * -(-rows // 32) * (2 * 32 * width + 2 * 32 * 4)
    if split > 1 and a["q_len_per_req"] > 1 and (8 << 20) + scratch > a["workspace_buffer"].numel():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _xqa(lib: Library, key: str, arch: int) -> None:
    loaded: dict[Any, int] = {}

    @lib.function("flashinfer.decode", key)
    def xqa_batch_decode_with_kv_cache(**a: Any) -> Any:
        if arch // 10 not in (9, 10, 12):
            raise RuntimeError("XQA is only supported on SM90, SM100, SM120/SM121 GPUs")
        check_paged(a)
        check_launch(a, loaded)
        query, caches, lens, drafts = a["query"], a["kv_cache"], a["seq_lens"], a["q_len_per_req"]
        assert caches[0].dtype == caches[1].dtype
        assert query.is_contiguous(), "it knows no strides of the query"
        assert caches[0].stride() == caches[1].stride(), "V is read by the strides of K"
        strides = zip(caches[0].shape[:-1], caches[0].stride()[:-1], strict=True)
        assert not any(n > 1 and stride % query.shape[-1] for n, stride in strides), "strides are counted in rows"
        group = query.shape[-2] // caches[0].shape[1 if a["kv_layout"] == "HND" else 2]
        if group > 32:
            raise RuntimeError("static assertion failed: persistentQ")
        assert not (caches[0].dtype == torch.float8_e4m3fn and arch == 90), "its Hopper kernel quantises Q"
        sinks, ragged, T = a["sinks"], a["q_cu_seq_lens"], query.shape[0]
        assert all(t is None or t.is_contiguous() for t in (sinks, ragged))
        starts = [n * drafts for n in range(len(lens) + 1)] if ragged is None else ragged.tolist()
        mask, words = a["mask"], (drafts + 31) // 32 * 2
        shape = tuple(query.shape)
        if drafts > 1:
            assert mask is not None, "Mask is required for speculative decoding"
            assert mask.dtype == torch.uint16
            assert tuple(mask.shape) == ((len(lens), drafts, words) if ragged is None else (T, words))
            if sinks is not None:
                # `addAttentionSinksSpecDec` of mha.cu: the row in its tile of 32, not the row, by the heads of a group.
                head = torch.arange(drafts * group) % 32 % group
                sinks = sinks.view(-1, group)[:, head].view(-1, drafts, group).transpose(0, 1).flatten(1)
            if ragged is None:
                query = query.view(len(lens), drafts, *query.shape[1:])
                shape = tuple(query.shape)
        else:
            assert ragged is None, "q_cu_seq_lens requires q_len_per_req to be the max draft length (> 1)"

        def rule(n: int, s_q: int, s_k: int) -> Tensor:
            seen = visible(s_q, s_k, False, a["window_left"])
            if drafts > 1:
                rows = mask[n, :s_q] if ragged is None else mask[starts[n] : starts[n + 1]]
                bits = (rows.to(torch.int32)[..., None] >> torch.arange(16)) & 1
                among = bits.flatten(1)[:, :s_q].bool()
                seen[:, max(s_k - s_q, 0) :] &= among[:, max(s_q - s_k, 0) :]
            return seen

        found, lse = attend(
            query.flatten(0, -3), caches, a["kv_layout"], a["block_tables"], lens, starts, rule,
            a["bmm1_scale"], a["bmm2_scale"], sinks,
        )  # fmt: skip
        return finish(found, lse, query, a, shape)


def _latent(lib: Library) -> None:
    @lib.function("flashinfer.mla", "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla")
    def trtllm_batch_decode_with_kv_cache_mla(**a: Any) -> Any:
        check_workspace(a["workspace_buffer"])
        query, cache, lens, generated = a["query"], a["kv_cache"], a["seq_lens"], a["backend"] == "trtllm-gen"
        assert a["backend"] in ("trtllm-gen", "cute-dsl"), "what auto is depends on the chip"
        assert query.dtype == cache.dtype, "kv_cache dtype must match query dtype"
        assert query.dtype == torch.bfloat16 or (not generated and query.dtype == torch.float8_e4m3fn)
        width, table, size = a["kv_lora_rank"], a["block_tables"], cache.shape[-2]
        if (width, a["qk_rope_head_dim"]) != (512, 64):
            raise ValueError("Unsupported MLA dimensions")
        if generated and 64 < query.shape[-2] < 128:
            raise ValueError("trtllm-gen MLA decode does not support 64 < num_heads_q < 128")
        if not generated and query.shape[-2] > 128:
            raise ValueError("cute_dsl_mla_decode: unsupported configuration")
        assert aligned(cache), "cuTensorMapEncodeTiled"
        indices = [t for t in (table, lens, a["cum_seq_lens_q"]) if t is not None]
        assert all(t.is_contiguous() for t in indices)
        if not generated and any(t.data_ptr() % 16 for t in indices):
            raise ValueError("Misaligned Tensor data: the kernel assumes 16 bytes")
        if size not in (32, 64):
            raise ValueError(f"trtllm-gen requires block_size in (32, 64), got {size}")
        if not generated and table.shape[1] % (128 // size):
            raise ValueError("Expected block_num % (128 / block_size) == 0")
        starts = a["cum_seq_lens_q"]
        if starts is None:
            assert query.ndim == 4
            starts = [n * query.shape[1] for n in range(len(lens) + 1)]
        else:
            assert query.ndim == 3
            assert a["max_q_len"] > 0
            if generated and a["return_lse"]:
                raise NotImplementedError("trtllm-gen MLA does not support return_lse/lse with cum_seq_lens_q")
            starts = starts.tolist()
        shape = (*query.shape[:-1], width)
        check_out(a["out"], shape, torch.bfloat16)
        flat, rows = query.flatten(0, -3), cache.unsqueeze(2)
        found, lse = attend(
            flat, (rows, rows[..., :width]), "NHD", table, lens, starts,
            lambda n, s_q, s_k: visible(s_q, s_k, True, -1), a["bmm1_scale"], a["bmm2_scale"], None,
        )  # fmt: skip
        result = found.to(torch.bfloat16).view(shape)
        if float(a["bmm1_scale"]) <= 0:
            result = result * math.nan
        result = result if a["out"] is None else a["out"].copy_(result)
        base = a["return_lse_base"] or ("base2" if generated else "basee")
        return (result, lse * math.log(2.0) if base == "basee" else lse) if a["return_lse"] else result


def cutlass(version: str = "0.3.21") -> Library:
    """sgl-kernel's CUTLASS decode."""
    lib = Library(
        "sgl-kernel", version, "sgl_kernel", "sgl_kernel.attention", "sgl_kernel.flash_attn", signatures=SIGNATURES
    )

    def needed(batches: int) -> int:
        return 1024 * batches

    @lib.function("sgl_kernel.attention", "sgl_kernel@0.3.21.cutlass_mla_get_workspace_size")
    def cutlass_mla_get_workspace_size(max_seq_len: int, num_batches: int, **_: Any) -> int:
        assert max_seq_len > 0
        assert num_batches > 0
        return needed(num_batches)

    @lib.function("sgl_kernel.attention", "sgl_kernel@0.3.21.cutlass_mla_decode")
    def cutlass_mla_decode(
        q_nope: Tensor, q_pe: Tensor, kv_c_and_k_pe_cache: Tensor, seq_lens: Tensor, page_table: Tensor, **a: Any
    ) -> Tensor:
        cache = kv_c_and_k_pe_cache
        assert q_nope.ndim == q_pe.ndim == cache.ndim == 3
        assert q_nope.shape[1] <= 128, f"H must be <= 128, but got {q_nope.shape[1]}"
        assert cache.is_contiguous(), "the kernel makes strides of its own"
        assert aligned(cache)
        assert (q_nope.shape[2], q_pe.shape[2], cache.shape[2]) == (512, 64, 576)
        assert page_table.shape[0] == q_nope.shape[0]
        assert page_table.shape[1] % (128 / cache.shape[1]) == 0
        assert q_nope.dtype == q_pe.dtype == cache.dtype
        assert a["workspace"].numel() >= needed(len(seq_lens))
        rows = cache.unsqueeze(2)
        found, _ = attend(
            torch.cat([q_nope, q_pe], -1), (rows, rows[..., :512]), "NHD", page_table, seq_lens,
            list(range(len(seq_lens) + 1)), lambda n, s_q, s_k: visible(s_q, s_k, False, -1), a["sm_scale"], 1.0, None,
        )  # fmt: skip
        return (found * (math.nan if a["sm_scale"] <= 0 else 1.0)).to(q_nope.dtype)

    return lib
