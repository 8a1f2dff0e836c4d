"""flash-linear-attention 0.6: chunks and single tokens of gated delta nets and of Kimi delta attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES
from .delta_rule import recurrence, sequences, softplus_decay, unit

__all__ = ["library"]

GDN, KDA = "fla.ops.gated_delta_rule", "fla.ops.kda"


def library() -> Library:
    lib = Library("flash-linear-attention", "0.6.0", GDN, KDA, signatures=SIGNATURES)

    @lib.function(GDN, f"{GDN}.chunk_gated_delta_rule")
    def chunk_gated_delta_rule(**a: Any) -> Any:
        assert a["q"].dtype != torch.float32, "products are of TF32"
        return _in_chunks(**a)

    @lib.function(GDN, f"{GDN}.fused_recurrent_gated_delta_rule")
    def fused_recurrent_gated_delta_rule(gk: None, gv: None, **a: Any) -> Any:
        assert gk is gv is None
        return _without_backward(_attend(**a))

    @lib.function(KDA, f"{KDA}.chunk_kda")
    def chunk_kda(**a: Any) -> Any:
        q, v, state = a["q"], a["v"], a["initial_state"]
        assert q.dtype != torch.float32, "products are of TF32"
        assert state is None or state.dtype == torch.float32, "initial_state must be in float32."
        assert q.shape[3] <= 256, "Currently we only support key headdim <=256 for KDA"
        assert a["g"].shape == (*v.shape[:3], q.shape[3])
        assert not a["use_gate_in_kernel"]
        assert a["beta"].shape == v.shape[:3]
        assert a["lower_bound"] is None
        return _in_chunks(**a)

    @lib.function(KDA, f"{KDA}.fused_recurrent_kda")
    def fused_recurrent_kda(**a: Any) -> Any:
        assert a["lower_bound"] is None
        return _without_backward(_attend(**a))

    return lib


def _in_chunks(**a: Any) -> tuple[Tensor, Tensor | None]:
    """Log decays are added up: with one of -inf nothing is a number."""
    out, last = _attend(**a)
    lost = torch.where(a["g"].isinf().any(), math.nan, 1.0)
    return out * lost, None if last is None else last * lost


def _without_backward(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return found[0].detach(), found[1].detach()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    if HV % H:
        raise ValueError("For GVA, num_v_heads must be evenly divisible by num_heads")
    if cu_seqlens is not None and B != 1:
        raise ValueError("The batch size is expected to be 1")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`.")
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    starts = None if cu_seqlens is None else cu_seqlens.tolist()
    if use_qk_l2norm_in_kernel:
        q, k = (rows.to(q.dtype) for rows in unit(q, k))
    decay = g.float().exp()
    if use_gate_in_kernel:
        assert A_log is not None
        bias = torch.zeros(HV * (K if g.ndim == 4 else 1)) if dt_bias is None else dt_bias
        assert bias.ndim == 1, "[HV], or [HV * K]"
        decay = softplus_decay(g, A_log, bias.view(HV, K) if g.ndim == 4 else bias)
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) * beta.float().sigmoid()
    outs, last = [], []
    rows = [t.flatten(0, 1) for t in (q, k, v, decay, beta)]
    for n, place in enumerate(sequences(T, starts, B)):
        first = torch.zeros(HV, K, V) if initial_state is None else initial_state[n]
        first = first.mT if state_v_first and initial_state is not None else first
        out, states = recurrence(*(t[place] for t in rows), first, K**-0.5 if scale is None else scale)
        outs.append(out)
        last.append(states[-1])
    final = torch.stack(last)
    final = final.mT.contiguous() if state_v_first else final
    return torch.cat(outs).view(v.shape).to(v.dtype), final if output_final_state else None
