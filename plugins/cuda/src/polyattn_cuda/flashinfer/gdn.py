"""Family `linear`, method gdn, by FlashInfer: prompts in chunks, single tokens, and chains of draft tokens.

From its sources (0.7.2): states are float32 [N, H_v, D_v, D]. The chunk kernel (gdn_prefill.py) takes packed tokens,
decays and not their logarithms, in float32, and a scale of 0 for none. Those of single tokens and of drafts
(gdn_decode.py) compute gates from raw ones, write bfloat16, and update a state, or a pool by slots, in place; a slot of
-1 is skipped. They skip what is returned of it too, so that memory for it is zeros. Everything begins at 32 bytes: what
does not is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load
from polyattn.contract import AttentionRequest, Bound

from ..devices import current_for
from ..raw_gates import readable_gates
from ..records.flashinfer import FLASHINFER_GDN
from .scales import scale_of

__all__ = ["GDN"]

Forward = Callable[..., tuple[Tensor, Tensor]]

_CHUNK = (
    "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens", "use_qk_l2norm_in_kernel",
)  # fmt: skip
_RAW = ("q", "k", "v", "A_log", "a", "dt_bias", "b", "scale", "use_qk_l2norm", "initial_state", "initial_state_indices")
_TOKEN = (*_RAW, "state")
_DRAFTS = (*_RAW, "intermediate_states_buffer", "disable_state_update")
_BIASES = (torch.float32, torch.bfloat16)


class GDN:
    """Binds linear requests of method gdn."""

    def bind(self, request: AttentionRequest) -> Bound:
        if not request.raw_gates:
            return Bound(_chunks(request))
        return Bound(_drafts(request) if request.state_out == "every" else _tokens(request))


def _laid(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy, as CuTe's kernels read it: without gaps, from 32 bytes on."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 32 else tensor


def _chunks(request: AttentionRequest) -> Forward:
    kernel = load(FLASHINFER_GDN, "flashinfer.gdn_prefill:chunk_gated_delta_rule", dict.fromkeys(_CHUNK, "every call"))
    scale, factor = scale_of(request)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        gate: Tensor,
        beta: Tensor,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`polyattn.contract.LinearForward`."""
        (B, S), device = query.shape[:2], query.device
        starts = cu_seqlens
        if starts is None:
            starts = torch.arange(0, (B + 1) * S, S, dtype=torch.int32, device=device)
        if factor is not None:
            query = query * factor
        with current_for(query):
            result, last = kernel(
                *(_laid(tensor).flatten(0, 1) for tensor in (query, key, value)),
                g=_laid(gate.float().exp()).flatten(0, 1),
                beta=_laid(beta.float()).flatten(0, 1),
                scale=scale,
                initial_state=None if state is None else _laid(state),
                output_final_state=True,
                cu_seqlens=starts,
                use_qk_l2norm_in_kernel=request.qk_norm,
            )
        result = result.view(value.shape)
        return (result if out is None else out.copy_(result)), last

    return forward


def _tokens(request: AttentionRequest) -> Forward:
    name = "flashinfer.gdn_decode:gated_delta_rule_decode_pretranspose"
    kernel = load(FLASHINFER_GDN, name, dict.fromkeys(_TOKEN, "every call"))

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        state: Tensor | None = None,
        state_slots: Tensor | None = None,
        out: Tensor | None = None,
        **raw: Any,
    ) -> tuple[Tensor, Tensor]:
        """`polyattn.contract.LinearForward`."""
        rows = _rows(request, query, key, value, raw)
        pool = _states(query, value, state)
        if state_slots is None:
            # It is updated in place, and the one given is not ours to write.
            pool = pool.clone() if pool is state else pool
            where: dict[str, Any] = {"state": pool}
        else:
            where = {"state": None, "initial_state": pool, "initial_state_indices": state_slots.contiguous()}
        with current_for(query):
            result, _ = kernel(**rows, **where)
        if state_slots is not None and state is not None and pool is not state:
            pool = state.copy_(pool)
        return (result if out is None else out.copy_(result)), pool

    return forward


def _drafts(request: AttentionRequest) -> Forward:
    name = "flashinfer.gdn_decode:gated_delta_rule_mtp"
    kernel = load(FLASHINFER_GDN, name, dict.fromkeys(_DRAFTS, "drafts"))

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        state: Tensor | None = None,
        state_slots: Tensor | None = None,
        out: Tensor | None = None,
        **raw: Any,
    ) -> tuple[Tensor, Tensor]:
        """`polyattn.contract.LinearForward`."""
        pool = _states(query, value, state)
        slots = torch.arange(query.shape[0], device=query.device) if state_slots is None else state_slots
        made = torch.empty if state_slots is None else torch.zeros
        every = made(*query.shape[:2], *pool.shape[1:], dtype=torch.float32, device=query.device)
        with current_for(query):
            result, _ = kernel(
                **_rows(request, query, key, value, raw),
                initial_state=pool,
                initial_state_indices=slots.contiguous(),
                intermediate_states_buffer=every,
                disable_state_update=True,
            )
        return (result if out is None else out.copy_(result)), every

    return forward


def _rows(request: AttentionRequest, query: Tensor, key: Tensor, value: Tensor, raw: dict[str, Any]) -> dict[str, Any]:
    """The arguments that both raw kernels share."""
    names = ("gate", "beta", "a_log", "dt_bias")
    gate, beta, a_log, dt_bias = (raw.get(name) for name in names)
    assert isinstance(gate, Tensor)
    assert isinstance(beta, Tensor)
    assert isinstance(a_log, Tensor)
    gates = readable_gates("flashinfer", query.dtype, gate, beta, a_log, dt_bias, biases=_BIASES)
    rows = {"q": query, "k": key, "v": value, **gates}
    laid: dict[str, Any] = {name: _laid(tensor) for name, tensor in rows.items()}
    return {**laid, "scale": request.softmax_scale, "use_qk_l2norm": request.qk_norm}


def _states(query: Tensor, value: Tensor, state: Tensor | None) -> Tensor:
    """The states of a call, or its pool: [..., H_v, D_v, D] as the kernels read them."""
    if state is None:
        return query.new_zeros(query.shape[0], *value.shape[2:], query.shape[3], dtype=torch.float32)
    return _laid(state)
