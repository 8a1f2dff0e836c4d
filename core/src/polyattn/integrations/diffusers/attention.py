"""This module makes the attention function that diffusers' layers call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...dispatch.binding import asks_method
from ...dispatch.bound_table import Recent
from ...dispatch.call_key import SITES_KEPT, Static, site_of
from ...dispatch.dense import DenseSite
from ...dispatch.placed import at
from ...errors import InvalidInputError
from ...selection.overrides import SCOPE, Scope, above_components, current_scope
from ..common.keywords import refuse_unknown, refused
from .parallel import attend_parallel
from .places import HERE, placed, tell

__all__ = ["Everything", "make_attend", "make_sdpa"]

_is_tracing = torch.compiler.is_dynamo_compiling
_scope = SCOPE.get
_WHO = "attention of diffusers on polyattn"


class Everything(set):  # type: ignore[type-arg]
    """The names of arguments that a backend takes, as diffusers asks: all. It drops what is not among them without a
    word; what comes so is used, or refused by its name."""

    def __contains__(self, name: object) -> bool:
        return True


class _Sites(Recent[Any, Callable[..., Any]]):
    """Bound calls of `polyattn.attention`, by scope, backend and static arguments."""

    def __init__(self) -> None:
        super().__init__(SITES_KEPT)

    def __missing__(self, key: Any) -> Callable[..., Any]:
        if (known := self.recall(key)) is not None:
            return known
        scope, backend, causal, scale, dropout, lse, layout, *_ = key
        return self.keep(key, site_of(DenseSite, _static(causal, scale, dropout, lse, layout), backend, scope))


def _static(causal: bool, scale: float | None, dropout: float, lse: bool, layout: str) -> Static:
    return Static("top_left" if causal else False, scale=scale, layout=layout, dropout_p=dropout, return_lse=lse)


class _Plain(Recent[Any, Callable[..., Any]]):
    """The same for calls that say nothing but query, key and value, by scope and backend."""

    def __init__(self) -> None:
        super().__init__(SITES_KEPT)

    def __missing__(self, key: Any) -> Callable[..., Any]:
        if (known := self.recall(key)) is not None:
            return known
        scope, backend = key
        return self.keep(key, _sites[scope, backend, False, None, 0.0, False, "BSHD", (bool, type(None), float)])


_sites, _plain = _Sites(), _Plain()


def make_attend(pinned: str | None) -> Callable[..., Any]:
    """Make the function that stands behind a name.

    Args:
        pinned: the backend that every call asks for, None = what rules, overrides and selection say.
    """

    def polyattn_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
        **others: Any,
    ) -> Any:
        """Compute one layer's attention.

        Args:
            query: [B, S_q, H_q, D]. key: [B, S_k, H_kv, D]. value: [B, S_k, H_kv, D_v].
            attn_mask: [B, S_k], or 4-D and broadcasting to [B, H_q, S_q, S_k]; bool (True = attend) or float (added).
            dropout_p: on the weights. is_causal: as torch's SDPA, from the upper left corner. scale: of the logits,
                None = D ** -0.5. enable_gqa: whether H_kv may be less than H_q.
            return_lse: whether to return the log-sum-exp too, [B, S_q, H_q], natural log, fp32.
            _parallel_config: of context parallelism, see `parallel.py`; neither causal nor grouped calls, no dropout.

        Returns:
            [B, S_q, H_q, D_v], or (that, lse).

        Raises:
            UnsupportedRequestError: an argument that cannot be honoured. InvalidInputError: as `polyattn.attention`.
        """
        if (
            attn_mask is None
            and is_causal is False
            and scale is None
            and return_lse is False
            and _parallel_config is None
            and HERE.part is None
            and not (others or dropout_p or type(dropout_p) is not float or _is_tracing())
        ):
            _check_heads(query.shape[2], key.shape[2], enable_gqa)
            return _plain[_scope(), pinned](query, key, value)
        if others:
            refuse_unknown(others, _WHO, "compute this layer with another attention backend of diffusers")
        _check_heads(query.shape[2], key.shape[2], enable_gqa)
        if attn_mask is not None:
            attn_mask = _fitted(attn_mask, query.shape[0], query.shape[1], key.shape[1])
        if _parallel_config is not None:
            return _parallel(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
                return_lse,
                _parallel_config,
                pinned,
            )
        return _call(query, key, value, attn_mask, dropout_p, is_causal, scale, return_lse, "BSHD", pinned)

    return polyattn_attention


def make_sdpa(pinned: str | None) -> Callable[..., Tensor]:
    """Make a stand-in of `torch.nn.functional.scaled_dot_product_attention` for layers that call it themselves. Its
    arguments and results are those of torch; `pinned` as in `make_attend`."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        _check_heads(query.shape[1], key.shape[1], enable_gqa)
        if attn_mask is not None:
            attn_mask = _fitted(attn_mask, query.shape[0], query.shape[2], key.shape[2])
        found: Tensor = _call(query, key, value, attn_mask, dropout_p, is_causal, scale, False, "BHSD", pinned)
        return found

    return scaled_dot_product_attention


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    lse: bool,
    layout: str,
    pinned: str | None,
) -> Any:
    tracing = _is_tracing()
    scope: Scope = current_scope() if tracing else _scope()
    if HERE.part is not None:
        return placed(query, key, value, mask, _static(causal, scale, dropout, lse, layout), pinned, scope)
    if tracing:
        tensors = query, key, value, mask, None, None
        return at(tensors, _static(causal, scale, dropout, lse, layout), pinned, scope, None)
    kinds = type(causal), type(scale), type(dropout)
    return _sites[scope, pinned, causal, scale, dropout, lse, layout, kinds](query, key, value, mask)


