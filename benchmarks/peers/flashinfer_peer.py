"""FlashInfer: ragged prefill, paged prefill, decode and latent decode, planned once as its users do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flashinfer
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from torch import Tensor

from polyattn.bench.measure import Call, Inputs
from polyattn.contract import AttentionRequest
from polyattn.errors import UnsupportedRequestError

from .common import csr, only, plain_step, scale_of

__all__ = ["cascade", "default", "fa2", "fa3", "xqa"]

_WORKSPACE = 384 * 2**20
_TAKES = ("causal", "v_head_dim", "window", "softcap")
_CACHE = ("kv_parts", "kv_dtype", "kv_scales")
_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
"""Of keys and of values. Templates of others compile; on an H200 they returned something else, or ended the context."""
_XQA_GROUP = 32
"""Query heads of a key head are one tile of it."""


def default(inputs: Inputs) -> Call:
    """As its wrappers are made by who says nothing: decode on CUDA cores, prefill by what it picks."""
    if inputs.workload.request.family == "paged" and inputs.workload.longest[0] == 1:
        return _decode(inputs, use_tensor_cores=False)
    return _any(inputs, "auto")


def fa2(inputs: Inputs) -> Call:
    if inputs.workload.request.family == "paged" and inputs.workload.longest[0] == 1:
        return _decode(inputs, use_tensor_cores=True, backend="fa2")
    return _any(inputs, "fa2")


def fa3(inputs: Inputs) -> Call:
    return _any(inputs, "fa3")


def xqa(inputs: Inputs) -> Call:
    request = only(inputs, ("paged",), "window", "kv_parts")
    if inputs.workload.longest[0] != 1:
        raise UnsupportedRequestError("called here with one query")
    if request.group > _XQA_GROUP:
        raise UnsupportedRequestError(
            f"takes up to {_XQA_GROUP} query heads for a key head, this row has {request.group}"
        )
    step = plain_step(inputs)
    workspace = _workspace(inputs)  # zeros: it holds semaphores

    def call(number: int) -> Tensor:
        given = inputs.tensors[number]
        out: Tensor = flashinfer.decode.xqa_batch_decode_with_kv_cache(
            query=given["query"],
            kv_cache=(given["key_cache"], given["value_cache"]),
            workspace_buffer=workspace,
            block_tables=step.page_table,
            seq_lens=step.seq_lens,
            max_seq_len=step.kv_len,
            bmm1_scale=scale_of(request),
            bmm2_scale=1.0,
            window_left=request.window[0],
            kv_layout="NHD",
        )
        return out

    return call


def cascade(inputs: Inputs) -> Call:
    """Two levels: what all sequences share is read once, for the queries of all of them."""
    request = _taken(inputs, ("paged",), "causal", "softcap", "kv_parts")
    if not request.kv_parts:
        raise UnsupportedRequestError("takes rows with a prefix that all sequences share")
    extra, size, device = inputs.extra, request.page_size, inputs.device
    (part,) = extra["kv_parts"]
    table, lens, starts = extra["tables"][:3]
    own = csr(table, lens, size)
    shared = csr(part.page_table[:1], part.seq_lens[:1], size)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, _workspace(inputs), "NHD")
    wrapper.plan(
        [torch.tensor([0, inputs.workload.tokens], dtype=torch.int32, device=device), starts],
        *([*level] for level in zip(shared, own, strict=True)),
        num_qo_heads=request.heads,
        num_kv_heads=request.kv_heads,
        head_dim=request.head_dim,
        page_size=size,
        causal=request.causal != "none",
        sm_scale=scale_of(request),
        logits_soft_cap=request.softcap or None,
        # Names are what its signature says it takes.
        **{name: str(dtype).removeprefix("torch.") for name, dtype in _types(inputs).items()},
    )
    return lambda number: wrapper.run(inputs.tensors[number]["query"], _caches(inputs, number))


def _taken(inputs: Inputs, families: Sequence[str], *options: str) -> AttentionRequest:
    """`only`, of the templates of its wrappers."""
    request = only(inputs, families, *options)
    if request.dims not in _DIMS:
        raise UnsupportedRequestError(f"takes head dims {', '.join(map(str, _DIMS))}, this row has {request.dims}")
    return request


def _workspace(inputs: Inputs) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=inputs.device)


def _types(inputs: Inputs) -> dict[str, Any]:
    given = inputs.tensors[0]
    dtype = given["query"].dtype
    return {"q_data_type": dtype, "kv_data_type": given["key_cache"].dtype if "key_cache" in given else dtype}


def _scales(inputs: Inputs, request: AttentionRequest) -> dict[str, float]:
    """Of an FP8 cache, as numbers of the host: they are those of the model, and the same for each step."""
    if request.kv_scales not in ("", "tensor"):
        raise UnsupportedRequestError(f"takes one scale for a cache, not one by {request.kv_scales}")
    given = {**inputs.extra, **inputs.tensors[0]}
    return {name: float(given[name]) for name in ("k_scale", "v_scale") if given.get(name) is not None}


def _masking(request: AttentionRequest) -> dict[str, Any]:
    """A window has no right bound there, but the causal mask."""
    if request.window[1] >= 0:
        raise UnsupportedRequestError("its windows have no bound on the right")
    return {"window_left": request.window[0], "logits_soft_cap": request.softcap or None}


def _any(inputs: Inputs, backend: str) -> Call:
    family = inputs.workload.request.family
    if family == "mla":
        return _latent(inputs, backend)
    return _extend(inputs, backend) if family == "paged" else _ragged(inputs, backend)


def _ragged(inputs: Inputs, backend: str) -> Call:
    request = _taken(inputs, ("dense", "varlen"), *_TAKES)
    dense = request.family == "dense"
    batch, (s_q, s_k) = inputs.workload.batch, inputs.workload.longest
    one = torch.arange(batch + 1, dtype=torch.int32, device=inputs.device)
    starts = (one * s_q, one * s_k) if dense else (inputs.extra["cu_seqlens_q"], inputs.extra["cu_seqlens_k"])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(inputs), "NHD", backend=backend)
    wrapper.plan(
        *starts,
        num_qo_heads=request.heads,
        num_kv_heads=request.kv_heads,
        head_dim_qk=request.dims[0],
        head_dim_vo=request.dims[1],
        causal=request.causal != "none",
        sm_scale=scale_of(request),
        **_masking(request),
        **_types(inputs),
    )
    shape = inputs.tensors[0]["query"].shape[:-2]
    names = ("query", "key", "value")
    sets = [tuple(some[n].flatten(0, 1) if dense else some[n] for n in names) for some in inputs.tensors]
    return lambda number: wrapper.run(*sets[number]).unflatten(0, shape)


def _caches(inputs: Inputs, number: int) -> tuple[Tensor, Tensor]:
    return inputs.tensors[number]["key_cache"], inputs.tensors[number]["value_cache"]


def _extend(inputs: Inputs, backend: str) -> Call:
    # The template for Hopper takes FP8 caches beside FP8 queries alone.
    request = _taken(inputs, ("paged",), *_TAKES, *(_CACHE if backend == "fa2" else _CACHE[:1]))
    step, scales = plain_step(inputs), _scales(inputs, request)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(inputs), "NHD", backend=backend)
    wrapper.plan(
        step.cu_seqlens_q,
        step.kv_indptr,
        step.kv_indices,
        step.last_page_len,
        num_qo_heads=request.heads,
        num_kv_heads=request.kv_heads,
        head_dim_qk=request.head_dim,
        page_size=request.page_size,
        causal=request.causal != "none",
        sm_scale=scale_of(request),
        **_masking(request),
        **_types(inputs),
    )
    return lambda number: wrapper.run(inputs.tensors[number]["query"], _caches(inputs, number), **scales)


def _decode(inputs: Inputs, **how: Any) -> Call:
    request = _taken(inputs, ("paged",), "window", "softcap", *_CACHE)
    step, scales = plain_step(inputs), _scales(inputs, request)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(inputs), "NHD", **how)
    wrapper.plan(
        step.kv_indptr,
        step.kv_indices,
        step.last_page_len,
        num_qo_heads=request.heads,
        num_kv_heads=request.kv_heads,
        head_dim=request.head_dim,
        page_size=request.page_size,
        sm_scale=scale_of(request),
        **_masking(request),
        **_types(inputs),
    )
    return lambda number: wrapper.run(inputs.tensors[number]["query"], _caches(inputs, number), **scales)


def _latent(inputs: Inputs, backend: str) -> Call:
    request = only(inputs, ("mla",), "causal", "v_head_dim")
    step, latent = plain_step(inputs), request.dims[1]
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(inputs), backend=backend)
    wrapper.plan(
        qo_indptr=step.cu_seqlens_q,
        kv_indptr=step.kv_indptr,
        kv_indices=step.kv_indices,
        kv_len_arr=step.seq_lens,
        num_heads=request.heads,
        head_dim_ckv=latent,
        head_dim_kpe=request.head_dim - latent,
        page_size=request.page_size,
        causal=request.causal != "none",
        sm_scale=scale_of(request),
        **_types(inputs),
    )

    def call(number: int) -> Tensor:
        query, cache = inputs.tensors[number]["query"], inputs.tensors[number]["cache"]
        out: Tensor = wrapper.run(
            q_nope=query[..., :latent],
            q_pe=query[..., latent:],
            ckv_cache=cache[..., :latent],
            kpe_cache=cache[..., latent:],
        )
        return out

    return call
