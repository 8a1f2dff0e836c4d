"""This module is SGLang's attention backend polyattn: models over its token pool, which is read as pages.

Models of latent attention come in two forms: absorbed, over the latent rows of the pool, and prompts without a cached
prefix as dense heads. SGLang decides which, and for a backend of another name as for its own Triton's.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from ...dispatch.paged import mla_attention
from ...dispatch.varlen import varlen_attention
from ...errors import UnsupportedRequestError
from ...serving.layer import AttentionLayer
from ..common.capabilities import reasons_against
from ..common.steps import HostStep, attend, requests_of
from . import NAME

__all__ = ["PolyattnAttnBackend"]

_FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


class PolyattnAttnBackend(AttentionBackend):  # type: ignore[misc]
    """A model's attention.

    Args:
        runner: SGLang's ModelRunner.

    Raises:
        UnsupportedRequestError: the model or the server has what is not served through this backend, named.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if getattr(runner, "is_hybrid_swa", False):
            raise _refused("a pool of its own for sliding windows (leave it out by --disable-hybrid-swa-memory)")
        self.latent = bool(getattr(runner, "use_mla_backend", False))
        # SGLang's models look for the pools here, by these names.
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.page_size = runner.page_size
        self.dtype = getattr(runner, "dtype", torch.bfloat16)
        self._layers: dict[int, AttentionLayer] = {}
        self._step: HostStep | None = None

    # A step -----------------------------------------------------------------------------------------------------------

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Put what SGLang knows of a step into polyattn's words, once for all layers."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle():
            return
        if getattr(batch, "encoder_lens", None) is not None:
            raise _refused("cross-attention")
        longest = int(max(_on_host(batch, "seq_lens"), default=0))
        lengths, spec, tree = batch.seq_lens.to(torch.int32), batch.spec_info, None
        if mode.is_decode() or mode.is_target_verify():
            widest = spec.draft_token_num if mode.is_target_verify() else 1
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device) * widest
            if mode.is_target_verify():
                # Lengths are those before the drafts.
                longest, tree = longest + widest, _tree(spec, batch.seq_lens, longest)
                lengths = lengths + widest
            elif getattr(spec, "kv_indptr", None) is not None:
                raise _refused("the steps of a draft model (name --speculative-draft-attention-backend triton for it)")
        else:
            starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            widest = int(max(_on_host(batch, "extend_seq_lens"), default=0))
        slots = self.req_to_token_pool.req_to_token
        table = slots[batch.req_pool_indices, : longest : self.page_size] // self.page_size
        self._step = HostStep(
            page_table=table.to(torch.int32), seq_lens=lengths, cu_seqlens_q=starts, max_seqlen_q=widest,
            max_seqlen_k=longest, slots=batch.out_cache_loc, tokens=len(batch.out_cache_loc), tree=tree,
        )  # fmt: skip

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Refuse graphs of whole steps: calls choose by the lengths of a step."""
        raise _refused("device graphs of whole steps (leave them out by --disable-cuda-graph)")

    # A layer ----------------------------------------------------------------------------------------------------------

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        """Attend one new token of each sequence."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, more)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        """Attend prompts and chunks of them, each with what is cached before it."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, more)

    def _attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save: bool, more: dict[str, Any]
    ) -> Tensor:
        sinks, pool = more.pop("sinks", None), self.token_to_kv_pool
        if asked := [name for name, value in more.items() if value is not None]:
            raise _refused(f"the argument {asked[0]} of a layer's forward")
        step = self._step
        assert step is not None, "init_forward_metadata comes before the layers"
        if self.latent and layer.tp_k_head_num > 1:
            return self._prompt(q, k, v, layer, batch, save)
        if save and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self.latent:
            rows = pool.get_key_buffer(layer.layer_id)
            self._layer(layer, sinks, rows.dtype)
            whole = len(rows) // self.page_size * self.page_size
            out: Tensor = mla_attention(
                queries, rows[:whole].view(-1, self.page_size, rows.shape[-1]), **step.keywords,
                scale=layer.scaling, v_head_dim=layer.v_head_dim,
            )  # fmt: skip
            return out.flatten(1)
        caches = [get(layer.layer_id) for get in (pool.get_key_buffer, pool.get_value_buffer)]
        # Slots beside each other are pages: [slots, H_kv, D] is read as [pages, page_size, H_kv, D].
        whole = len(caches[0]) // self.page_size * self.page_size
        pages = [cache[:whole].view(-1, self.page_size, *cache.shape[1:]) for cache in caches]
        scales: dict[str, Any] = {}
        if caches[0].dtype in _FP8:
            one = torch.ones((), device=q.device)
            scales = {"k_scale": _or(layer.k_scale, one), "v_scale": _or(layer.v_scale, one)}
        found = attend(
            step, self._layer(layer, sinks, caches[0].dtype), queries, pages[0], pages[1], **scales,
        )  # fmt: skip
        return found.flatten(1)

    def _prompt(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save: bool) -> Tensor:
        """Attend prompts of latent attention as dense heads; their rows are in the pool already."""
        step = self._step
        assert step is not None
        cached = any(_on_host(batch, "extend_prefix_lens"))
        if k is None or v is None or save or cached or getattr(batch, "mha_return_lse", False):
            raise _refused("latent attention as dense heads of prompts that have a cached prefix")
        found: Tensor = varlen_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim), cu_seqlens_q=step.cu_seqlens_q,
            cu_seqlens_k=step.cu_seqlens_q, max_seqlen_q=step.max_seqlen_q, max_seqlen_k=step.max_seqlen_q, causal=True,
            scale=layer.scaling,
        )  # fmt: skip
        return found.flatten(1)

    def _layer(self, layer: Any, sinks: Tensor | None, stored: torch.dtype) -> AttentionLayer:
        """What a layer of SGLang is in polyattn's words. It is judged once, when it is first seen."""
        known = self._layers.get(layer.layer_id)
        if known is None or known.sinks is not sinks:
            if layer.is_cross_attention or getattr(layer.attn_type, "value", layer.attn_type) != "decoder":
                raise _refused(f"attention of type {layer.attn_type}")
            if getattr(layer, "xai_temperature_len", -1) > 0:
                raise _refused("a temperature by position (xai_temperature_len)")
            if self.latent and (stored in _FP8 or sinks is not None):
                raise _refused(f"latent attention with {'sinks' if sinks is not None else f'rows of {stored}'}")
            window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
            known = AttentionLayer(
                layer.layer_id, layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim,
                scale=layer.scaling, window=window, softcap=layer.logit_cap or 0.0, sinks=sinks, latent=self.latent,
            )  # fmt: skip
            asked = requests_of(
                known, dtype=self.dtype, device=self.req_to_token_pool.req_to_token.device, page_size=self.page_size,
                kv_dtype=_FP8.get(stored, "auto"), kv_layout="" if self.latent else "NHD",
            )  # fmt: skip
            if reasons := reasons_against(asked):
                raise UnsupportedRequestError(
                    f"layer {layer.layer_id} of the model is not served by polyattn: {'; '.join(reasons)}",
                    {NAME: reasons},
                )
            self._layers[layer.layer_id] = known
        return known


