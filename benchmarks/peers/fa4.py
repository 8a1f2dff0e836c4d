"""FlashAttention 4 (CuTe DSL)."""

from __future__ import annotations

import torch
from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func
from measuring.problems import Backward, Dense, Paged, Problem
from torch import Tensor

from . import Call, RefusedError

__all__ = ["fa4"]


def fa4(problem: Problem) -> Call:
    if isinstance(problem, Backward):
        return _backward(problem)
    if isinstance(problem, Dense):
        return lambda number: flash_attn_func(*problem.inputs[number], causal=problem.row.causal)[0]
    if isinstance(problem, Paged) and not problem.row.tree and problem.row.kv_dtype == "auto":
        return _pages(problem)
    raise RefusedError("dense rows, and paged ones in bfloat16 without a tree")


def _backward(problem: Backward) -> Call:
    leaves = [tuple(t.detach().requires_grad_() for t in some) for some in problem.inputs]
    outs = [flash_attn_func(*some, causal=problem.row.causal)[0] for some in leaves]

    def call(number: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outs[number], leaves[number], problem.douts[number], retain_graph=True)

    return call


def _pages(problem: Paged) -> Call:
    row, step = problem.row, problem.step

    def call(number: int) -> Tensor:
        key, value = problem.caches(number)
        out: Tensor = flash_attn_varlen_func(
            q=problem.queries[number].unflatten(0, (row.batch, row.q_len)),
            k=key,
            v=value,
            max_seqlen_q=row.q_len,
            max_seqlen_k=row.kv_len,
            seqused_k=step.seq_lens,
            page_table=step.page_table,
            softmax_scale=problem.scale,
            causal=True,
        )[0]
        return out.flatten(0, 1)

    return call
