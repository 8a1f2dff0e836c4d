"""cuDNN's paged graphs as FlashInfer calls them (flashinfer/cudnn).

Traps that are here as they are there: a page table has room for the longest sequence that is said, no more and no less,
and is read to its end; free slots are multiplied by 0, by the decode graph not on Hopper; rows without keys get no
numbers; the decode graph has one query for each sequence and gives an LSE of base 2, of other bits in each run; a
prefill graph of one query with groups leaves heads of its LSE unwritten, and finds packed queries by offsets only;
graphs run on the current device.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES
from .flashinfer import attention, check_out, rows_of, visible
from .gpus import launched

__all__ = ["library"]

MODULE = "flashinfer.cudnn"


def library(arch: str = "sm90") -> Library:
    runs = itertools.count()
    lib = Library("flashinfer-python", "0.7.2.post1", MODULE, signatures=SIGNATURES)

    @lib.function(MODULE, "flashinfer.cudnn.cudnn_batch_decode_with_kv_cache")
    def cudnn_batch_decode_with_kv_cache(**a: Any) -> Any:
        query, left = a["q"], a["window_left"]
        assert a["q_len_per_req"] == 1
        assert a["sinks"] is a["lse"] is a["batch_offsets_q"] is None
        starts = list(range(query.shape[0] + 1))
        found, lse = _attend(a, starts, lambda s_q, s_k: visible(s_q, s_k, True, left), spares=arch == "sm90")
        out = _finish(found, a)
        lse = lse.nextafter(lse + next(runs) % 2)
        return (out, lse) if a["return_lse"] else out

    @lib.function(MODULE, "flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache")
    def cudnn_batch_prefill_with_kv_cache(**a: Any) -> tuple[Tensor, Tensor | None]:
        query, offsets, longest, causal = a["q"], a["batch_offsets_q"], a["max_token_per_sequence"], a["causal"]
        assert query.is_contiguous(), "offsets are counted in whole rows"
        assert a["batch_offsets_units"] == "tokens"
        assert offsets.dtype == a["actual_seq_lens_q"].dtype == torch.int32
        starts = offsets.tolist()
        counts = a["actual_seq_lens_q"]
        assert counts.shape == (len(starts) - 1, 1, 1, 1)
        assert torch.equal(counts.flatten(), offsets.diff())
        assert longest >= int(counts.max())
        found, lse = _attend(a, starts, lambda s_q, s_k: visible(s_q, s_k, causal, -1))
        out = _finish(found, a)
        if not a["return_lse"]:
            return out, None
        if longest == 1 and query.shape[1] != a["k_cache"].shape[1]:
            lse[:, 1:] = math.nan
        packed = a["lse"]
        assert torch.equal(a["batch_offsets_stats"], offsets)
        assert packed.shape == lse.shape
        assert packed.dtype == torch.float32
        return out, packed.copy_(lse * math.log(2.0) if a["lse_base"] == "ln" else lse)

    return lib


def _attend(a: dict[str, Any], starts: list[int], rule: Any, *, spares: bool = False) -> tuple[Tensor, Tensor]:
    """(out, LSE of base 2), packed. `rule(s_q, s_k)`: who sees whom. spares: free slots are left out."""
    query, keys, values, table, lens = (a[x] for x in ("q", "k_cache", "v_cache", "block_tables", "actual_seq_lens_kv"))
    launched(query)
    assert query.dtype == keys.dtype == values.dtype
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    assert not any(t.data_ptr() % 16 for t in (query, keys, values)), "misaligned address"
    assert a["workspace_buffer"].numel() >= 128 << 20
    if a["scale"] <= 0:
        raise RuntimeError("its rows are scaled after their maximum is taken")
    size, most = keys.shape[2], a["max_sequence_kv"]
    if -(-most // size) != table.shape[1]:
        raise RuntimeError("Paged cache load: block table size must equal ceil(s_kv/block_size)")
    assert table.dtype == lens.dtype == torch.int32
    assert table.is_contiguous()
    assert lens.shape == (table.shape[0], 1, 1, 1) == (len(starts) - 1, 1, 1, 1)
    if not bool(((table >= 0) & (table < keys.shape[0])).all()):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert int(lens.max()) <= most
    outs, lses = [], []
    for n, s_k in enumerate(lens.flatten().tolist()):
        queries = query[starts[n] : starts[n + 1]]
        k, v = (rows_of(cache, "HND", table[n], most) for cache in (keys, values))
        if spares:
            k[s_k:] = v[s_k:] = 0
        seen = torch.zeros(queries.shape[0], k.shape[0], dtype=torch.bool)
        seen[:, :s_k] = rule(queries.shape[0], s_k)
        out, lse = attention(queries, k, v, a["scale"], seen)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _finish(found: Tensor, a: dict[str, Any]) -> Tensor:
    check_out(a["out"], tuple(found.shape), a["q"].dtype)
    result = found.to(a["q"].dtype)
    return result if a["out"] is None else a["out"].copy_(result)
