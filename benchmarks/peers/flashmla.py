"""FlashMLA's dense decode, as vLLM's wheel carries it."""

from __future__ import annotations

from measuring.problems import Latent, Problem
from torch import Tensor
from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

from . import Call, RefusedError

__all__ = ["dense"]


def dense(problem: Problem) -> Call:
    if not isinstance(problem, Latent):
        raise RefusedError("latent rows only")
    row, step = problem.row, problem.step
    schedule, _ = get_mla_metadata()  # filled by the first call, the same for all layers of a step

    def call(number: int) -> Tensor:
        out: Tensor = flash_mla_with_kvcache(
            q=problem.queries[number].unflatten(0, (row.batch, row.q_len)),
            k_cache=problem.cache(number).unsqueeze(2),
            block_table=step.page_table,
            cache_seqlens=step.seq_lens,
            head_dim_v=row.v_head_dim,
            tile_scheduler_metadata=schedule,
            softmax_scale=problem.scale,
            causal=False,
        )[0]
        return out.flatten(0, 1)

    return call
