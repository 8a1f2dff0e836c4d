"""AITER 0.1.7 (PyPI) and 0.1.20 as their sources describe them, on one chip.

aiter/ops/mha.py (which kernels are chosen, what they are not given), csrc/py_itfs_ck/*.cu (checks), Composable Kernel's
block_fmha_batch_prefill_pipeline_qr_ks_vs_async.hpp (what is read past the end), aiter/mla.py and
csrc/py_itfs_cu/asm_mla.cu with hsa/*/mla/mla_asm.csv, aiter/ops/triton/**/unified_attention.py, **/fav3_sage.py.

Assembly is chosen here for any number of queries, not from 129 on, so that small cases meet it. What a source leaves
open is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES
from .attention import Rule, attend, check, check_tensors, differentiate, parts

__all__ = ["library"]

TILE = 128
"""Keys of a tile of Composable Kernel."""
LATENT_HEADS = {"0.1.7": (16, 128), "gfx942": (8, 16, 32, 128), "gfx950": (8, 16, 32, 64, 128)}
UNIFIED = {"0.1.7": "aiter.ops.triton.unified_attention", "0.1.20": "aiter.ops.triton.attention.unified_attention"}


def library(version: str = "0.1.20", arch: str = "gfx942", *, ck: bool = True) -> Library:
    modules = ("aiter.ops.mha", "aiter.mla", "aiter.jit.core", UNIFIED[version])
    published = {"0.1.7": "0.1.7.post2.dev18", "0.1.20": "0.1.20"}[version]
    lib = Library("amd-aiter", published, *modules, signatures=SIGNATURES)
    if version != "0.1.7":
        lib.add("aiter.jit.core", ENABLE_CK=ck)
    _mha(lib, version, ck=ck)
    _batch_prefill(lib, version)
    _mla(lib, version, arch)
    _unified(lib, version, arch)
    if version != "0.1.7":
        _sage(lib, arch)
    return lib


def _scale(a: dict[str, Any]) -> float:
    scale = a["softmax_scale"]
    return a["q"].shape[-1] ** -0.5 if scale is None else float(scale)


def _result(a: dict[str, Any], out: Tensor, lse: Tensor) -> Any:
    return (out, lse) if a["return_lse"] else out


# -------------------------------------------------------------------------------------------------- dense and packed


def _mha(lib: Library, version: str, *, ck: bool) -> None:
    module, keys = "aiter.ops.mha", f"aiter@{version}"

    def forward(a: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """One sequence of a batch whose longest has `longest` keys, by assembly or Composable Kernel."""
        softcap, sink = a.get("logits_soft_cap", 0.0), a.get("sink_ptr")
        left, right = (-1 if bound >= longest else bound for bound in a["window_size"][:2])
        assembly = q.dtype == torch.bfloat16 and (q.shape[-1], v.shape[-1]) in ((128, 128), (192, 128))
        assembly &= a["alibi_slopes"] is None and not a["dropout_p"] and not (left > 0 or right > 0)
        assembly &= version == "0.1.7" or not softcap
        if not ck:
            softcap = 0.0
        elif assembly:
            # It is not given them.
            left, right, softcap, sink = -1, -1, 0.0, None
        if a["alibi_slopes"] is not None:
            assert a["alibi_slopes"].dtype == torch.float32
            assert not a["alibi_slopes"].any(), "a bias, which polyattn does not ask for"
        rule = Rule(_scale(a), a["causal"], (left, right), softcap, a["dropout_p"])
        out, lse = attend(q, k, v, rule, sink)
        if assembly:
            blank = lse == -torch.inf
            out, lse = out.masked_fill(blank.T[..., None], torch.nan), lse.masked_fill(blank, torch.nan)
        return out.to(q.dtype), lse

    def asks_for_what_autograd_needs(a: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and any(a[name].requires_grad for name in "qkv"):
            assert a["return_lse"], "return_lse"

    @lib.function(module, f"{keys}.flash_attn_func")
    def flash_attn_func(**a: Any) -> Any:
        check_tensors(a["q"], a["k"], a["v"])
        asks_for_what_autograd_needs(a)
        longest = a["k"].shape[1]
        found = [forward(a, *sequence, longest) for sequence in zip(a["q"], a["k"], a["v"], strict=True)]
        return _result(a, torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found]))

    @lib.function(module, f"{keys}.flash_attn_varlen_func")
    def flash_attn_varlen_func(**a: Any) -> Any:
        check_tensors(a["q"], a["k"], a["v"])
        asks_for_what_autograd_needs(a)
        check(isinstance(a["max_seqlen_q"], int) and isinstance(a["max_seqlen_k"], int), "max_seqlen must be int")
        where = parts(a["cu_seqlens_q"], a["cu_seqlens_k"])
        found = [forward(a, a["q"][x], a["k"][y], a["v"][y], a["max_seqlen_k"]) for x, y in where]
        out, lse = torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], -1)
        if a["out"] is not None:
            check(a["out"].stride(-1) == 1 and a["out"].dtype == out.dtype, "Output tensor")
            out = a["out"].copy_(out)
        return _result(a, out, lse)

    def gradients(a: dict[str, Any], where: list[tuple[Any, Any]], join: Any) -> Tensor:
        check_tensors(a["q"], a["k"], a["v"], a["out"], a["dout"])
        lse = a["softmax_lse"]
        check(lse.is_contiguous() and lse.dtype == torch.float32, "softmax_lse must be contiguous and float32")
        assert isinstance(a["deterministic"], bool)
        longest = a.get("max_seqlen_k", a["k"].shape[1])
        bounds = (a["window_size_left"], a["window_size_right"])
        left, right = (-1 if bound >= longest else bound for bound in bounds)
        d = a["q"].shape[-1]
        assembly = a["alibi_slopes"] is None and not a["deterministic"] and not (left > 0 or right > 0)
        assembly &= 64 <= d <= 192 and d == a["v"].shape[-1]
        rule = Rule(_scale(a), a["causal"], (-1, -1) if assembly else (left, right))
        found = []
        for x, y in where:
            heads = lse[x] if join is torch.stack else lse[:, x]
            assert not assembly or not bool((heads == -torch.inf).any()), "assembly, of a row without keys"
            found.append(differentiate(a["dout"][x], a["q"][x], a["k"][y], a["v"][y], a["out"][x], heads, rule))
        for name, side in zip(("dq", "dk", "dv"), zip(*found, strict=True), strict=True):
            a[name].copy_(join(side))
        return lse

    @lib.function(module, f"{keys}._flash_attn_backward")
    def _flash_attn_backward(**a: Any) -> Tensor:
        assert a["bias"] is None
        assert a["dbias"] is None
        return gradients(a, [(i, i) for i in range(a["q"].shape[0])], torch.stack)

    @lib.function(module, f"{keys}._flash_attn_varlen_backward")
    def _flash_attn_varlen_backward(**a: Any) -> Tensor:
        return gradients(a, list(parts(a["cu_seqlens_q"], a["cu_seqlens_k"])), torch.cat)


# ---------------------------------------------------------------------------------------------------------- on pages


def _batch_prefill(lib: Library, version: str) -> None:
    @lib.function("aiter.ops.mha", f"aiter@{version}.mha_batch_prefill_func")
    def mha_batch_prefill_func(**a: Any) -> Any:
        q, k, v, indptr, indices = a["q"], a["k"], a["v"], a["kv_indptr"], a["kv_page_indices"]
        check_tensors(q, k, v)
        check(k.dim() == v.dim() == 3, "3D K/V tensors are pages of one token")
        check(indptr.dtype == indices.dtype == torch.int32, "kv_indptr and kv_page_indices must have dtype int32")
        for cache in (k, v):
            check(cache.stride(1) >= cache.shape[2], "K head stride must be >= head_dim")
            check(cache.stride(0) >= cache.shape[1] * cache.stride(1), "K batch stride must be >= num_heads * stride")
            check(not (cache.stride(0) % 8 or cache.stride(1) % 8), "strides must be a multiple of vector size")
        sink = a.get("sink_ptr")
        bounds = [-1 if bound >= a["max_seqlen_k"] else bound for bound in a["window_size"]]
        rule = Rule(_scale(a), a["causal"], (bounds[0], bounds[1]), a["logits_soft_cap"])
        outs, lses = [], []
        for x, y in parts(a["cu_seqlens_q"], indptr):
            assert y.stop - y.start <= a["max_seqlen_k"]
            read = y.start - (y.start - y.stop) // TILE * TILE
            check(read <= indices.shape[0], "Memory access fault by GPU node-1")
            tokens = indices[y.start : read].long()
            check(bool((tokens >= 0).all() and (tokens < k.shape[0]).all()), "Memory access fault by GPU node-1")
            out, lse = attend(q[x], k[tokens[: y.stop - y.start]], v[tokens], rule, sink)
            outs.append(out.to(q.dtype))
            lses.append(lse)
        out = torch.cat(outs) if a["out"] is None else a["out"].copy_(torch.cat(outs))
        return _result(a, out, torch.cat(lses, -1))


def _unified(lib: Library, version: str, arch: str) -> None:
    e4m3 = torch.float8_e4m3fn if arch in ("gfx950", "gfx1200", "gfx1201", "gfx1250") else torch.float8_e4m3fnuz

    @lib.function(UNIFIED[version], f"aiter@{version}.triton.unified_attention")
    def unified_attention(**a: Any) -> Tensor:
        q, k, v, out, starts, lengths = (a[n] for n in ("q", "k", "v", "out", "cu_seqlens_q", "seqused_k"))
        assert a["causal"], "Only causal attention is supported"
        assert a["q_descale"] is None
        assert a["alibi_slopes"] is None
        assert a["qq_bias"] is None
        assert k.dtype in (torch.float16, torch.bfloat16, e4m3), f"kv_cache_dtype only supports {e4m3}"
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
        size = k.shape[1]
        assert not size & (size - 1), "TILE_SIZE needs to be divisible by block_size"
        assert q.shape[2] == k.shape[3] == v.shape[3]
        table = a["block_table"]
        assert table.stride(-1) == 1
        assert table.dtype == lengths.dtype == starts.dtype == torch.int32
        scales = [1.0 if a[n] is None else float(a[n]) for n in ("k_descale", "v_descale")]
        assert (a["k_descale"] is None) == (k.dtype != e4m3) or version != "0.1.7"
        rule = Rule(a["softmax_scale"], True, (a["window_size"][0], -1), a["softcap"])
        # Which of its two kernels is taken depends on the batch: a tile of one of them is such a page.
        unmasked = size <= 64 or (version == "0.1.7" and a["max_seqlen_q"] == 1)
        first = list(range(lengths.shape[0] + 1)) if a["max_seqlen_q"] == 1 else starts.tolist()
        for i, length in enumerate(lengths.tolist()):
            rows = slice(first[i], first[i + 1])
            if not length:
                out[rows] = torch.nan
                continue
            pages = table[i, : -(-length // size)].long()
            keys, values = (cache[pages].flatten(0, 1).float() * s for cache, s in zip((k, v), scales, strict=True))
            found, _ = attend(q[rows], keys[:length], values if unmasked else values[:length], rule, a["sinks"])
            out[rows] = found.to(out.dtype)
        return out


# ------------------------------------------------------------------------------------------------------------ latent


def _mla(lib: Library, version: str, arch: str) -> None:
    def rows(a: dict[str, Any], y: slice) -> Tensor:
        return a["kv_buffer"][a["kv_indices"][y].long(), 0]

    def checked(a: dict[str, Any], heads: tuple[int, ...]) -> Rule:
        q, kv, o = a["q"], a["kv_buffer"], a["o"]
        check(q.is_contiguous() and o.is_contiguous(), "only support Q.is_contiguous() for now")
        check(q.dtype == kv.dtype == torch.bfloat16, "unsupport Q dtype")
        check(kv.shape[1:] == (1, 1, 576) and o.shape[2] == 512, "only support head_size == KV.size(3) for now")
        check(q.shape[1] in heads, f"cannot get heuristic kernel! gqa:{q.shape[1]}")
        check(a["kv_indices"].dtype == a["kv_indptr"].dtype == torch.int32, "int32")
        check(bool((a["kv_last_page_lens"] == 1).all()), "pages of one token")
        assert a["logit_cap"] <= 0
        return Rule(576**-0.5 if a["sm_scale"] is None else a["sm_scale"], True)

    @lib.function("aiter.mla", f"aiter@{version}.mla.mla_decode_fwd")
    def mla_decode_fwd(**a: Any) -> tuple[Tensor, Tensor]:
        rule = checked(a, LATENT_HEADS[version if version == "0.1.7" else arch])
        assert a["work_meta_data"] is None
        assert a.get("page_size", 1) == a.get("nhead_kv", 1) == 1
        check(a["max_seqlen_q"] == 1, "several queries: not how polyattn calls it")
        splits = a["num_kv_splits"]
        assert a["num_kv_splits_indptr"].tolist() == list(range(0, splits * a["kv_indptr"].shape[0], splits))
        lse = a["q"].new_empty(a["q"].shape[:2], dtype=torch.float32)
        for x, y in parts(a["qo_indptr"], a["kv_indptr"]):
            check(x.stop - x.start == 1, "max_seqlen_q")
            keys = rows(a, y)
            out, found = attend(a["q"][x], keys, keys[..., :512], rule)
            # The second stage divides by the sum of no weights; with one split it reads what the first did not write.
            a["o"][x] = out.to(a["o"].dtype) if keys.shape[0] and splits > 1 else torch.nan
            lse[x] = found.T if splits > 1 else torch.nan
        partial = torch.full((a["q"].shape[0], splits, a["q"].shape[1], 512), torch.nan)
        return partial, lse if a.get("return_lse") else torch.full_like(lse, torch.nan)

    @lib.function("aiter.mla", f"aiter@{version}.mla.mla_prefill_fwd")
    def mla_prefill_fwd(**a: Any) -> tuple[Tensor, Tensor]:
        rule = checked(a, (16, 128))
        for x, y in parts(a["qo_indptr"], a["kv_indptr"]):
            keys = rows(a, y)
            out, lse = attend(a["q"][x], keys, keys[..., :512], rule)
            a["o"][x] = out.masked_fill((lse == -torch.inf).T[..., None], torch.nan).to(a["o"].dtype)
        return a["o"], torch.full((a["q"].shape[0], 1, a["q"].shape[1], 1), torch.nan)


# -------------------------------------------------------------------------------------------------------------- sage


def _sage(lib: Library, arch: str) -> None:
    module = "aiter.ops.triton.attention.fav3_sage"
    e4m3 = torch.float8_e4m3fn if arch == "gfx950" else torch.float8_e4m3fnuz

    def int8(t: Tensor, block: int) -> Tensor:
        """[S, H, D] rounded to 255 steps for each block of rows and head."""
        found = []
        for rows in t.float().split(block):
            scale = rows.abs().amax((0, 2), keepdim=True).clamp(min=1e-8) / 127
            found.append((rows / scale).round() * scale)
        return torch.cat(found)

    @lib.function(module, "aiter@0.1.20.triton.fav3_sage_wrapper_func")
    def fav3_sage_wrapper_func(**a: Any) -> Any:
        assert a["window_size"] == (-1, -1)
        assert a["layout"] in ("bshd", "bhsd")
        assert a["smooth_k"]
        swapped = a["layout"] == "bhsd"
        q, k, v = (t.transpose(1, 2) if swapped else t for t in (a["q"], a["k"], a["v"]))
        rule = Rule(a["softmax_scale"] or q.shape[-1] ** -0.5, a["causal"])
        outs, lses = [], []
        for one_q, one_k, one_v in zip(q, k, v, strict=True):
            mean = one_k.float().mean(0)
            keys = int8(one_k.float() - mean, 128)
            top = one_v.float().abs().amax(0).clamp(min=1e-8) / torch.finfo(e4m3).max
            values = (one_v.float() / top).to(e4m3).float() * top
            out, lse = attend(int8(one_q, 256), keys, values, rule)
            group = one_q.shape[1] // one_k.shape[1]
            delta = torch.einsum("qhd,hd->hq", one_q.float(), mean.repeat_interleave(group, 0)) * rule.scale
            outs.append(out.bfloat16())
            lses.append(lse + delta)
        out = torch.stack(outs)
        out = out.transpose(1, 2).contiguous() if swapped else out
        return (out, torch.stack(lses)) if a["return_lse"] else out
