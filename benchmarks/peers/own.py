"""polyattn's own kernels, through polyattn, as a program and as an engine call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measuring.problems import Backward, BlockSparse, Dense, Problem, Serving
from torch import Tensor

import polyattn
from polyattn.choose import choose, device_facts
from polyattn.overrides import SCOPE
from polyattn.records import AttentionRequest
from polyattn.selection import Selection
from polyattn.serving import AttentionBackend, Limits

from . import Call

__all__ = ["own"]


def own(problem: Problem, backend: str) -> tuple[Call, Callable[[], str]]:
    """(the call, what serves it: backend, provider and lowerings). The second is asked after a call."""
    if isinstance(problem, Backward):
        return _backward(problem, backend)
    if isinstance(problem, Dense):
        return _dense(problem, backend)
    if isinstance(problem, BlockSparse):
        return _block_sparse(problem, backend)
    assert isinstance(problem, Serving)
    return _cascade(problem, backend) if problem.row.shared else _served(problem, backend)


def _said(selection: Selection) -> str:
    return ", ".join([f"{selection.id} ({selection.provider})", *selection.steps()])


def _dense(problem: Dense, backend: str) -> tuple[Call, Callable[[], str]]:
    site = polyattn.bind(causal=problem.row.causal, backend=backend)

    def call(number: int) -> Tensor:
        out: Tensor = site(*problem.inputs[number])
        return out

    return call, lambda: _said(site.__polyattn_explain__(*problem.inputs[0]))


def _backward(problem: Backward, backend: str) -> tuple[Call, Callable[[], str]]:
    site = polyattn.bind(causal=problem.row.causal, backend=backend)
    leaves = [tuple(t.detach().requires_grad_() for t in tensors) for tensors in problem.inputs]
    outs = [site(*tensors) for tensors in leaves]

    def call(number: int) -> Any:
        return torch.autograd.grad(outs[number], leaves[number], problem.douts[number], retain_graph=True)

    return call, lambda: _said(site.__polyattn_explain__(*leaves[0]))


def _served(problem: Serving, backend: str) -> tuple[Call, Callable[[], str]]:
    """As an engine runs a step: planned once, one call for each layer."""
    row, batch = problem.row, problem.batch
    limits = Limits(max_sequences=row.batch, max_tokens=batch.tokens, max_seqlen=row.kv_len)
    engine = AttentionBackend(
        problem.layers, problem.pool, problem.table, limits=limits, backend=backend, topk=4 if row.tree else 0
    )
    if row.recorded:
        engine.init_cuda_graph_state(row.batch, batch.tokens)
        engine.init_forward_metadata_capture_cuda_graph(batch)
    else:
        engine.init_forward_metadata(batch)

    def call(number: int) -> Tensor:
        return engine.forward(problem.queries[number], None, None, problem.layers[number])

    return call, lambda: _said(engine.explain(0)[batch.mode.phase])


def _cascade(problem: Serving, backend: str) -> tuple[Call, Callable[[], str]]:
    """The shared prefix as a part of its own, which one group of all queries sees."""
    row, step = problem.row, problem.step
    shared, device = row.shared // row.page_size, problem.device
    part = polyattn.KVPart(
        page_table=step.page_table[:1, :shared].contiguous(),
        seq_lens=torch.tensor([row.shared], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, row.batch], dtype=torch.int32, device=device),
        max_seqlen_q=row.batch,
        max_seqlen_k=row.shared,
    )
    keywords: dict[str, Any] = {
        "page_table": step.page_table[:, shared:].contiguous(),
        "seq_lens": step.seq_lens - row.shared,
        "cu_seqlens_q": step.cu_seqlens_q,
        "max_seqlen_q": 1,
        "max_seqlen_k": row.kv_len - row.shared,
        "kv_parts": (part,),
        "backend": backend,
    }

    def call(number: int) -> Tensor:
        caches = problem.pool.cache(number).tensors
        out: Tensor = polyattn.paged_attention(problem.queries[number], *caches, **keywords)
        return out

    def said() -> str:
        explain = polyattn.paged_attention.__polyattn_explain__  # type: ignore[attr-defined]
        return _said(explain(problem.queries[0], *problem.pool.cache(0).tensors, **keywords))

    return call, said


def _block_sparse(problem: BlockSparse, backend: str) -> tuple[Call, Callable[[], str]]:
    """The family has no call of its own in polyattn: methods, which make the lists, are its users. So it is bound here
    as they bind it."""
    row = problem.row
    request = AttentionRequest(
        family="block_sparse",
        dtype="bfloat16",
        head_dim=row.head_dim,
        heads=row.heads,
        kv_heads=row.kv_heads,
        layout="BHSD",
        block_map=True,
        block_shape=(row.block, row.block),
        **device_facts(problem.device),
    ).normalised()
    chosen = choose(request, backend, SCOPE.get())
    lists = {"block_counts": problem.counts, "block_indices": problem.indices}

    def call(number: int) -> Tensor:
        out: Tensor = chosen.bound.forward(*problem.inputs[number], **lists)
        return out

    return call, lambda: _said(chosen.selection)
