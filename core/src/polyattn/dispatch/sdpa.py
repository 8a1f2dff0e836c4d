"""`polyattn.scaled_dot_product_attention`: torch's signature, torch's rules, polyattn's backends."""

from __future__ import annotations

import math
from typing import Any, cast

from torch import Tensor

# It takes torch's own function when it is imported: let that be before a program puts the one below in its place.
from ..backends import torch_sdpa as _torch_sdpa  # noqa: F401
from ..contract import scalars
from ..contract.lengths import extent_of
from ..errors import InvalidInputError
from ..semantics import validation
from .binding import Asked, explained_by
from .call_key import Static
from .compile.symbolic import recorded
from .dense import attention, dense_request

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
        query: [..., S_q, D], of two dimensions at least, heads before the length where there are any: [B, H_q, S_q, D].
        key, value: [..., S_k, D], [..., S_k, D_v]. Leading axes broadcast, heads too; missing ones are 1.
        attn_mask: broadcastable to [..., S_q, S_k]; bool (True = attend) or float; or a `CausalBias` of
            torch.nn.attention.bias. Not with is_causal.
        dropout_p: as torch's: 1 drops every weight. is_causal: a bool. scale: as torch's.
        enable_gqa: allow fewer heads in key and value than in query.

    A tensor whose last axis is not dense is copied, as torch does.

    Raises:
        InvalidInputError: shapes or a combination torch refuses too; else as `polyattn.attention`.
    """
    causal: Any = "top_left" if is_causal is True else is_causal is not False and _causal(is_causal)
    if dropout_p.__class__ is not float:
        dropout_p = _number(dropout_p)
    if scale is not None and scale.__class__ is not float:
        scale = _number(scale)
    if dropout_p == 1.0:
        return scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa) * 0.0
    if attn_mask is not None:
        attn_mask, causal = _alignment(query, key, value, attn_mask, causal)
    try:
        if attn_mask is None and isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):
            q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
            # The usual call needs nothing of what follows.
            if (
                len(q_shape) == len(k_shape) == len(v_shape) == 4
                and q_shape[0] == k_shape[0] == v_shape[0]
                and k_shape[1] == v_shape[1]
                and (enable_gqa is True or (enable_gqa is False and q_shape[1] == k_shape[1]))
            ):
                usual: Tensor = attention(
                    query, key, value, causal=causal, scale=scale, layout="BHSD", dropout_p=dropout_p
                )
                return usual
    except (InvalidInputError, RuntimeError):
        # Of a nested tensor there is no shape. That a last axis is not dense is seen here to cost other calls nothing.
        if _plain(query, key, value) and all(map(_dense, (query, key, value))):
            raise
    if not isinstance(query, Tensor):
        flags = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        node: Any = recorded(scaled_dot_product_attention, query, key, value, attn_mask, **flags)
        if node is not None:
            return cast(Tensor, node)
    q, k, v, mask, lead = _four(query, key, value, attn_mask, bool(causal), enable_gqa)
    out: Tensor = attention(q, k, v, causal=causal, attn_mask=mask, scale=scale, layout="BHSD", dropout_p=dropout_p)
    return out.reshape(*lead, out.shape[-2], out.shape[-1])


def _causal(is_causal: Any) -> str | bool:
    return scalars.flag("is_causal", is_causal) and "top_left"


def _number(number: Any) -> Any:
    """A number as torch reads it: bools are numbers, and of a tensor without axes its value is."""
    if isinstance(number, Tensor) and number.ndim == 0 and not number.requires_grad:
        number = number.item()
    return float(number) if isinstance(number, bool) else number


def _plain(*tensors: Any) -> bool:
    """Whether tensors can be attended as they are.

    Raises:
        InvalidInputError: one is nested, sparse or distributed.
    """
    for name, tensor in zip(("query", "key", "value", "attn_mask"), tensors, strict=False):
        if isinstance(tensor, Tensor):
            validation.check_plain(name, tensor)
    return True


def _dense(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or not tensor.ndim or tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def _alignment(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, causal: bool | str) -> tuple[Any, bool | str]:
    """The mask and `causal` (S3). torch's `CausalBias` is the name of an alignment: there are no numbers in it."""
    if causal or type(attn_mask).__name__ != "CausalBias":
        return attn_mask, causal
    _matrices(query, key, value)
    made_for, given = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    if made_for != given:
        raise InvalidInputError(
            f"attn_mask is a CausalBias for lengths {made_for}, query and key have {given}; make it for those"
        )
    return None, attn_mask.variant.name == "LOWER_RIGHT" or "top_left"


