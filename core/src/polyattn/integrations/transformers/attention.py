"""The attention function that transformers' layers call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...dispatch import attention, varlen_attention
from ...errors import InvalidInputError
from .keywords import More, asked_by, read_keywords
from .masks import fitted, with_more

__all__ = ["make_forward"]

_ALL = (-1, -1)


def make_forward(
    backend: str | None,
    harmless: frozenset[str],
    dense: Callable[..., Any] = attention,
    packed: Callable[..., Any] = varlen_attention,
) -> Callable[..., tuple[Tensor, None]]:
    """Build an attention function.

    Args:
        backend: the backend every call of it asks for, None = whatever overrides and selection say.
        harmless: keywords to leave unread. dense, packed: the calls to make.
    """

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
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """One layer's attention.

        Args:
            module: the layer; `is_causal` is read from it when the keyword is not given.
            query: [B, H_q, S_q, D]. key: [B, H_kv, S_k, D]. value: [B, H_kv, S_k, D_v].
            attention_mask: broadcasts to [B, H_q, S_q, S_k], bool (True = attend) or float (added). It says
                everything about positions: causality and windows are read only where there is none.
            dropout: on the weights; only while the layer trains. scaling: of the logits, None = D ** -0.5.
            sliding_window: keys a row sees, its own included. softcap: logit cap. s_aux: sink logits [H_q].
            kwargs: see `keywords.py`.

        Returns:
            [B, S_q, H_q, D_v], contiguous, and None for the weights.

        Raises:
            UnsupportedRequestError, InvalidInputError: as `read_keywords`, `fitted` and `polyattn.attention`.
        """
        more = None
        if kwargs and not kwargs.keys() <= harmless:
            more = read_keywords(kwargs, harmless, module, backend)
            if more.sinks is not None:
                if s_aux is not None:
                    raise InvalidInputError(f"both s_aux and sinks reached {asked_by(module, backend)}; pass one of them")
                s_aux = more.sinks
        if dropout and not module.training:
            dropout = 0.0
        causal = False
        window = _ALL
        if attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            if more is not None and more.cu_q is not None and more.bias is None:
                return _packed(query, key, value, causal, sliding_window, softcap, s_aux, scaling, dropout, more), None
            s_q, s_k = query.shape[2], key.shape[2]
            if causal:
                if s_q == 1:
                    causal = False
                elif s_k > s_q:
                    # A static cache that is being filled: its keys past the last query are not written yet.
                    key, value, s_k = key[:, :, :s_q], value[:, :, :s_q], s_q
                    if more is not None and more.bias is not None:
                        more = dataclasses.replace(more, bias=more.bias[..., :s_q])
            if sliding_window is not None and s_k > sliding_window:
                window = _window(sliding_window, is_causal, module, backend)
        ...
