"""torch's scaled_dot_product_attention: its FlashAttention 2 and its cuDNN kernels."""

from __future__ import annotations

import torch
from measuring.problems import Backward, Dense, Paged, Problem
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from . import Call, RefusedError

__all__ = ["cudnn", "flash", "gathered"]


def cudnn(problem: Problem) -> Call:
    return _dense(problem, SDPBackend.CUDNN_ATTENTION)


def flash(problem: Problem) -> Call:
    return _dense(problem, SDPBackend.FLASH_ATTENTION)


def _dense(problem: Problem, kernel: SDPBackend) -> Call:
    if not isinstance(problem, Dense):
        raise RefusedError("dense rows only")
    row = problem.row

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=row.causal, enable_gqa=row.heads != row.kv_heads)

    tensors = [problem.heads_first(i) for i in range(problem.sets)]
    if not isinstance(problem, Backward):
        return lambda number: forward(*tensors[number]).transpose(1, 2)
    for some in tensors:
        for tensor in some:
            tensor.requires_grad_()
    outs = [forward(*some) for some in tensors]
    douts = [dout.transpose(1, 2).contiguous() for dout in problem.douts]

    def backward(number: int) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(outs[number], tensors[number], douts[number], retain_graph=True)
        return tuple(grad.transpose(1, 2) for grad in found)

    return backward


def gathered(problem: Problem) -> Call:
    """Pages are copied into one tensor at each call, and attended by the kernel that torch picks."""
    if not isinstance(problem, Paged) or problem.row.tree:
        raise RefusedError("paged rows without a tree only")
    row, pages = problem.row, problem.step.page_table.long()
    # torch's name for a causal mask that ends with the last key; FlashAttention takes it.
    mask = causal_lower_right(row.q_len, row.kv_len) if row.q_len > 1 else None

    def call(number: int) -> Tensor:
        key, value = (c[pages].flatten(1, 2)[:, : row.kv_len].transpose(1, 2) for c in problem.caches(number))
        query = problem.queries[number].unflatten(0, (row.batch, row.q_len)).transpose(1, 2)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=row.heads != row.kv_heads)
        return out.transpose(1, 2).flatten(0, 1)

    return call
