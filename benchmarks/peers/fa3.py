"""FlashAttention 3, as vLLM's wheel carries it. That build has no backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_interface as library

from polyattn.bench.measure import Call, Inputs
from polyattn.contract import AttentionRequest

from .common import PlainStep, only, plain_step, scale_of, window_of

__all__ = ["fixed", "packed"]

_TAKES = ("causal", "v_head_dim", "window", "softcap", "sinks")


def fixed(inputs: Inputs) -> Call:
    """Dense rows as [B, S, H, D], by the operator: vLLM's call packs. Its wheel is built for sequences of different
    lengths alone, so it is told even equal ones."""
    if inputs.workload.request.family != "dense":
        return packed(inputs)
    request = only(inputs, ("dense",), *_TAKES)
    left, right = window_of(request)
    batch, (_, s_k) = inputs.workload.batch, inputs.workload.longest
    operator = torch.ops._vllm_fa3_C.fwd
    # Named by the operator's own schema, in which all of them are positional.
    given: dict[str, Any] = {
        "seqused_k": torch.full((batch,), s_k, dtype=torch.int32, device=inputs.device),
        "softmax_scale": scale_of(request),
        "is_causal": request.causal != "none",
        "window_size_left": left,
        "window_size_right": right,
        "softcap": request.softcap,
        "is_rotary_interleaved": True,
        "num_splits": 1,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    names = [argument.name for argument in operator.default._schema.arguments]
    rests = [[{**given, **_sinks(inputs, n)}.get(name) for name in names[3:]] for n in range(inputs.count)]

    def call(number: int) -> Tensor:
        some = inputs.tensors[number]
        out: Tensor = operator(some["query"], some["key"], some["value"], *rests[number])[0]
        return out

    return call


def packed(inputs: Inputs) -> Call:
    """vLLM's own call: packed tokens, or pages."""
    family = inputs.workload.request.family
    if family == "mla":
        return _latent(inputs)
    if family == "paged":
        return _pages(inputs)
    request = only(inputs, ("dense", "varlen"), *_TAKES)
    if family == "dense":
        more = _dense_lengths(inputs)
        sets = [tuple(some[name].flatten(0, 1) for name in ("query", "key", "value")) for some in inputs.tensors]
    else:
        more = inputs.extra
        sets = [tuple(some[name] for name in ("query", "key", "value")) for some in inputs.tensors]
    more = {**more, **_keywords(request)}
    shape = inputs.tensors[0]["query"].shape[:-2]

    def call(number: int) -> Tensor:
        q, k, v = sets[number]
        out: Tensor = library.flash_attn_varlen_func(q=q, k=k, v=v, **_sinks(inputs, number), **more)
        return out.unflatten(0, shape)

    return call


def _dense_lengths(inputs: Inputs) -> dict[str, Any]:
    batch, (s_q, s_k) = inputs.workload.batch, inputs.workload.longest
    starts = torch.arange(batch + 1, dtype=torch.int32, device=inputs.device)
    return {"cu_seqlens_q": starts * s_q, "cu_seqlens_k": starts * s_k, "max_seqlen_q": s_q, "max_seqlen_k": s_k}


def _sinks(inputs: Inputs, number: int) -> dict[str, Tensor]:
    """Of a set: a layer has its own."""
    return {"s_aux": inputs.tensors[number].get("sinks")}


def _keywords(request: AttentionRequest) -> dict[str, Any]:
    """What says the row, beside the sinks."""
    return {
        "softmax_scale": scale_of(request),
        "causal": request.causal != "none",
        "window_size": window_of(request),
        "softcap": request.softcap,
        "fa_version": 3,
    }


def _scheduled(
    inputs: Inputs, request: AttentionRequest, step: PlainStep, kv_heads: int, width: int, v_width: int
) -> dict[str, Any]:
    """What a call over pages takes beside q, k and v; the schedule is made once per step, as vLLM does."""
    schedule = library.get_scheduler_metadata(
        batch_size=step.batch,
        max_seqlen_q=step.q_len,
        max_seqlen_k=step.kv_len,
        num_heads_q=request.heads,
        num_heads_kv=kv_heads,
        headdim=width,
        headdim_v=v_width,
        cache_seqlens=step.seq_lens,
        qkv_dtype=inputs.tensors[0]["query"].dtype,
        cu_seqlens_q=step.cu_seqlens_q,
        page_size=request.page_size,
        causal=request.causal != "none",
        window_size=window_of(request),
        has_softcap=request.softcap > 0,
    )
    return {
        **_keywords(request),
        "max_seqlen_q": step.q_len,
        "cu_seqlens_q": step.cu_seqlens_q,
        "max_seqlen_k": step.kv_len,
        "seqused_k": step.seq_lens,
        "block_table": step.page_table,
        "scheduler_metadata": schedule,
    }


def _pages(inputs: Inputs) -> Call:
    request = only(inputs, ("paged",), *_TAKES, "kv_parts")
    more = _scheduled(inputs, request, plain_step(inputs), request.kv_heads, *request.dims)

    def call(number: int) -> Tensor:
        given = inputs.tensors[number]
        out: Tensor = library.flash_attn_varlen_func(
            q=given["query"], k=given["key_cache"], v=given["value_cache"], **_sinks(inputs, number), **more
        )
        return out

    return call


def _latent(inputs: Inputs) -> Call:
    """The rope part as query and key, the latent part as `q_v` and value."""
    request = only(inputs, ("mla",), "causal", "v_head_dim")
    width, latent = request.head_dim - request.dims[1], request.dims[1]
    more = _scheduled(inputs, request, plain_step(inputs), 1, width, latent)

    def call(number: int) -> Tensor:
        query, cache = inputs.tensors[number]["query"], inputs.tensors[number]["cache"].unsqueeze(2)
        out: Tensor = library.flash_attn_varlen_func(
            q=query[..., latent:], k=cache[..., latent:], v=cache[..., :latent], q_v=query[..., :latent], **more
        )
        return out

    return call
