"""This module makes the attention function that transformers' layers call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...dispatch.bound_table import Recent
from ...dispatch.call_key import SITES_KEPT
from ...dispatch.dense import attention, bind
from ...dispatch.varlen import varlen_attention
from ...errors import InvalidInputError
from ...selection.overrides import SCOPE
from ...semantics.merge_lse import merge
from ...serving.attention.multimodal import multimodal
from ..common.keywords import asked_by
from .batching import from_pages
from .borders import with_borders
from .keywords import More, read_keywords
from .masks import fitted, says_causal, with_more
from .weights import eager_with_weights

__all__ = ["make_forward"]

_EVERYWHERE = (-1, -1)

TOWERS = frozenset({"vision_config", "audio_config", "audio_video_config", "image_config"})
"""What a composite model's configuration calls its multimodal towers."""


_is_tracing = torch.compiler.is_dynamo_compiling
_scope = SCOPE.get


def make_forward(
    backend: str | None,
    harmless: frozenset[str],
    dense: Callable[..., Any] | None = None,
    packed: Callable[..., Any] = varlen_attention,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Build an attention function.

    Args:
        backend: the backend every call asks for, None = what overrides and selection say.
        harmless: keywords that are left unread. dense, packed: the calls it makes; dense None = `polyattn.attention`.
    """
    sites = _Sites(backend)

    def polyattn_attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_ids: Any = None,
        use_cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one layer's attention.

        Args:
            module: the layer; says `is_causal` where the keyword does not.
            query: [B, H_q, S_q, D]. key: [B, H_kv, S_k, D]. value: [B, H_kv, S_k, D_v].
            attention_mask: broadcasts to [B, H_q, S_q, S_k], bool (True = attend) or float (added). Where there is
                one it says everything about positions; causality and windows are read only where there is none.
            dropout: on the weights, only while the layer trains. scaling: of the logits, None = D ** -0.5.
            sliding_window: keys a row sees, its own included. softcap: logit cap. s_aux: sink logits [H_q].
            position_ids: [B|1, S_q]; where they start again in a causal layer without a cache, a new sequence begins
                that sees none of the others (`borders.py`).
            use_cache: unread, as all of `keywords.HARMLESS`; named because most calls bring just these two.
            kwargs: see `keywords.py`.

        Returns:
            [B, S_q, H_q, D_v], contiguous, and None; weights [B, H_q, S_q, S_k] only from a model's own eager code
            (`weights.py`).

        Raises:
            UnsupportedRequestError, InvalidInputError: as `read_keywords`, `fitted` and the call itself.
        """
        if getattr(type(getattr(module, "config", None)), "base_config_key", "") in TOWERS and not multimodal.entered():
            with multimodal():
                return polyattn_attention(
                    module, query, key, value, attention_mask, dropout, scaling, is_causal, sliding_window, softcap,
                    s_aux, **kwargs,
                )  # fmt: skip
        more, sinks, weights = None, s_aux, False
        if kwargs and not kwargs.keys() <= harmless:
            weights = kwargs.pop("output_attentions", False)
            if kwargs.get("cache") is not None:
                # Continuous batching says is_causal where it made no mask: what comes as one is none of its own.
                attention_mask, position_ids = None if is_causal else attention_mask, None
                key, value = from_pages(module, key, value, attention_mask is not None, kwargs, backend)
            more = read_keywords(kwargs, s_aux, harmless, module, backend)
            sinks = more.sinks
        if dropout and not module.training:
            dropout = 0.0
        if weights:
            return eager_with_weights(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, sliding_window, softcap, s_aux,
                position_ids, more or More(), kwargs, backend,
            )  # fmt: skip
        s_q, mask, window = query.shape[2], attention_mask, _EVERYWHERE
        if position_ids is not None and s_q > 1 and s_q == key.shape[2]:
            more = with_borders(more, sinks, position_ids, query.shape[0], mask, module, is_causal)
        dense_call, packed_call = dense, packed
        if more is not None and more.row_sinks is not None:
            given, shape = more.row_sinks.shape, query.shape
            if given[1:3] != shape[1:3] or given[0] not in (1, shape[0]):
                raise InvalidInputError(
                    f"sinks of shape {tuple(given)} reached {asked_by(module, backend)}; one sink per row and head is "
                    f"[B, H_q, S_q, 1] = {[*shape[:3], 1]}"
                )
            dense_call, packed_call = (_with_row_sinks(call, more.row_sinks) for call in (dense or attention, packed))
        causal: bool | str = False
        if mask is None:
            causal = says_causal(module, s_q, key.shape[2], backend) if is_causal is None else is_causal
            if more is not None and more.cu_q is not None and more.bias is None:
                if sliding_window is not None and more.max_k > sliding_window:
                    window = _window(sliding_window, causal, module, backend)
                out = packed_call(
                    _tokens(query), _tokens(key), _tokens(value), cu_seqlens_q=more.cu_q, cu_seqlens_k=more.cu_k,
                    max_seqlen_q=more.max_q, max_seqlen_k=more.max_k, causal=causal, window=window,
                    softcap=softcap or 0.0, sinks=sinks, scale=scaling, dropout_p=dropout,
                    deterministic=more.deterministic, backend=backend,
                )  # fmt: skip
                return out.reshape(query.shape[0], s_q, *out.shape[1:]), None
            if causal and s_q == 1:  # the last position sees every key
                causal = False
            elif causal and key.shape[2] > s_q:
                # A static cache being filled: rows count from its first key, and none sees past the last row.
                key, value = key[:, :, :s_q], value[:, :, :s_q]
                if more is not None and more.bias is not None:
                    more = dataclasses.replace(more, bias=more.bias[..., :s_q])
            elif causal and key.shape[2] < s_q:
                causal = "top_left"
            if sliding_window is not None and key.shape[2] > sliding_window:
                window = _window(sliding_window, causal, module, backend)
        if more is not None:
            mask = with_more(mask, more, query, key, module, backend)
        if mask is not None:
            mask = fitted(mask, s_q, key.shape[2], module, backend)
        softcap, exact = softcap or 0.0, more is not None and more.deterministic
        try:
            if dense_call is None and not _is_tracing():
                site = sites[
                    _scope(), causal, window, softcap, scaling, dropout, exact, type(causal), type(softcap),
                    type(scaling), type(dropout), type(exact),
                ]  # fmt: skip
                out = site(query, key, value, mask, sinks)
            else:
                out = (dense_call or attention)(
                    query, key, value, causal=causal, window=window, softcap=softcap, sinks=sinks, attn_mask=mask,
                    scale=scaling, layout="BHSD", dropout_p=dropout, deterministic=exact, backend=backend,
                )  # fmt: skip
        except InvalidInputError:
            if all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (query, key, value)):
                raise
            # A few vision towers attend over channels: the last axis is not dense, which no kernel takes (S1).
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
            return polyattn_attention(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, sliding_window, softcap, s_aux,
                position_ids, use_cache, **kwargs,
            )  # fmt: skip
        # Models may `view` the result. Most kernels write it in this order anyway, and then this copies nothing.
        return out.transpose(1, 2).contiguous(), None

    return polyattn_attention


