"""Family `paged` by cuDNN's graphs, which FlashInfer builds and keeps: one for steps with one query of each sequence
(flashinfer/cudnn/decode.py), one for the rest (prefill.py).

A graph knows the shapes of a call, the strides of its caches and the longest that a sequence may be, which must be what
the page table has room for; lengths and pages are read on the device. The decode graph gives an LSE of base 2, the
other one whichever is asked for. On an H200 the decode graph leaves free slots out, which the other one multiplies by
0, and its last bits differ from run to run, most often those of the LSE; the other one's do not. Without cuDNN's front
end FlashInfer would run other kernels, bfloat16 ones, which is why both are required.

Graphs are built and run on the current device, wherever their tensors are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import align16, append_new_kv, empty_result, load, without_free_slots
from polyattn.contract import AttentionRequest, Bound, PagedTables
from polyattn.semantics.packed import per_token
from polyattn.semantics.paged_kv import Tokens, owned

from ..devices import current_for
from ..records.common import HOPPER
from ..records.flashinfer_cudnn import FLASHINFER_CUDNN
from .results import delivered, natural, writable
from .scales import readable, scale_of

__all__ = ["CuDNN"]

WORKSPACE = 128 << 20
"""Bytes, what FlashInfer recommends. It need not be zero, so each call takes its own from torch's allocator."""
STEP = 2048
"""Keys: a graph serves until the longest sequence outgrows a multiple of it; of queries, the next power of two."""
PREFILL_AT_LEAST = 2
"""Queries that a prefill graph is told of: for one, with groups, it leaves heads of the LSE unwritten (NVIDIA's bug
6783545, flashinfer/prefill.py)."""


class CuDNN:
    """Binds paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        return Bound(_Call(request).forward)


class _Call:
    """Everything of a request that is no tensor."""

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        self.scale, self.factor = scale_of(request)
        self.exposed = dict(request.options).get("free_slots", "any") != "finite"
        self.spares = request.arch in HOPPER
        self.decode = load(
            FLASHINFER_CUDNN,
            "flashinfer.cudnn:cudnn_batch_decode_with_kv_cache",
            {"return_lse": "an LSE", "window_left": "a window"},
        )
        self.prefill = load(
            FLASHINFER_CUDNN,
            "flashinfer.cudnn:cudnn_batch_prefill_with_kv_cache",
            {"batch_offsets_units": "lengths in tokens", "lse_base": "a natural LSE"},
        )

    def forward(
        self,
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: None = None,
        sinks: None = None,
        k_scale: None = None,
        v_scale: None = None,
        out: Tensor | None = None,
    ) -> Any:
        """`polyattn.contract.PagedForward`."""
        r = self.request
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(r, query, out)
        if key is not None:
            caches, tables = append_new_kv(r, query, caches, tables, key, value)
        longest, max_seqlen_q = -(-tables.max_seqlen_k // STEP) * STEP, tables.max_seqlen_q
        tables = tables.changed(max_seqlen_k=longest)
        one = max_seqlen_q == 1 and not r.deterministic
        if one and query.shape[0] != tables.seq_lens.shape[0]:
            # One row for each query, whose own starts nobody reads from here on.
            rows = per_token(query.shape[0], tables.cu_seqlens_q, tables.page_table, tables.seq_lens)
            tables = tables.changed(page_table=rows[0], seq_lens=rows[1])
        if self.exposed and not (one and self.spares):
            caches, tables = without_free_slots(r, caches, tables)
        pages, seq_lens = owned(tables, r.page_size), tables.seq_lens
        table = torch.nn.functional.pad(pages.int(), (0, -(-longest // r.page_size) - pages.shape[1]))
        keys, values = (align16(cache if r.kv_layout == "HND" else cache.transpose(1, 2)) for cache in caches)
        given: dict[str, Any] = {
            "q": readable(query, self.factor),
            "k_cache": keys,
            "v_cache": values,
            "scale": self.scale,
            "workspace_buffer": torch.empty(WORKSPACE, dtype=torch.uint8, device=query.device),
            "max_sequence_kv": table.shape[1] * r.page_size,
            "actual_seq_lens_kv": seq_lens.reshape(-1, 1, 1, 1),
            "block_tables": table,
            "return_lse": r.lse,
            "out": writable(out),
        }
        if one:
            with current_for(query):
                found = self.decode(window_left=r.window[0], **given)
            found, lse = found if r.lse else (found, None)
            return delivered(r, found, natural(lse), seq_lens > 0, None, out)
        tokens = Tokens.of(query, tables)
        # The offsets of sequences are made of whole rows.
        given["q"], starts = given["q"].contiguous(), tables.cu_seqlens_q.contiguous()
        if r.lse:
            given["lse"] = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            given |= {"batch_offsets_stats": starts, "lse_base": "ln"}
        causal = r.causal != "none"
        with current_for(query):
            found, lse = self.prefill(
                causal=causal,
                max_token_per_sequence=max(1 << (max_seqlen_q - 1).bit_length(), PREFILL_AT_LEAST),
                actual_seq_lens_q=starts.diff().reshape(-1, 1, 1, 1),
                batch_offsets_q=starts,
                batch_offsets_units="tokens",
                **given,
            )
        return delivered(r, found, lse, tokens.real if causal else seq_lens[tokens.sequence] > 0, None, out)
