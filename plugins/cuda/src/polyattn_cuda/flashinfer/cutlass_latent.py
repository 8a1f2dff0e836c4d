"""Family `mla` as SGLang's `cutlass_mla`: CUTLASS decodes one query per sequence, FlashInfer serves the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import align16, empty_result, load
from polyattn.contract import AttentionRequest, Bound, PagedTables, Session, Slot
from polyattn.semantics.packed import per_token

from ..records.common import ABSORBED
from ..records.serving import SGL_CUTLASS
from .latent import Latent
from .results import delivered
from .scales import scale_of

__all__ = ["CutlassMLA"]

_PLAIN = 1
"""Splits of the keys: the kernel's own default; with more its graphs are not safe."""


class CutlassMLA:
    """Binds latent requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        if request.phase != "decode" or request.s_relation != "one" or request.lse or request.dims != ABSORBED:
            return Latent().bind(request)
        call = _Decode(request)
        return Bound(call.forward, session=call.session)


class _Decode:
    """Everything of a request that is no tensor."""

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        self.kernel = load(SGL_CUTLASS, "sgl_kernel.attention:cutlass_mla_decode")
        self.workspace_size = load(SGL_CUTLASS, "sgl_kernel.attention:cutlass_mla_get_workspace_size")
        self.scale, self.factor = scale_of(request)

    def nbytes(self, max_seqlen_k: int, sequences: int) -> int:
        """Of the workspace of a step."""
        return int(self.workspace_size(max_seq_len=max_seqlen_k, num_batches=sequences, num_kv_splits=_PLAIN))

    def forward(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        tables: PagedTables,
        attn_mask: None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Any:
        """`polyattn.contract.MLAForward`; `workspace`: of a session."""
        r, sequences = self.request, query.shape[0]
        page_table, seq_lens, max_seqlen_k = tables.page_table, tables.seq_lens, tables.max_seqlen_k
        if not (query.shape[0] and page_table.shape[1] and max_seqlen_k):
            return empty_result(r, query, out)
        if sequences != seq_lens.shape[0]:
            page_table, seq_lens = per_token(sequences, tables.cu_seqlens_q, page_table, seq_lens)
        if workspace is None:
            nbytes = self.nbytes(max_seqlen_k, sequences)
            workspace = torch.empty(nbytes, dtype=torch.uint8, device=query.device)
        query = query if self.factor is None else query * self.factor
        compressed = r.dims[1]
        found = self.kernel(
            q_nope=query[..., :compressed].contiguous(),
            q_pe=query[..., compressed:].contiguous(),
            # It knows no strides of either.
            kv_c_and_k_pe_cache=align16(cache.contiguous()),
            seq_lens=seq_lens.contiguous(),
            page_table=page_table.contiguous(),
            workspace=workspace,
            sm_scale=self.scale,
            num_kv_splits=_PLAIN,
        )
        return delivered(r, found, None, seq_lens > 0, None, out)

    def session(self, slot: Slot) -> Session:
        """A serving side: it has nothing to plan, and a workspace of its own."""
        return _Session(self, slot)


class _Session:
    """`polyattn.contract.Session`."""

    def __init__(self, call: _Decode, slot: Slot) -> None:
        self._call = call
        tokens = slot.max_pages * call.request.page_size
        self._workspace = slot.workspace("cutlass", call.nbytes(tokens, slot.max_sequences))

    def plan(self, step: Any) -> None:
        """Nothing: the kernel reads lengths on the device."""

    def prepare(self, step: Any) -> None:
        """Nothing: the kernel reads the step's own tensors."""

    def forward(self, query: Tensor, *caches: Tensor, **given: Any) -> Any:
        return self._call.forward(query, *caches, workspace=self._workspace, **given)
