"""Intel Extension for PyTorch 2.8 on the CPU: `intel_extension_for_pytorch.llm.modules.VarlenAttention`.

From its source (transformers/models/cpu/fusions/mha_fusion.py): it pads the batch and calls torch's SDPA, whose causal
flag starts in the upper left corner; softmax_scale and the dropout are ignored; windows, softcap and ALiBi are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load
from polyattn.contract import AttentionRequest, Bound

from .records.common import IPEX
from .visibility import blind

__all__ = ["VarlenIPEX"]


class VarlenIPEX:
    """Binds varlen requests with the default scale."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: it does not import here.
        """
        attend = load(IPEX, "intel_extension_for_pytorch.llm.modules:VarlenAttention.apply_function")
        causal = request.causal != "none"

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            cu_seqlens_q: Tensor,
            cu_seqlens_k: Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            attn_mask: None = None,
            sinks: None = None,
            out: Tensor | None = None,
        ) -> Any:
            room = torch.zeros_like(query) if out is None else out
            if not (query.shape[0] and max_seqlen_k):
                return room.zero_()
            attend(
                query=query, key=key, value=value, out=room, seqlen_q=cu_seqlens_q, seqlen_k=cu_seqlens_k,
                alibi_slopes=None, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, pdropout=0.0,
                softmax_scale=request.softmax_scale, zero_tensors=False, is_causal=causal, return_softmax=False,
                gen_=None, window_size_left=-1, window_size_right=-1, softcap=-1.0,
            )  # fmt: skip
            hidden = blind(request, query, cu_seqlens_k.diff(), cu_seqlens_q)
            return room.masked_fill_(hidden[:, None, None], 0.0)

        return Bound(forward)
