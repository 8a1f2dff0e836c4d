"""npu_fused_infer_attention_score_v2, from op-plugin 517f2e7: docs/zh/custom_APIs/torch_npu/
torch_npu-npu_fused_infer_attention_score_v2.md (its sections are named below) and
op_plugin/ops/opapi/FusedInferAttentionScoreV2KernelNpuOpApi.cpp (layouts, shapes of the results).

Traps that are in here: scale 1.0 unless told; True hides; host numbers; with a page table the keys of packed queries
are counted for each sequence, the queries as running sums; a single query ignores modes and bands; rows of padding and
of sequences without keys are not written; a page is read as far as its sequence goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from .arithmetic import attend, check, hidden, scores

__all__ = ["register"]

MODULE = "torch_npu"
_UNUSED = (
    *("pse_shift", "dequant_scale_query", "dequant_scale_key", "dequant_offset_key", "dequant_scale_value"),
    *("dequant_offset_value", "dequant_scale_key_rope", "quant_scale_out", "quant_offset_out", "quant_scale_p"),
    "learnable_sink",
)
_RANK = {"BSND": 4, "BNSD": 4, "TND": 3}


def register(lib: Library) -> None:
    """The operator, as a member of a library. Over pages, without quantisation."""

    @lib.function(MODULE, "torch_npu.npu_fused_infer_attention_score_v2")
    def npu_fused_infer_attention_score_v2(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_rope: Tensor | None,
        key_rope: Tensor | None,
        input_layout: str,
        return_softmax_lse: bool,
        **given: Any,
    ) -> tuple[Tensor, Tensor]:
        assert all(given[name] is None for name in _UNUSED)
        check(input_layout in _RANK, f"layout only support BSH, BSND, TND, ..., but got {input_layout}")
        check(query.dim() == _RANK[input_layout], "query's dim should be consistent with that of Layout")
        held = (query, key, value, query_rope, key_rope, given["block_table"])
        check(all(t is None or t.is_contiguous() for t in held), "non-contiguous tensors are not supported")
        check(query.dtype in (torch.float16, torch.bfloat16), "float16 or bfloat16")
        check(key.dtype == value.dtype == query.dtype, "one dtype")
        check((query_rope is None) == (key_rope is None), "query_rope and key_rope go together")
        packed, latent = input_layout == "TND", query_rope is not None
        axis = 2 if input_layout == "BSND" else 1
        heads, kv_heads = given["num_query_heads"], given["num_key_value_heads"] or given["num_query_heads"]
        check(query.shape[axis] == heads <= 256 and heads % kv_heads == 0, "num_query_heads")
        counts = _counts(given["actual_seq_qlen"], packed)
        check(not packed or sum(counts) == query.shape[0], "actual_seq_qlen are running sums that end with T")
        check(not packed or len(counts) <= 4096, "at most 4096 sequences")
        check(packed or len(counts) == query.shape[0], "actual_seq_qlen has one number for each sequence")
        rows = max(counts) if packed else query.shape[2 if input_layout == "BNSD" else 1]
        check(all(count <= rows for count in counts), "actual_seq_qlen is at most the S of query")
        dims = (query.shape[-1], _width(key, kv_heads), _width(value, kv_heads))
        if latent:
            _check_latent(query, query_rope, key_rope, dims, heads, kv_heads, input_layout, given)
        else:
            check(heads // kv_heads <= 64, "num_query_heads / num_key_value_heads is at most 64")
            _check_plain(key, dims, heads == kv_heads, kv_heads, rows, input_layout, given)
        keys = _keys(given, key, len(counts))
        check(not (return_softmax_lse and latent), "MLA, D = 512: no softmax_lse")
        out = query.new_full((*query.shape[:-1], dims[2]), torch.nan)
        lse = query.new_full(query.shape[:-1], torch.nan, dtype=torch.float32)
        first = 0
        for n, (count, length) in enumerate(zip(counts, keys, strict=True)):
            where = (slice(first, first + count),) if packed else (n,)
            first += count
            if not (count and length):
                continue
            sides = [_gathered(t, given["block_table"][n], length, kv_heads) for t in (key, value)]
            own = [query[where]]
            if query_rope is not None and key_rope is not None:
                sides[0] = torch.cat([sides[0], _gathered(key_rope, given["block_table"][n], length, 1)], -1)
                own.append(query_rope[where])
            q = torch.cat(own, -1)
            q = (q if input_layout == "BNSD" else q.transpose(0, 1))[None, :, :count]
            logits = scores(q, sides[0], given["softmax_scale"])
            unseen = _unseen(given, n, count, length, single=rows == 1 and not latent)
            repaired = given["inner_precise"] >= 2 or (given["sparse_mode"] == 3 and count > length)
            found = attend(logits, sides[1], unseen, repaired=repaired, rounded=query.dtype)
            result, statistic = found.out[0], (found.top + found.total.log())[0]
            if input_layout == "BNSD":
                out[n, :, :count], lse[n, :, :count] = result, statistic
            else:
                own_rows = where if packed else (n, slice(0, count))
                out[own_rows], lse[own_rows] = result.transpose(0, 1), statistic.transpose(0, 1)
        if not return_softmax_lse:
            return out, lse.new_zeros(1)
        return out, (lse.transpose(1, 2) if input_layout == "BSND" else lse).unsqueeze(-1).contiguous()


def _counts(lens: list[int] | None, packed: bool) -> list[int]:
    check(bool(lens), "actual_seq_qlen must be given")
    assert lens is not None
    if not packed:
        return list(lens)
    check(list(lens) == sorted(lens) and lens[0] >= 0, "actual_seq_qlen of TND: running sums")
    return [end - start for start, end in zip([0, *lens], lens, strict=False)]


def _keys(given: dict[str, Any], key: Tensor, sequences: int) -> list[int]:
    """ "Page attention": lengths of each sequence, never running sums; the table has their pages."""
    lens, table, size = given["actual_seq_kvlen"], given["block_table"], given["block_size"]
    check(table is not None, "only paged caches are emulated")
    check(lens is not None and len(lens) == sequences, "page attention: actual_seq_kvlen of each sequence")
    check(table.dim() == 2 and table.dtype == torch.int32 and table.shape[0] == sequences, "block_table [B, pages]")
    check(table.shape[1] * size >= max(lens), "block_table has too few columns")
    check(key.numel() < 2**31, "key and value: fewer than 2**31 elements")
    check(size == (key.shape[2] if key.dim() == 4 else key.shape[1]), "block_size is that of the cache")
    return list(lens)


def _width(cache: Tensor, kv_heads: int) -> int:
    return cache.shape[-1] if cache.dim() == 4 else cache.shape[-1] // kv_heads


def _check_plain(
    key: Tensor, dims: tuple[int, int, int], mha: bool, kv_heads: int, rows: int, layout: str, given: dict[str, Any]
) -> None:
    """Sections "Q_S > 1", "Q_S = 1", and of packed queries "TND ... when D is not 512"."""
    size = given["block_size"]
    check(dims[0] == dims[1] and all(d % 16 == 0 and d <= 512 for d in dims), "D is a multiple of 16 up to 512")
    check(key.dim() in (3, 4), "when Page Attention enabled, value's dim should be 3/4/5")
    check(key.dim() == 4 or kv_heads * dims[1] <= 65535, "KV_N * D of (blocks, block_size, H) is at most 65535")
    check(key.dim() == 3 or layout in ("BNSD", "TND"), "(blocks, KV_N, block_size, D) goes with BNSD and TND only")
    if layout == "TND":
        check(size % 16 == 0 and size <= 1024, "block_size")
        wide = dims[0] == 192 and dims[2] == 128
        same = dims[0] == dims[2] and (dims[0] == 128 or (mha and dims[0] == 64))
        check(wide or same, "TND: D = 128, or 192 with 128, or 64 without GQA")
        if mha:
            check(key.dim() == 3, "TND without GQA: the cache is (blocks, block_size, H)")
            check(given["inner_precise"] in ((0, 1) if key.dtype == torch.float16 else (0,)), "inner_precise")
            check(given["sparse_mode"] in (3, 4) or given["atten_mask"] is None, "TND without GQA: modes 0, 3, 4")
        return
    check(dims[0] == dims[2], "padded queries: widths of key and value are not said to differ over pages")
    if rows == 1:
        check(given["inner_precise"] in (0, 1), "Q_S = 1: inner_precise is 0 or 1")
        check(size % 16 == 0 and size <= 512, "Q_S = 1: block_size")
    else:
        check(size in (128, 256, 384, 512), "Q_S > 1: block_size is 128 to 512, a multiple of 128")


def _check_latent(
    query: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    dims: tuple[int, int, int],
    heads: int,
    kv_heads: int,
    layout: str,
    given: dict[str, Any],
) -> None:
    """Section "MLA", D = 512."""
    assert query_rope is not None
    assert key_rope is not None
    check(dims == (512, 512, 512), "query_rope: D is 512 (128 is not emulated)")
    check(query_rope.shape == (*query.shape[:-1], 64) and key_rope.shape[-1] == 64, "the rope part has D = 64")
    check(heads in (1, 2, 4, 8, 16, 32, 64, 128) and kv_heads == 1, "N is a power of two up to 128, KV_N is 1")
    check(given["sparse_mode"] in (0, 3, 4), "D = 512: modes 0, 3, 4 (and 9)")
    check(given["sparse_mode"] == 0 or given["atten_mask"] is not None, "modes 3 and 4 want their mask")
    check(given["block_size"] % 16 == 0 and given["block_size"] <= 1024, "block_size")
    check(layout == "TND", "only packed queries are emulated")


def _gathered(cache: Tensor, pages: Tensor, length: int, kv_heads: int) -> Tensor:
    """[1, KV_N, length, D]"""
    size = cache.shape[2] if cache.dim() == 4 else cache.shape[1]
    own = cache[pages[: -(-length // size)].long()]
    own = own.transpose(1, 2) if cache.dim() == 4 else own.unflatten(2, (kv_heads, -1))
    return own.flatten(0, 1)[:length].transpose(0, 1)[None]


def _unseen(given: dict[str, Any], n: int, count: int, length: int, *, single: bool) -> Tensor | None:
    mask, mode = given["atten_mask"], given["sparse_mode"]
    if single and mask is not None:
        # "Q_S = 1": sparse_mode, pre_tokens and next_tokens have no effect, a mask of its own has.
        if mode in (2, 3, 4):
            return None
        columns = given["block_table"].shape[1] * given["block_size"]
        check(mask.dim() == 4 and mask.shape[1:3] == (1, 1), "atten_mask of one query is (B, 1, 1, KV_S)")
        check(mask.shape[3] >= columns, "KV_S of a mask is at least that of the table")
        return mask[n, 0, :, :length].bool()
    return hidden(mode, mask, given["pre_tokens"], given["next_tokens"], count, length)
