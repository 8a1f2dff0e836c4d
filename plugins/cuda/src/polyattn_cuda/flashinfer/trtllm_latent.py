"""Family `mla` on data-centre Blackwell: TensorRT-LLM's generated kernels, and those in CuTe DSL, both by FlashInfer.

One entry serves decode, drafts and extends. Its queries are causal among themselves, its output is bfloat16, and its
default scale is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import align16, empty_result, load
from polyattn.contract import AttentionRequest, Bound, KVPart, PagedTables, Session, Slot
from polyattn.semantics.kv_quant import stored
from polyattn.semantics.packed import sequence_ids

from ..records.flashinfer import FLASHINFER_MLA_LIBRARY
from .memory import WORKSPACE, workspace_of
from .results import delivered, writable
from .scales import scale_of

__all__ = ["CuteDSL", "Generated", "TokenSpeed"]

_TILE = 128
"""Tokens that the CuTe DSL kernels read at a time: page tables are as wide as whole tiles."""


class _Latent:
    """Binds latent requests; `kernel` is the library's word."""

    kernel = ""

    def bind(self, request: AttentionRequest) -> Bound:
        call = _Call(request, self.kernel)
        return Bound(call.forward, session=call.session)


class Generated(_Latent):
    """trtllm-gen."""

    kernel = "trtllm-gen"


class CuteDSL(_Latent):
    """CuTe DSL."""

    kernel = "cute-dsl"


class TokenSpeed(CuteDSL):
    """CuTe DSL over a cache of e4m3, which takes queries of e4m3 and rounds the attention weights to it."""


class _Call:
    """Everything of a request that is no tensor."""

    def __init__(self, request: AttentionRequest, kernel: str) -> None:
        self.request, self.kernel = request, kernel
        self.decode = load(
            FLASHINFER_MLA_LIBRARY,
            "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla",
            {"return_lse_base": "a natural LSE", "cum_seq_lens_q": "sequences with numbers of queries of their own"},
        )
        self.scale, self.factor = scale_of(request)

    def forward(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        tables: PagedTables,
        attn_mask: None = None,
        kv_parts: Sequence[KVPart] = (),
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Any:
        """`polyattn.contract.MLAForward`; `workspace`: of a session."""
        page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[:5]
        r, N, T = self.request, seq_lens.shape[0], query.shape[0]
        if not (T and page_table.shape[1] and max_seqlen_k):
            return empty_result(r, query, out)
        width, compressed = r.dims
        owner = sequence_ids(T, cu_seqlens_q)
        keys = seq_lens[owner]
        if max_seqlen_q == 1 and T != N:
            # Sequences without a query in this step: with numbers of queries that differ trtllm-gen has no LSE.
            page_table, seq_lens, N = page_table[owner], keys, T
        query = query if self.factor is None else query * self.factor
        if r.kv_storage == "fp8_e4m3":
            query = stored(query, None, torch.float8_e4m3fn)
        query = align16(query)
        target = writable(out)
        drafts: dict[str, Any] = {}
        if N * max_seqlen_q == T:
            query = torch.unflatten(query, 0, (N, max_seqlen_q))
            target = None if target is None else torch.unflatten(target, 0, (N, max_seqlen_q))
        else:
            drafts = {"cum_seq_lens_q": _whole(cu_seqlens_q), "max_q_len": max_seqlen_q}
        found = self.decode(
            query=query,
            kv_cache=align16(cache),
            workspace_buffer=workspace_of(query.device) if workspace is None else workspace,
            # Of the heads before absorption; the kernels do not use it.
            qk_nope_head_dim=compressed // 4,
            kv_lora_rank=compressed,
            qk_rope_head_dim=width - compressed,
            block_tables=self._table(page_table),
            seq_lens=_whole(seq_lens),
            max_seq_len=max_seqlen_k,
            out=target,
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            backend=self.kernel,
            return_lse=r.lse,
            return_lse_base="basee" if r.lse else None,
            **drafts,
        )
        found, lse = found if r.lse else (found, None)
        return delivered(r, found.view(T, *found.shape[-2:]), lse, keys > 0, None, out)

    def _table(self, page_table: Tensor) -> Tensor:
        """A page table as wide as whole tiles; what is added is page 0, and masked."""
        missing = -page_table.shape[1] % (_TILE // self.request.page_size) if self.kernel == "cute-dsl" else 0
        return torch.nn.functional.pad(page_table, (0, missing)) if missing else _whole(page_table)

    def session(self, slot: Slot) -> Session:
        """A serving side: it has nothing to plan, and a workspace of its own."""
        return _Session(self, slot)


def _whole(index: Tensor) -> Tensor:
    """Lengths and tables as the kernels read them: without a gap, and for CuTe DSL from a 16-byte boundary on."""
    return align16(index.contiguous())


class _Session:
    """`polyattn.contract.Session`."""

    def __init__(self, call: _Call, slot: Slot) -> None:
        self._call, self._workspace = call, slot.workspace("trtllm", WORKSPACE).zero_()

    def plan(self, step: Any) -> None:
        """Nothing: the kernels read lengths on the device."""

    def prepare(self, step: Any) -> None:
        """Nothing: the kernels read the step's own tensors."""

    def forward(self, query: Tensor, *caches: Tensor, **given: Any) -> Any:
        return self._call.forward(query, *caches, workspace=self._workspace, **given)
