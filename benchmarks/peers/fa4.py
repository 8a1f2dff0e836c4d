"""FlashAttention 4 (CuTe DSL)."""

from __future__ import annotations

from typing import Any

from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func
from torch import Tensor

from polyattn.bench.measure import Call, Inputs
from polyattn.contract import AttentionRequest

from .common import called, only, plain_step, scale_of, window_of

__all__ = ["fa4"]

_TAKES = ("causal", "v_head_dim", "window", "softcap", "sinks")


def fa4(inputs: Inputs) -> Call:
    if inputs.workload.request.family == "paged":
        return _pages(inputs)
    if inputs.workload.request.family == "varlen":
        return _packed(inputs)
    # A call with its backward is given no sinks here.
    request = only(inputs, ("dense",), *(_TAKES[:-1] if inputs.workload.training else _TAKES), "grad")
    more = _keywords(request)

    def forward(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        out: Tensor = flash_attn_func(query, key, value, learnable_sink=sinks, **more)[0]
        return out

    names = ("query", "key", "value", *(["sinks"] if request.sinks else []))
    return called(inputs, forward, [tuple(some[name] for name in names) for some in inputs.tensors], first=False)


def _keywords(request: AttentionRequest) -> dict[str, Any]:
    """What says the row, beside the sinks: a layer has its own."""
    left, right = window_of(request)
    return {
        "softmax_scale": scale_of(request),
        "causal": request.causal != "none",
        "window_size": (None if left < 0 else left, None if right < 0 else right),
        "softcap": request.softcap,
    }


def _packed(inputs: Inputs) -> Call:
    request, extra = only(inputs, ("varlen",), *_TAKES), inputs.extra
    more = {**_keywords(request), **extra}

    def call(number: int) -> Tensor:
        given = inputs.tensors[number]
        q, k, v, sinks = (given.get(name) for name in ("query", "key", "value", "sinks"))
        out: Tensor = flash_attn_varlen_func(q=q, k=k, v=v, learnable_sink=sinks, **more)[0]
        return out

    return call


def _pages(inputs: Inputs) -> Call:
    request = only(inputs, ("paged",), *_TAKES, "kv_parts")
    step, more = plain_step(inputs), _keywords(request)

    def call(number: int) -> Tensor:
        given = inputs.tensors[number]
        out: Tensor = flash_attn_varlen_func(
            q=given["query"].unflatten(0, (step.batch, step.q_len)),
            k=given["key_cache"],
            v=given["value_cache"],
            max_seqlen_q=step.q_len,
            max_seqlen_k=step.kv_len,
            seqused_k=step.seq_lens,
            page_table=step.page_table,
            learnable_sink=given.get("sinks"),
            **more,
        )[0]
        return out.flatten(0, 1)

    return call
