"""SGLang's CuTe DSL kernels of linear attention: cutedsl_gdn.py and cutedsl_kda.py of 0.5.23."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES
from .delta_rule import recurrence, softplus_decay, unit

__all__ = ["library"]

PLACE = "sglang.kernels.ops.attention"


def library() -> Library:
    gdn, kda = f"{PLACE}.cutedsl_gdn", f"{PLACE}.cutedsl_kda"
    lib = Library("sglang", "0.5.23", gdn, kda, signatures=SIGNATURES)

    @lib.function(gdn, f"{gdn}.cutedsl_fused_sigmoid_gating_delta_rule_update")
    def cutedsl_fused_sigmoid_gating_delta_rule_update(**a: Any) -> Tensor:
        assert a["a"].shape == a["v"].shape[:3]
        return _update(**a)

    @lib.function(kda, f"{kda}.cutedsl_fused_sigmoid_gating_kda_update")
    def cutedsl_fused_sigmoid_gating_kda_update(**a: Any) -> Tensor:
        assert a["a"].shape == (*a["v"].shape[:3], a["q"].shape[3])
        return _update(**a)

    return lib


def _update(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """What a call says of the scale and of the norm is not looked at: kernels are compiled with these."""
    N, _, _, K = q.shape
    pool, slots = initial_state_source, initial_state_indices
    assert q.shape[1] == 1
    assert slots.shape == (N,)
    assert slots.dtype == torch.int32
    assert pool.dtype == A_log.dtype == torch.float32
    assert pool.shape[1:] == (v.shape[2], v.shape[3], K)
    assert K == v.shape[3] == 128
    for given in (q, k, v, a, b, dt_bias):
        assert given.dtype == torch.bfloat16, "compiled for bfloat16"
    for given in (q, k, v, a, b, dt_bias, A_log, pool, slots):
        assert given.is_contiguous()
        assert not given.data_ptr() % 16
    q, k = unit(q, k)
    decay, beta = softplus_decay(a, A_log, dt_bias), b.float().sigmoid()
    out = torch.full((N, 1, *v.shape[2:]), torch.nan, dtype=torch.bfloat16)
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            found, states = recurrence(q[n], k[n], v[n], decay[n], beta[n], pool[slot].mT, K**-0.5)
            out[n], pool[slot] = found.bfloat16(), states[-1].mT
    return out
