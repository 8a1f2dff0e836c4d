"""Family `paged` by Wave kernels, as SGLang builds them from wave-lang's templates.

From their sources (sglang/srt/layers/attention/wave_ops/*.py, wave_lang/kernel/wave/templates/*.py): caches are read by
token, [tokens, H_kv, D] without gaps; a softcap is known. Decode takes a scale and computes with D ** -0.5. Extend
wants the keys and values of the query tokens apart, the lists of the tokens before them, and takes masks that it does
not read. One program is compiled for each number of sequences, and in extend for each number of queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import append_new_kv, empty_result, load, with_positive_scale
from polyattn.contract import AttentionRequest, Bound, PagedTables
from polyattn.semantics.paged_kv import Pool, Tokens

from .aiter.tokens import token_lists
from .records.serving import SGLANG

__all__ = ["Wave"]

_OPS = "sglang.srt.layers.attention.wave_ops"
_SPLITS = 8
"""Parts that the keys of a sequence are split into at decode; SGLang's default."""


class Wave:
    """Binds paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: SGLang or wave-lang cannot be imported here.
        """
        if request.s_relation == "one":
            return Bound(_Decode(request))
        return with_positive_scale(request, lambda positive: Bound(_Extend(positive)))


class _Extend:
    """A `contract.PagedForward` for several queries each."""

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        self.scale = request.softmax_scale
        self._extend = load(SGLANG, f"{_OPS}.extend_attention:extend_attention_wave")

    def __call__(
        self,
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        out: Tensor | None = None,
        **_: None,
    ) -> Any:
        request = self.request
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(request, query, out)
        if key is not None:
            caches, tables = append_new_kv(request, query, caches, tables, key, value)
        caches = tuple(cache.contiguous() for cache in caches)
        room = torch.empty_like(query, memory_format=torch.contiguous_format)
        tokens = Tokens.of(query, tables)
        self.attend(query.contiguous(), caches, tables, room)
        sees = tokens.real if request.causal != "none" else (tables.seq_lens > 0)[tokens.sequence]
        room = room.masked_fill_(~sees[:, None, None], 0.0)
        return room if out is None else out.copy_(room)

    def attend(self, query: Tensor, caches: tuple[Tensor, ...], tables: PagedTables, room: Tensor) -> None:
        """Write the result into `room` [T_q, H_q, D]."""
        request = self.request
        slots = Tokens.of(query, tables).slots(tables.page_table, request.page_size)
        # A padding query's row is any, and is masked afterwards.
        own = [Pool(request, cache).rows(slots, query.dtype).contiguous() for cache in caches]
        prefix = (tables.seq_lens - tables.cu_seqlens_q.diff()).clamp(min=0)
        pools, lists = token_lists(caches, tables.changed(seq_lens=prefix))
        self._extend(
            q_extend=query, k_extend=own[0], v_extend=own[1],
            k_buffer=pools[0].squeeze(1), v_buffer=pools[1].squeeze(1),
            qo_indptr=tables.cu_seqlens_q, kv_indptr=lists.indptr, kv_indices=lists.indices,
            custom_mask=None, mask_indptr=None, max_seq_len=tables.max_seqlen_q, output=room,
            is_causal=request.causal != "none", layer_scaling=self.scale, logit_cap=request.softcap,
        )  # fmt: skip


class _Decode(_Extend):
    """One query each. A batch with a row of padding has fewer queries than sequences, and goes the other way."""

    def __init__(self, request: AttentionRequest) -> None:
        super().__init__(request)
        module = f"{_OPS}.decode_attention"
        self._decode = load(SGLANG, f"{module}:decode_attention_wave")
        self._shapes = load(SGLANG, f"{module}:decode_attention_intermediate_arrays_shapes")

    def attend(self, query: Tensor, caches: tuple[Tensor, ...], tables: PagedTables, room: Tensor) -> None:
        count = tables.seq_lens.shape[0]
        if tables.max_seqlen_q != 1 or query.shape[0] != count:
            super().attend(query, caches, tables, room)
            return
        pools, lists = token_lists(caches, tables)
        shapes = self._shapes(
            num_seqs=count, head_size_kv=query.shape[2], num_query_heads=query.shape[1], max_kv_splits=_SPLITS
        )
        logits, largest = (query.new_empty(shape, dtype=torch.float32) for shape in shapes)
        self._decode(
            q=query, k_buffer=pools[0].squeeze(1), v_buffer=pools[1].squeeze(1), o=room,
            b_req_idx=lists.indptr, req_to_token=lists.indices, attn_logits=logits, attn_logits_max=largest,
            num_kv_splits=None, max_kv_splits=_SPLITS, sm_scale=self.scale, logit_cap=self.request.softcap,
        )  # fmt: skip
