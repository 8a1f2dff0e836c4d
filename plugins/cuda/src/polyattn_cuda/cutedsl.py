"""Family `linear` by SGLang's CuTe DSL kernels: single tokens, whose gates they compute.

From their sources (sglang 0.5.23): a pool of float32 states [slots, H_v, D_v, D] is updated in place; a slot of -1 is
skipped, and its output is memory that nobody wrote. Kernels are compiled for one number of sequences and one pool, with
D ** -0.5 as the scale and rows of length 1: what a call says of either is dropped without a word. They are compiled
for bfloat16 queries, gates and biases, and read others as such. Everything begins at 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import align16, load
from polyattn.contract import AttentionRequest, Bound

from .devices import current_for
from .raw_gates import readable_gates
from .records.linear import SGLANG

__all__ = ["CuteDSL"]

_KERNELS = {
    "gdn": "sglang.kernels.ops.attention.cutedsl_gdn:cutedsl_fused_sigmoid_gating_delta_rule_update",
    "kda": "sglang.kernels.ops.attention.cutedsl_kda:cutedsl_fused_sigmoid_gating_kda_update",
}
_NEEDS = dict.fromkeys(
    ("A_log", "dt_bias", "q", "k", "v", "a", "b", "initial_state_source", "initial_state_indices"), "every call"
)


class CuteDSL:
    """Binds decode requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        kernel = load(SGLANG, _KERNELS[request.method], _NEEDS)

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            gate: Tensor,
            beta: Tensor,
            a_log: Tensor,
            dt_bias: Tensor | None = None,
            state: Tensor | None = None,
            state_slots: Tensor | None = None,
            cu_seqlens: None = None,
            gate_bound: None = None,
            out: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            """`polyattn.contract.LinearForward`."""
            gates = readable_gates(
                "cutedsl", torch.bfloat16, gate, beta, a_log, dt_bias, biases=(torch.bfloat16,)
            )  # fmt: skip
            B, D, (heads, D_v) = query.shape[0], query.shape[3], value.shape[2:]
            if state is None:
                pool = query.new_zeros(B, heads, D_v, D, dtype=torch.float32)
            elif state_slots is None:
                pool = state.clone(memory_format=torch.contiguous_format)
            else:
                pool = align16(state.contiguous())
            slots = torch.arange(B, device=query.device) if state_slots is None else state_slots
            given: dict[str, Any] = {name: align16(t) for name, t in gates.items()}
            given |= {name: align16(t.contiguous()) for name, t in zip("qkv", (query, key, value), strict=True)}
            with current_for(query):
                result = kernel(
                    **given, initial_state_source=pool, initial_state_indices=slots.to(torch.int32).contiguous()
                )
            if state_slots is not None:
                result.masked_fill_((state_slots < 0)[:, None, None, None], 0.0)
                assert state is not None
                if pool is not state:
                    state.copy_(pool)
                pool = state
            return (result if out is None else out.copy_(result)), pool

        return Bound(forward)
