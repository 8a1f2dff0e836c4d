"""`polyattn.scaled_dot_product_attention`: torch's signature, torch's rules, polyattn's backends."""

from __future__ import annotations

import math
from typing import Any, cast

from torch import Tensor

# It takes torch's own function when it is imported: let that be before a program puts the one below in its place.
from .backends import torch_sdpa as _torch_sdpa  # noqa: F401
from .dispatch import attention, dense_request
from .errors import InvalidInputError
from .inspection import explain
from .selection import Selection
from .signature import Static
from .symbolic import recorded

__all__ = ["scaled_dot_product_attention"]


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
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention` (S3: its causal mask is top-left aligned).

    Args:
        query: [..., S_q, D], 2-D to 5-D, heads before the length where there are any: [B, H_q, S_q, D].
        key, value: [..., S_k, D], [..., S_k, D_v]; leading axes broadcast against the query's, heads do not.
        attn_mask: broadcastable to [..., S_q, S_k]; bool (True = attend) or float; or a `CausalBias` of
            torch.nn.attention.bias. Not with is_causal.
        dropout_p, is_causal, scale: as torch's.
        enable_gqa: allow fewer heads in key and value than in query.

    Raises:
        InvalidInputError: shapes or a combination torch refuses too; else as `polyattn.attention`.
    """
    causal: Any = "top_left" if is_causal else False
    if attn_mask is not None:
        attn_mask, causal = _alignment(query, key, attn_mask, causal)
    if attn_mask is None and isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):
        q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
        # The usual call needs nothing of what follows.
        if (
            len(q_shape) == len(k_shape) == len(v_shape) == 4
            and q_shape[0] == k_shape[0] == v_shape[0]
            and (enable_gqa or q_shape[1] == k_shape[1])
        ):
            usual: Tensor = attention(query, key, value, causal=causal, scale=scale, layout="BHSD", dropout_p=dropout_p)
            return usual
    if not isinstance(query, Tensor):
        flags = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        node: Any = recorded(scaled_dot_product_attention, query, key, value, attn_mask, **flags)
        if node is not None:
            return cast(Tensor, node)
    q, k, v, mask, lead = _four(query, key, value, attn_mask, is_causal, enable_gqa)
    out: Tensor = attention(q, k, v, causal=causal, attn_mask=mask, scale=scale, layout="BHSD", dropout_p=dropout_p)
    return out.reshape(*lead, out.shape[-2], out.shape[-1])


def _alignment(query: Tensor, key: Tensor, attn_mask: Any, causal: bool | str) -> tuple[Any, bool | str]:
    """The mask and `causal` (S3). torch's `CausalBias` is the name of an alignment: there are no numbers in it."""
    if causal or type(attn_mask).__name__ != "CausalBias":
        return attn_mask, causal
    made_for, given = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    if made_for != given:
        raise InvalidInputError(
            f"attn_mask is a CausalBias for lengths {made_for}, query and key have {given}; make it for those"
        )
    return None, attn_mask.variant.name == "LOWER_RIGHT" or "top_left"


def _four(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """The arguments as [B, H, S, D] and the leading axes to give back."""
    named = (("query", query), ("key", key), ("value", value))
    for name, tensor in named:
        if not isinstance(tensor, Tensor) or not 2 <= tensor.ndim <= 5:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInputError(f"{name} is {shape}; a tensor of 2 to 5 dimensions [..., S, D] is needed")
    if not query.ndim == key.ndim == value.ndim:
        raise InvalidInputError(
            f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} dimensions; they must be equal"
        )
    if is_causal and attn_mask is not None:
        raise InvalidInputError("attn_mask and is_causal=True exclude each other, as in torch; pass one of them")
    if query.ndim >= 4 and not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise InvalidInputError(
            f"query has {query.shape[-3]} heads, key {key.shape[-3]}; pass enable_gqa=True for grouped heads"
        )
    if query.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        lead: tuple[int, ...] = tuple(query.shape[:2])
        return query, key, value, _mask(attn_mask, lead, lead, query.shape[2], key.shape[2]), lead
    lead = _lead(query, key, value)
    heads = lead[-1] if query.ndim >= 4 else 1
    q, k, v = (_collapse(t, lead[: -1 if query.ndim >= 4 else len(lead)]) for t in (query, key, value))
    mask = _mask(attn_mask, lead, (q.shape[0], heads), query.shape[-2], key.shape[-2])
    return q, k, v, mask, lead


def _lead(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Leading axes of the result: batch axes broadcast, the head axis is the query's."""
    last = -3 if query.ndim >= 4 else -2
    lead = []
    for sizes in zip(query.shape[:last], key.shape[:last], value.shape[:last], strict=True):
        widest = next((n for n in sizes if n != 1), 1)
        if any(n not in (1, widest) for n in sizes):
            raise InvalidInputError(f"batch axes of query, key and value do not broadcast: sizes {sizes}")
        lead.append(widest)
    return (*lead, query.shape[-3]) if query.ndim >= 4 else tuple(lead)


def _collapse(tensor: Tensor, batch: tuple[int, ...]) -> Tensor:
    # A size of -1 could not be inferred beside one of 0.
    if tensor.ndim >= 4:
        return tensor.expand(*batch, *tensor.shape[-3:]).reshape(math.prod(batch), *tensor.shape[-3:])
    return tensor.expand(*batch, *tensor.shape[-2:]).reshape(math.prod(batch), 1, *tensor.shape[-2:])


def _mask(attn_mask: Tensor | None, lead: tuple[int, ...], four: tuple[int, ...], s_q: int, s_k: int) -> Tensor | None:
    """The mask as [B|1, H|1, S_q, S_k]."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise InvalidInputError(f"attn_mask is a {type(attn_mask).__name__}; a tensor, bool or float, is needed")
    shape = tuple(attn_mask.shape)
    if not 1 <= len(shape) <= len(lead) + 2 or any(
        have not in (1, want) for have, want in zip(shape[::-1], (*lead, s_q, s_k)[::-1], strict=False)
    ):
        raise InvalidInputError(f"attn_mask has shape {shape}, it must broadcast to {(*lead, s_q, s_k)}")
    full = attn_mask.reshape(*([1] * (max(len(lead), 2) + 2 - len(shape))), *shape)
    full = full.expand(*full.shape[:-2], s_q, s_k)
    if full.ndim == 4 and len(lead) == 2:
        return full
    if len(lead) < 2:
        return full.expand(1, *lead, s_q, s_k).reshape(lead[0], 1, s_q, s_k) if lead else full
    return full.expand(*lead, s_q, s_k).reshape(*four, s_q, s_k)


def _explain_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Selection:
    causal: Any = "top_left" if is_causal else False
    attn_mask, causal = _alignment(query, key, attn_mask, causal)
    q, k, v, mask, _ = _four(query, key, value, attn_mask, is_causal, enable_gqa)
    static = Static(causal=causal, scale=scale, layout="BHSD", dropout_p=dropout_p).checked()
    return explain(dense_request(static, q, k, v, mask, None, None))


scaled_dot_product_attention.__polyattn_explain__ = _explain_sdpa  # type: ignore[attr-defined]