def _tree(spec: Any, before: Tensor, longest: int) -> Tensor | None:
    """Return what each draft sees, None where drafts are a chain.

    Args:
        spec: SGLang's, whose mask has for each sequence a row of all its keys for each draft, one after the other.
        before: [N], keys before the drafts. longest: of them.
    """
    if spec.topk == 1:
        return None
    drafts = spec.draft_token_num
    widths = before.long() + drafts
    first = (widths * drafts).cumsum(0) - widths * drafts
    column = torch.arange(longest + drafts, device=before.device)
    row = torch.arange(drafts, device=before.device)[:, None]
    cells = first[:, None, None] + row * widths[:, None, None] + column
    inside = column < widths[:, None, None]
    seen: Tensor = spec.custom_mask[cells.clamp(max=len(spec.custom_mask) - 1)].bool() & inside
    return seen[:, None]


def _on_host(batch: Any, name: str) -> Any:
    """Return lengths that the host knows; those that only the device knows are waited for."""
    known = getattr(batch, f"{name}_cpu", None)
    found = getattr(batch, name) if known is None else known
    return found.tolist() if isinstance(found, Tensor) else found


def _or(scale: Any, one: Tensor) -> Tensor:
    return one if scale is None else scale


def _refused(what: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{what}: not served by polyattn inside SGLang; choose another --attention-backend for this model",
        {NAME: [f"{what}: not served"]},
    )