def _parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    lse: bool,
    config: Any,
    pinned: str | None,
) -> Any:
    scope: Scope = current_scope() if _is_tracing() else _scope()
    backend = pinned
    if HERE.part is not None:
        if pinned is None and not above_components(scope):
            backend = HERE.backend
        scope = scope[0], HERE.part.name, HERE.role
    for name, given in (("is_causal", causal), ("enable_gqa", grouped), ("dropout_p", dropout)):
        if given:
            raise refused(
                name, _WHO, "context parallelism of diffusers has none", "leave enable_parallelism() out for this model"
            )
    if asks_method(backend, scope):
        raise refused(
            "_parallel_config", _WHO, "a method of sparse attention needs to know which tokens and heads a rank has",
            "name a dense backend, or polyattn.nn.UlyssesAttention in a model of your own",
        )  # fmt: skip
    if HERE.part is not None and not _is_tracing():
        # Parts are attended with their LSE, whether the layer wants it or not.
        static = _static(causal=False, scale=scale, dropout=0.0, lse=True, layout="BSHD")
        tell(HERE.part, (query, key, value, mask), static, backend, scope, None)
    return attend_parallel(query, key, value, mask, scale, lse, config, backend, scope)


def _check_heads(heads: int, kv_heads: int, grouped: bool) -> None:
    if heads != kv_heads and not grouped:
        raise InvalidInputError(
            f"{heads} query heads and {kv_heads} key heads reached {_WHO} with enable_gqa=False; pass enable_gqa=True "
            "where queries share keys, or as many key heads as query heads"
        )


def _fitted(mask: Tensor, batch: int, s_q: int, s_k: int) -> Tensor:
    """Make a mask of keys, or one that broadcasts, a mask of [B|1, H|1, S_q, S_k]."""
    if mask.ndim == 2 and mask.shape == (batch, s_k):
        mask = mask[:, None, None]
    elif mask.ndim in (2, 3):
        mask = mask[(None,) * (4 - mask.ndim)]
    if mask.ndim == 4 and mask.shape[2:] != (s_q, s_k) and mask.shape[2] in (1, s_q) and mask.shape[3] in (1, s_k):
        mask = mask.expand(-1, -1, s_q, s_k)
    return mask
