"""torch's FlexAttention, compiled for the shape of the row."""

from __future__ import annotations

import torch
from measuring.problems import Backward, Dense, Problem
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from . import Call, RefusedError

__all__ = ["flex"]


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def flex(problem: Problem) -> Call:
    if not isinstance(problem, Dense) or isinstance(problem, Backward):
        raise RefusedError("dense rows only")
    row, mask = problem.row, None
    torch.compiler.reset()  # a program for each row; torch gives up after a few of one function
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    if row.causal:
        mask = create_block_mask(_causal, None, None, row.q_len, row.q_len, device=str(problem.device))
    tensors = [problem.heads_first(i) for i in range(problem.sets)]
    gqa = row.heads != row.kv_heads
    return lambda number: compiled(*tensors[number], block_mask=mask, enable_gqa=gqa).transpose(1, 2)