class _Sites(Recent[Any, Callable[..., Any]]):
    """Bound calls of `polyattn.attention`, by (scope, causal, window, ..., types). attention() keeps the same table
    under more words; a layer calls often enough to feel those."""

    def __init__(self, backend: str | None) -> None:
        super().__init__(SITES_KEPT)
        self.backend = backend

    def __missing__(self, key: Any) -> Callable[..., Any]:
        if (known := self.recall(key)) is not None:
            return known
        _, causal, window, softcap, scaling, dropout, exact, *_ = key
        return self.keep(key, bind(
            causal=causal, window=window, softcap=softcap, scale=scaling, layout="BHSD", dropout_p=dropout,
            deterministic=exact, backend=self.backend,
        ).__call__)  # fmt: skip


def _window(size: int, causal: bool | str, module: Any, backend: str | None) -> tuple[int, int]:
    """Return the window of a row: transformers counts the row's own key, polyattn the others."""
    if size < 1:
        raise InvalidInputError(
            f"sliding_window={size} reached {asked_by(module, backend)}; a window has 1 key or more, None is no window"
        )
    return (size - 1, -1 if causal else size - 1)


def _with_row_sinks(call: Callable[..., Any], sinks: Tensor) -> Callable[..., Tensor]:
    """Make an attention call with a sink for each row and head, [B|1, H_q, S_q, 1], which scales the row's result
    (S5)."""

    def attend(query: Tensor, *others: Tensor, **options: Any) -> Tensor:
        out, lse = call(query, *others, return_lse=True, **options)
        if lse.ndim == 2:  # packed, [T, H_q]
            batch = lse.shape[0] // sinks.shape[2]
            return merge([out], [lse], sinks=sinks[..., 0].mT.expand(batch, -1, -1).reshape_as(lse), layout="THD")[0]
        return merge([out], [lse], sinks=sinks[..., 0].expand_as(lse), layout="BHSD")[0]

    return attend


def _tokens(tensor: Tensor) -> Tensor:
    """View [B, H, S, D] as packed tokens [B * S, H, D]."""
    tensor = tensor.transpose(1, 2)
    return tensor.reshape(-1, *tensor.shape[2:])
