"""FlashInfer's gated delta nets: gdn_prefill.py and the float32 paths of gdn_decode.py, 0.7.2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES
from .delta_rule import recurrence, sequences, softplus_decay, unit

__all__ = ["library"]

PREFILL, DECODE = "flashinfer.gdn_prefill", "flashinfer.gdn_decode"


def library() -> Library:
    lib = Library("flashinfer-python", "0.7.2.post1", "flashinfer", PREFILL, DECODE, signatures=SIGNATURES)

    @lib.function(PREFILL, f"{PREFILL}.chunk_gated_delta_rule")
    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **a: Any) -> Any:
        assert a["state_indices"] is None
        assert a["output"] is a["output_state"] is None
        state, starts = a["initial_state"], a["cu_seqlens"].tolist()
        for given in (q, k, v, g, beta, *([] if state is None else [state])):
            assert given.is_contiguous()
            assert not given.data_ptr() % 32, "a misaligned address"
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert g.dtype == beta.dtype == torch.float32
        assert q.shape[2] == v.shape[2] == 128
        # A scale of 0 counts as none.
        scale = a["scale"] or q.shape[2] ** -0.5
        if a["use_qk_l2norm_in_kernel"]:
            q, k = (rows.to(q.dtype) for rows in unit(q, k))
        outs, last = [], []
        for n, place in enumerate(sequences(0, starts, 0)):
            first = torch.zeros(v.shape[1], 128, 128) if state is None else state[n].mT
            out, states = recurrence(q[place], k[place], v[place], g[place], beta[place], first, scale)
            outs.append(out)
            last.append(states[-1].mT)
        assert a["output_final_state"]
        return torch.cat(outs).to(q.dtype), torch.stack(last).contiguous()

    @lib.function(DECODE, f"{DECODE}.gated_delta_rule_decode_pretranspose")
    def gated_delta_rule_decode_pretranspose(q: Tensor, v: Tensor, state: Tensor | None, **a: Any) -> Any:
        assert q.shape[1] == 1
        pool, slots = a["initial_state"], a["initial_state_indices"]
        assert (pool is None) == (slots is None), "must be provided together"
        assert a["output_state_indices"] is a["output"] is None
        states = state if pool is None else pool
        assert states is not None
        out, after = _drafted(q, v, states, range(len(v)) if slots is None else slots.tolist(), **a)
        for n, slot in enumerate(range(len(v)) if slots is None else slots.tolist()):
            if slot >= 0:
                states[slot] = after[n, 0]
        return out, states

    @lib.function(DECODE, f"{DECODE}.gated_delta_rule_mtp")
    def gated_delta_rule_mtp(q: Tensor, v: Tensor, **a: Any) -> Any:
        assert q.shape[1] > 1
        assert a["disable_state_update"]
        assert not a["cache_replayssm"]
        pool, slots, buffer = a["initial_state"], a["initial_state_indices"], a["intermediate_states_buffer"]
        assert buffer.dtype == torch.float32
        assert buffer.is_contiguous()
        assert buffer.shape == (*v.shape[:3], v.shape[3], q.shape[3])
        out, after = _drafted(q, v, pool, slots.tolist(), **a)
        for n, slot in enumerate(slots.tolist()):
            if slot >= 0:
                buffer[n] = after[n]
        return out, pool

    return lib


def _drafted(q: Tensor, v: Tensor, pool: Tensor, slots: Any, **a: Any) -> tuple[Tensor, Tensor]:
    """Raw gates and states of float32: (out, the states after each token [B, T, HV, V, K])."""
    k, dt_bias, A_log = a["k"], a["dt_bias"], a["A_log"]
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert a["a"].dtype == a["b"].dtype == q.dtype, "a and b must be float16/bfloat16"
    assert A_log.dtype == torch.float32
    assert dt_bias.dtype in (torch.bfloat16, torch.float32)
    assert pool.dtype == torch.float32
    assert pool.shape[1:] == (v.shape[2], 128, 128)
    for given in (q, k, v, pool, a["a"], a["b"], A_log, dt_bias):
        assert given.is_contiguous()
        assert not given.data_ptr() % 32, "a misaligned address"
    # What it allocates is bfloat16, and zeros where a sequence is skipped.
    out, after = torch.zeros(v.shape, dtype=torch.bfloat16), pool.new_zeros(*v.shape[:2], *pool.shape[1:])
    q, k = unit(q, k) if a["use_qk_l2norm"] else (q, k)
    decay, beta = softplus_decay(a["a"], A_log, dt_bias), a["b"].float().sigmoid()
    scale = q.shape[3] ** -0.5 if a["scale"] is None else a["scale"]
    for n, slot in enumerate(slots):
        if slot >= 0:
            found, states = recurrence(q[n], k[n], v[n], decay[n], beta[n], pool[slot].mT, scale)
            out[n], after[n] = found.bfloat16(), states.mT
    return out.to(v.dtype), after
