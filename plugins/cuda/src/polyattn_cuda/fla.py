"""Family `linear` by flash-linear-attention: chunks of tokens, which train, and single tokens.

From its sources (fla-core 0.6.0): gates are log decays in any dtype; value heads may be a multiple of the others. A
state is [N, H_v, D, D_v], or with `state_v_first` [N, H_v, D_v, D], read as it is and never written. The chunk kernels
take gates that are computed already, and add them up; those of single tokens compute them too. Their autograd functions
give the gradients of every tensor. What a kernel takes as `cu_seqlens` is int64, and the host reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load
from polyattn.contract import AttentionRequest, Bound
from polyattn.semantics.delta_rule import LEAST

from .records.linear import FLA_LIBRARY

__all__ = ["FLA"]

_KERNELS = {
    "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda", "fused_recurrent_kda"),
}
_WHAT_FOR = {
    "use_qk_l2norm_in_kernel": "queries and keys of length 1",
    "state_v_first": "the layout of a state",
    **dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "A_log", "dt_bias"), "raw gates"),
    "allow_neg_eigval": "a beta up to 2",
}
"""What arguments are for that not every kernel may have."""


class FLA:
    """Binds linear requests. Where gradients are wanted `forward` is a function of autograd."""

    def bind(self, request: AttentionRequest) -> Bound:
        module, chunks, tokens = _KERNELS[request.method]
        recurrent = request.s_relation == "one" and not request.grad
        fixed: dict[str, Any] = {
            "scale": request.softmax_scale,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": request.qk_norm,
            "state_v_first": request.state_layout == "VK",
        }
        if request.raw_gates:
            fixed |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
            fixed |= {"allow_neg_eigval": True} if request.beta_range == 2 else {}
        names = (
            *fixed,
            "g",
            "beta",
            "initial_state",
            "cu_seqlens",
            *(("A_log", "dt_bias") if request.raw_gates else ()),
        )
        needs = {name: _WHAT_FOR.get(name, "every call") for name in names}
        kernel = load(FLA_LIBRARY, f"{module}:{tokens if recurrent else chunks}", needs)

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            gate: Tensor,
            beta: Tensor,
            state: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            a_log: Tensor | None = None,
            dt_bias: Tensor | None = None,
            gate_bound: None = None,
            out: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            """`polyattn.contract.LinearForward`."""
            learned: dict[str, Any] = {}
            if a_log is not None:
                learned = {"A_log": a_log, "dt_bias": None if dt_bias is None else dt_bias.flatten()}
            if not recurrent:  # FLA_WIPED
                gate = gate.clamp(min=LEAST[torch.float32])
            starts = None if cu_seqlens is None else cu_seqlens.long()
            result, last = kernel(
                query, key, value, g=gate, beta=beta, initial_state=state, cu_seqlens=starts, **fixed, **learned
            )  # fmt: skip
            return (result if out is None else out.copy_(result)), last

        return Bound(forward)
