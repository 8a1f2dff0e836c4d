"""FlashAttention 3, as vLLM's wheel carries it."""

from __future__ import annotations

from typing import Any

import torch
from measuring.problems import Backward, Dense, Latent, Paged, Problem
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_interface as library

from . import Call, RefusedError

__all__ = ["fixed", "packed"]


def fixed(problem: Problem) -> Call:
    """Dense rows as [B, S, H, D]: the operator as `flash_attn_func` of its own package calls it."""
    if not isinstance(problem, Dense):
        return packed(problem)
    if isinstance(problem, Backward):
        raise RefusedError("this build has no backward pass")
    row = problem.row
    operator = torch.ops._vllm_fa3_C.fwd
    # Named by the operator's own schema, in which all of them are positional.
    given: dict[str, Any] = {
        "softmax_scale": problem.scale,
        "is_causal": row.causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 1,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    names = [argument.name for argument in operator.default._schema.arguments]
    rest = [given.get(name) for name in names[3:]]

    def call(number: int) -> Tensor:
        out: Tensor = operator(*problem.inputs[number], *rest)[0]
        return out

    return call


def packed(problem: Problem) -> Call:
    """vLLM's own call: packed tokens, or pages."""
    if isinstance(problem, Latent):
        return _latent(problem)
    if isinstance(problem, Paged):
        return _pages(problem)
    if not isinstance(problem, Dense) or isinstance(problem, Backward):
        raise RefusedError("this build has no backward pass")
    row = problem.row
    starts = torch.arange(row.batch + 1, dtype=torch.int32, device=problem.device) * row.q_len
    tensors = [tuple(t.flatten(0, 1) for t in some) for some in problem.inputs]

    def call(number: int) -> Tensor:
        q, k, v = tensors[number]
        out: Tensor = library.flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            max_seqlen_q=row.q_len,
            cu_seqlens_q=starts,
            max_seqlen_k=row.q_len,
            cu_seqlens_k=starts,
            softmax_scale=problem.scale,
            causal=row.causal,
            fa_version=3,
        )
        return out.unflatten(0, (row.batch, row.q_len))

    return call


def _scheduled(problem: Paged | Latent, kv_heads: int, width: int, v_width: int) -> dict[str, Any]:
    """What a call over pages takes beside q, k and v; the schedule is made once per step, as vLLM does."""
    row, step = problem.row, problem.step
    schedule = library.get_scheduler_metadata(
        batch_size=row.batch,
        max_seqlen_q=row.q_len,
        max_seqlen_k=row.kv_len,
        num_heads_q=row.heads,
        num_heads_kv=kv_heads,
        headdim=width,
        headdim_v=v_width,
        cache_seqlens=step.seq_lens,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=step.cu_seqlens_q,
        page_size=row.page_size,
        causal=True,
    )
    return {
        "max_seqlen_q": row.q_len,
        "cu_seqlens_q": step.cu_seqlens_q,
        "max_seqlen_k": row.kv_len,
        "seqused_k": step.seq_lens,
        "block_table": step.page_table,
        "softmax_scale": problem.scale,
        "causal": True,
        "scheduler_metadata": schedule,
        "fa_version": 3,
    }


def _pages(problem: Paged) -> Call:
    row = problem.row
    if row.tree or row.kv_dtype != "auto":
        raise RefusedError("paged rows in bfloat16, without a tree")
    more = _scheduled(problem, row.kv_heads, row.head_dim, row.head_dim)

    def call(number: int) -> Tensor:
        key, value = problem.caches(number)
        out: Tensor = library.flash_attn_varlen_func(q=problem.queries[number], k=key, v=value, **more)
        return out

    return call


def _latent(problem: Latent) -> Call:
    """The rope part as query and key, the latent part as `q_v` and value."""
    latent, width = problem.row.v_head_dim, problem.row.head_dim - problem.row.v_head_dim
    more = _scheduled(problem, 1, width, latent)

    def call(number: int) -> Tensor:
        query, cache = problem.queries[number], problem.cache(number).unsqueeze(2)
        out: Tensor = library.flash_attn_varlen_func(
            q=query[..., latent:], k=cache[..., latent:], v=cache[..., :latent], q_v=query[..., :latent], **more
        )
        return out

    return call
