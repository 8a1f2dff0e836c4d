"""Family `mla` by FlashInfer's MLA wrapper: its fa3 template on Hopper, else fa2.

The cache is read as it is: compressed part and rope part side by side in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn import adapters
from polyattn.backends.gathering import nothing
from polyattn.contract import Bound, KVPart, Session, Slot
from polyattn.records import AttentionRequest

from ..records.flashinfer import FLASHINFER_MLA_LIBRARY
from .lengths import Lengths, sighted
from .results import delivered, writable
from .scales import readable, scale_of
from .sessions import PlannedSession
from .workbench import LENDER, Workbench, processors

__all__ = ["Latent"]


class Latent:
    """Binds latent requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        call = _Call(request)
        return Bound(call.forward, session=call.session)


class _Call:
    """Everything of a request that is no tensor."""

    tables = ()

    def __init__(self, request: AttentionRequest) -> None:
        r = self.request = request
        self.make = adapters.load(FLASHINFER_MLA_LIBRARY, "flashinfer.mla:BatchMLAPagedAttentionWrapper")
        self.metadata: Any = adapters.load(FLASHINFER_MLA_LIBRARY, "flashinfer.mla:MLAPlanMetadata")
        self.scale, self.factor = scale_of(r)
        recent = not r.toolkit or r.toolkit >= (12, 3)
        self.backend = "fa3" if r.arch == "sm90" and recent else "fa2"
        width, compressed = r.dims
        dtype = getattr(torch, r.dtype)
        self.options: dict[str, Any] = {
            "num_heads": r.heads,
            "head_dim_ckv": compressed,
            "head_dim_kpe": width - compressed,
            "page_size": r.page_size,
            "causal": r.causal != "none",
            "sm_scale": self.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "query_layout": "packed",
            "kv_cache_layout": "packed",
            "lse_mode": "basee" if r.lse else "none",
        }

    def forward(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        page_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        attn_mask: None = None,
        kv_parts: Sequence[KVPart] = (),
        out: Tensor | None = None,
    ) -> Any:
        """`polyattn.contract.MLAForward`."""
        r = self.request
        if not query.shape[0]:
            return nothing(r, query, out)
        with LENDER.lend(query.device) as bench:
            lens = Lengths.read(cu_seqlens_q, seq_lens, r.page_size)
            if not lens.pages:
                return nothing(r, query, out)
            wrapper, alive = self.plan_step(
                bench, lens, lens.page_list(page_table), self._nbytes(query.device), None, None
            )
            return self.run_step(wrapper, alive, query, (cache,), out, {})

    def session(self, slot: Slot) -> Session:
        """A serving side: one plan for all layers of a step."""
        return PlannedSession(self, slot, self._nbytes(slot.device))

    def _nbytes(self, device: torch.device) -> int:
        """Of partial outputs and LSEs, as `MLAPlan` in FlashInfer's scheduler.cuh takes them: two tiles of 64 rows for
        each multiprocessor, outputs in 16 bits."""
        return 2 * 64 * processors(device) * (2 * self.request.dims[1] + 4) + (1 << 20)

    def plan_step(
        self, bench: Workbench, lens: Lengths, pages: Tensor, nbytes: int, step: Any, fixed: dict[str, Tensor] | None
    ) -> tuple[Any, Tensor | None]:
        """A planned wrapper, and the queries that see a key or None = all."""
        buffers = {} if fixed is None else {
            "qo_indptr": fixed["cu_seqlens_q"], "kv_indptr": fixed["kv_indptr"], "kv_indices": fixed["pages"],
            "kv_len_arr": fixed["seq_lens"],
        }  # fmt: skip

        def make(workspace: Tensor) -> Any:
            return self.make(
                float_workspace_buffer=workspace, use_cuda_graph=fixed is not None, backend=self.backend, **buffers
            )

        wrapper = bench.wrapper((self.make, self.backend), make, nbytes)
        metadata = self.metadata.csr(
            qo_indptr=lens.cu_seqlens_q, kv_indptr=lens.kv_indptr, kv_indices=pages, kv_len_arr=lens.seq_lens
        )
        with bench.planning(wrapper):
            wrapper.plan(metadata=metadata, **self.options)
        # Of recorded steps only padding sees nothing, and its rows have no meaning.
        return wrapper, sighted(self.request, lens, bench.device) if fixed is None else None

    def run_step(
        self,
        wrapper: Any,
        alive: Tensor | None,
        query: Tensor,
        caches: tuple[Tensor, ...],
        out: Tensor | None,
        given: Mapping[str, Any],
    ) -> Any:
        """A call, or a layer of a step, that was planned."""
        r = self.request
        query, target = readable(query, self.factor), out if out is None else writable(out)
        found = wrapper.run(query=query, kv_cache=caches[0], out=target, return_lse=r.lse, return_lse_base_on_e=r.lse)
        if alive is None and not r.lse and target is out:
            return found
        found, lse = found if r.lse else (found, None)
        return delivered(r, found, lse, alive, None, out)
