"""This module gives attention weights, which a fused call never stores: `output_attentions=True` goes to the model's
own eager code."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedRequestError
from ..common.keywords import asked_by
from .borders import with_borders
from .keywords import EAGER_STEP, More
from .masks import says_causal, with_more

__all__ = ["eager_with_weights"]

_told: set[str] = set()
"""Classes of layers about which a warning was given."""


def eager_with_weights(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    position_ids: Any,
    more: More,
    given: dict[str, Any],
    backend: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the eager attention of a layer's own model gives: [B, S_q, H_q, D_v] and the weights [B, H_q, S_q,
    S_k].

    Args:
        query ... position_ids: as of the attention function. more: of the keywords `given`, all the others.

    Raises:
        UnsupportedRequestError: the module of the layer has no `eager_attention_forward`.
    """
    kind, eager = type(module).__name__, _eager_of(type(module))
    if eager is None:
        reason = "the weights of a fused attention are never stored, and its code has no eager_attention_forward"
        raise UnsupportedRequestError(
            f"output_attentions reached {asked_by(module, backend)}: {reason}; {EAGER_STEP}",
            {"output_attentions": [reason]},
        )
    if not torch.compiler.is_compiling() and kind not in _told:
        _told.add(kind)
        warnings.warn(
            f"polyattn: output_attentions=True asks {kind} for weights, which a fused attention never stores: "
            f"these calls go to the model's own eager attention, which is slower and holds S_q x S_k weights",
            RuntimeWarning,
            stacklevel=3,
        )
    s_q, s_k = query.shape[2], key.shape[2]
    if position_ids is not None and 1 < s_q == s_k:  # with a mask, so that the borders come as numbers
        more = with_borders(more, None, position_ids, query.shape[0], query, module, is_causal) or more
    if mask is None:
        causal = says_causal(module, s_q, s_k, backend) if is_causal is None else is_causal
        mask = _plain(query, key, causal, sliding_window)
    mask = with_more(mask, dataclasses.replace(more, bias=None), query, key, module, backend)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    words = {
        "sliding_window": sliding_window,
        "softcap": softcap,
        "s_aux": s_aux,
        "position_ids": position_ids,
        **given,
    }
    out: tuple[Tensor, Tensor | None] = eager(
        module, query, key, value, mask, dropout=dropout, scaling=scale,
        **{name: word for name, word in words.items() if word is not None},
    )  # fmt: skip
    return out


def _eager_of(kind: type) -> Callable[..., Any] | None:
    for one in kind.__mro__:
        if eager := getattr(sys.modules.get(one.__module__), "eager_attention_forward", None):
            return eager  # type: ignore[no-any-return]
    return None


def _plain(query: Tensor, key: Tensor, causal: bool, window: int | None) -> Tensor | None:
    """Make the mask that a missing one stands for, bool [1, 1, S_q, S_k]; None where every key is seen."""
    s_q, s_k = query.shape[2], key.shape[2]
    if s_q == 1:  # the last position
        rows, causal = torch.tensor([[s_k - 1]], device=query.device), False
    else:
        rows = torch.arange(s_q, device=query.device)[:, None]
    left = rows - torch.arange(s_k, device=query.device)
    allowed = None
    if causal:
        allowed = left >= 0
    if window is not None:
        near = (left < window) & (left > -window)
        allowed = near if allowed is None else allowed & near
    return None if allowed is None else allowed[None, None]
