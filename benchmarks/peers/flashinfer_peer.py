"""FlashInfer: ragged prefill, paged prefill, decode and latent decode, planned once as its users do."""

from __future__ import annotations

from typing import Any

import flashinfer
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from measuring.problems import Backward, Dense, Latent, Paged, Problem
from torch import Tensor

from . import Call, RefusedError

__all__ = ["cuda_cores", "fa2", "fa3", "xqa"]

_WORKSPACE = 384 * 2**20
_TYPES: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def cuda_cores(problem: Problem) -> Call:
    """The decode kernel that the wrapper uses unless told otherwise."""
    return _decode(_paged(problem), use_tensor_cores=False)


def fa2(problem: Problem) -> Call:
    if isinstance(problem, Paged) and problem.row.q_len == 1:
        return _decode(_paged(problem), use_tensor_cores=True, backend="fa2")
    return _any(problem, "fa2")


def fa3(problem: Problem) -> Call:
    return _any(problem, "fa3")


def xqa(problem: Problem) -> Call:
    problem = _paged(problem)
    row, step = problem.row, problem.step
    workspace = _workspace(problem)  # zeros: it holds semaphores

    def call(number: int) -> Tensor:
        out: Tensor = flashinfer.decode.xqa_batch_decode_with_kv_cache(
            query=problem.queries[number],
            kv_cache=problem.caches(number),
            workspace_buffer=workspace,
            block_tables=step.page_table,
            seq_lens=step.seq_lens,
            max_seq_len=row.kv_len,
            bmm1_scale=problem.scale,
            bmm2_scale=1.0,
            kv_layout="NHD",
        )
        return out

    return call


def _workspace(problem: Problem) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=problem.device)


def _paged(problem: Problem) -> Paged:
    if not isinstance(problem, Paged) or problem.row.tree or problem.row.kv_dtype != "auto":
        raise RefusedError("paged rows in bfloat16, without a tree")
    return problem


def _any(problem: Problem, backend: str) -> Call:
    if isinstance(problem, Latent):
        return _latent(problem, backend)
    if isinstance(problem, Dense) and not isinstance(problem, Backward):
        return _ragged(problem, backend)
    return _extend(_paged(problem), backend)


def _ragged(problem: Dense, backend: str) -> Call:
    row, (d, d_v) = problem.row, problem.row.dims
    starts = torch.arange(row.batch + 1, dtype=torch.int32, device=problem.device) * row.q_len
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(problem), "NHD", backend=backend)
    wrapper.plan(
        starts,
        starts,
        num_qo_heads=row.heads,
        num_kv_heads=row.kv_heads,
        head_dim_qk=d,
        head_dim_vo=d_v,
        causal=row.causal,
        sm_scale=problem.scale,
        **_TYPES,
    )
    tensors = [tuple(t.flatten(0, 1) for t in some) for some in problem.inputs]
    return lambda number: wrapper.run(*tensors[number]).unflatten(0, (row.batch, row.q_len))


def _extend(problem: Paged, backend: str) -> Call:
    row, step = problem.row, problem.step
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(problem), "NHD", backend=backend)
    wrapper.plan(
        step.cu_seqlens_q,
        step.kv_indptr,
        step.kv_indices,
        step.last_page_len,
        num_qo_heads=row.heads,
        num_kv_heads=row.kv_heads,
        head_dim_qk=row.head_dim,
        page_size=row.page_size,
        causal=True,
        sm_scale=problem.scale,
        **_TYPES,
    )
    return lambda number: wrapper.run(problem.queries[number], problem.caches(number))


def _decode(problem: Paged, **how: Any) -> Call:
    row, step = problem.row, problem.step
    if row.q_len != 1:
        raise RefusedError("decode rows only")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(problem), "NHD", **how)
    wrapper.plan(
        step.kv_indptr,
        step.kv_indices,
        step.last_page_len,
        num_qo_heads=row.heads,
        num_kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        page_size=row.page_size,
        sm_scale=problem.scale,
        **_TYPES,
    )
    return lambda number: wrapper.run(problem.queries[number], problem.caches(number))


def _latent(problem: Latent, backend: str) -> Call:
    row, step, latent = problem.row, problem.step, problem.row.v_head_dim
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(problem), backend=backend)
    wrapper.plan(
        qo_indptr=step.cu_seqlens_q,
        kv_indptr=step.kv_indptr,
        kv_indices=step.kv_indices,
        kv_len_arr=step.seq_lens,
        num_heads=row.heads,
        head_dim_ckv=latent,
        head_dim_kpe=row.head_dim - latent,
        page_size=row.page_size,
        causal=False,
        sm_scale=problem.scale,
        **_TYPES,
    )

    def call(number: int) -> Tensor:
        query, cache = problem.queries[number], problem.cache(number)
        out: Tensor = wrapper.run(
            q_nope=query[..., :latent],
            q_pe=query[..., latent:],
            ckv_cache=cache[..., :latent],
            kpe_cache=cache[..., latent:],
        )
        return out

    return call