def _matrices(*tensors: Any) -> None:
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        _plain(*tensors)
        if not isinstance(tensor, Tensor) or tensor.ndim < 2:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInputError(f"{name} is {shape}; a tensor of 2 dimensions or more [..., S, D] is needed")


def _four(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """The arguments as [B, H, S, D] with a dense last axis, and the leading axes to give back."""
    _matrices(query, key, value)
    enable_gqa = scalars.flag("enable_gqa", enable_gqa)
    if is_causal and attn_mask is not None:
        raise InvalidInputError("attn_mask and is_causal=True exclude each other, as in torch; pass one of them")
    given = (query, key, value)
    rank = max(t.ndim for t in given)
    # Of three axes the first is the batch, unless heads are spoken of.
    axes = max(rank, 4) if enable_gqa else rank
    q, k, v = (t[(None,) * (axes - t.ndim)] for t in given)
    grouped = axes >= 4
    if grouped:
        q, k, v = _heads(q, k, v, enable_gqa)
    batch = _broadcast(*(t.shape[: -3 if grouped else -2] for t in (q, k, v)))
    lead = (*batch, q.shape[-3]) if grouped else batch
    q, k, v = (_collapse(t, batch, grouped) for t in (q, k, v))
    mask = _mask(attn_mask, lead, (q.shape[0], q.shape[1]), query.shape[-2], key.shape[-2])
    return q, k, v, mask, lead[axes - rank :]


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads as `attention` takes them: as many of key as of value, and in query a multiple of those."""
    h_q, h_k, h_v = (t.shape[-3] for t in (query, key, value))
    if enable_gqa:
        if h_k == h_v or not h_k or not h_v or h_q % h_k or h_q % h_v:
            return query, key, value
        return query, key.repeat_interleave(h_q // h_k, -3), value.repeat_interleave(h_q // h_v, -3)
    heads = next((n for n in (h_q, h_k, h_v) if n != 1), 1)
    if any(n not in (1, heads) for n in (h_q, h_k, h_v)):
        others = f"key {h_k}" if h_k == h_v else f"key {h_k}, value {h_v}"
        raise InvalidInputError(f"query has {h_q} heads, {others}; pass enable_gqa=True for grouped heads")
    if h_q != heads:
        query = query.expand(*query.shape[:-3], heads, *query.shape[-2:])
    if h_k != h_v:
        key, value = (t.expand(*t.shape[:-3], heads, *t.shape[-2:]) for t in (key, value))
    return query, key, value


def _broadcast(*leads: tuple[int, ...]) -> tuple[int, ...]:
    """The batch axes of the result."""
    lead = []
    for sizes in zip(*leads, strict=True):
        widest = next((n for n in sizes if n != 1), 1)
        if any(n not in (1, widest) for n in sizes):
            raise InvalidInputError(f"batch axes of query, key and value do not broadcast: sizes {sizes}")
        lead.append(widest)
    return tuple(lead)


def _collapse(tensor: Tensor, batch: tuple[int, ...], grouped: bool) -> Tensor:
    # A size of -1 could not be inferred beside one of 0.
    last = tensor.shape[-3:] if grouped else (1, *tensor.shape[-2:])
    tensor = tensor.expand(*batch, *tensor.shape[-3 if grouped else -2 :]).reshape(math.prod(batch), *last)
    return tensor if _dense(tensor) else tensor.contiguous()


def _mask(attn_mask: Tensor | None, lead: tuple[int, ...], four: tuple[int, ...], s_q: int, s_k: int) -> Tensor | None:
    """The mask as [B|1, H|1, S_q, S_k]."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise InvalidInputError(f"attn_mask is a {type(attn_mask).__name__}; a tensor, bool or float, is needed")
    _plain(None, None, None, attn_mask)
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


def _asked(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, **flags: Any) -> Asked:
    causal: Any = _causal(flags["is_causal"])
    attn_mask, causal = _alignment(query, key, value, attn_mask, causal)
    q, k, v, mask, _ = _four(query, key, value, attn_mask, bool(causal), flags["enable_gqa"])
    # Where every weight is dropped, nothing is drawn.
    dropout_p = 0.0 if dropout_p == 1 else _number(dropout_p)
    static = Static(causal=causal, scale=_number(flags["scale"]), layout="BHSD", dropout_p=dropout_p).checked()
    request = dense_request(static, q, k, v, mask, None, None)
    return request, None, extent_of(request)(q, k)


explained_by(scaled_dot_product_attention, _asked)
