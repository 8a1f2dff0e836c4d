"""Families `dense` and `varlen` by FlashInfer's ragged prefill wrapper. Inference only: it has no backward.

Lengths of a dense call are known on the host, so nothing waits; those of a packed one are read from the device once.
A plan is kept for as long as calls have the lengths it was made for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import empty_result, load
from polyattn.contract import AttentionRequest, Bound

from ..records.flashinfer import FLASHINFER
from .lengths import Lengths, sighted
from .paged import check_reach, template
from .results import delivered, natural, writable
from .scales import loadable, scale_of
from .workbench import LENDER, Workbench, float_bytes, int_bytes

__all__ = ["Ragged"]


class Ragged:
    """Binds dense and packed requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        call = _Call(request)
        return Bound(call.dense if request.family == "dense" else call.packed)


class _Call:
    """Everything of a request that is no tensor."""

    def __init__(self, request: AttentionRequest) -> None:
        r = self.request = request
        self.wrapper = load(FLASHINFER, "flashinfer:BatchPrefillWithRaggedKVCacheWrapper")
        self.scale, self.factor = scale_of(r)
        self.backend, dtype = template(r), getattr(torch, r.dtype)
        self.options: dict[str, Any] = {
            "num_qo_heads": r.heads,
            "num_kv_heads": r.kv_heads,
            "head_dim_qk": r.head_dim,
            "head_dim_vo": r.dims[1],
            "causal": r.causal != "none",
            "window_left": r.window[0],
            "logits_soft_cap": r.softcap or None,
            "sm_scale": self.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self.lse = r.lse or r.sinks

    def dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """`polyattn.contract.DenseForward`: B sequences of one length, packed by a view where that is one."""
        bhsd = self.request.layout == "BHSD"
        q, k, v = (t.transpose(1, 2) if bhsd else t for t in (query, key, value))
        (B, S_q), S_k = q.shape[:2], k.shape[1]
        starts = [torch.arange(B + 1, dtype=torch.int32, device="cpu") * length for length in (S_q, S_k)]
        found = self._attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts[0], starts[1], sinks, None)
        result, lse = found if self.request.lse else (found, None)
        result = result.unflatten(0, (B, S_q))
        result = result.transpose(1, 2) if bhsd else result
        result = result if out is None else out.copy_(result)
        if lse is None:
            return result
        lse = lse.unflatten(0, (B, S_q))
        return result, lse.transpose(1, 2) if bhsd else lse

    def packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        attn_mask: None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """`polyattn.contract.VarlenForward`."""
        starts = torch.stack([cu_seqlens_q, cu_seqlens_k]).cpu()
        return self._attend(query, key, value, starts[0], starts[1], sinks, out)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> Any:
        """Packed tensors; `starts` are int32 [N+1] on the host.

        Raises:
            UnsupportedRequestError: there are more tokens than the kernels reach.
        """
        r = self.request
        if not (query.shape[0] and key.shape[0]):
            return empty_result(r, query, out)
        if self.backend != "fa3":
            check_reach(query.shape[0], r.heads, max(r.dims))
            check_reach(key.shape[0], r.kv_heads, max(r.dims))
        device, target = query.device, writable(out)
        query = query if self.factor is None else query * self.factor
        keys = starts_k.diff()
        lens = Lengths.given(starts_q, keys, starts_k, keys)
        alive = sighted(r, lens, device)
        with LENDER.lend(device) as bench:
            wrapper = self._planned(bench, lens)
            q, k, v = map(loadable, (query, key, value))
            found = wrapper.run(q=q, k=k, v=v, out=target, return_lse=self.lse)
        found, lse = found if self.lse else (found, None)
        return delivered(r, found, natural(lse), alive, sinks, out)

    def _planned(self, bench: Workbench, lens: Lengths) -> Any:
        """A wrapper with a plan for these lengths: the one of the last call, if that had the same."""
        r, sequences = self.request, lens.seq_lens.shape[0]

        def make(workspace: Tensor) -> Any:
            return self.wrapper(float_workspace_buffer=workspace, kv_layout="NHD", backend=self.backend)

        nbytes = float_bytes(r, bench.device, sequences, lens.tokens)
        wrapper = bench.wrapper((self.wrapper, self.backend), make, nbytes)
        made_for = (wrapper, r, tuple(lens.cu_seqlens_q.tolist()), tuple(lens.kv_indptr.tolist()))
        if not bench.holds(made_for):
            with bench.planning(wrapper, made_for):
                if self.backend == "fa3":
                    bench.stage(wrapper, int_bytes(r, sequences, lens.tokens))
                wrapper.plan(qo_indptr=lens.cu_seqlens_q, kv_indptr=lens.kv_indptr, **self.options)
        return wrapper
