"""FlashMLA's dense decode, as vLLM's wheel carries it."""

from __future__ import annotations

from torch import Tensor
from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

from polyattn.bench.measure import Call, Inputs

from .common import only, plain_step, scale_of

__all__ = ["dense"]


def dense(inputs: Inputs) -> Call:
    request = only(inputs, ("mla",), "causal", "v_head_dim")
    step = plain_step(inputs)
    schedule, _ = get_mla_metadata()  # filled by the first call, the same for all layers of a step

    def call(number: int) -> Tensor:
        given = inputs.tensors[number]
        out: Tensor = flash_mla_with_kvcache(
            q=given["query"].unflatten(0, (step.batch, step.q_len)),
            k_cache=given["cache"].unsqueeze(2),
            block_table=step.page_table,
            cache_seqlens=step.seq_lens,
            head_dim_v=request.dims[1],
            tile_scheduler_metadata=schedule,
            softmax_scale=scale_of(request),
            causal=request.causal != "none",
        )[0]
        return out.flatten(0, 1)

    return call
