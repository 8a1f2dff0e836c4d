"""Checks that every family of calls makes: heads, widths and dtypes, mask, sinks and output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract.overlap import shares_memory
from ...errors import InvalidInputError
from .tensors import FLOATS, check_dense_axis, check_index, check_tensor, overlaps_itself


def check_heads_and_dtypes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    h_q: int,
    h_kv: int,
    h_v: int,
    kv_dtypes: bool = False,
    packed: int = 1,
    layout: str = "",
) -> None:
    names = (("query", query), ("key", key), ("value", value))
    for name, tensor in names:
        if tensor.dtype not in FLOATS and not (kv_dtypes and name != "query"):
            raise InvalidInputError(f"{name} is {tensor.dtype}; float32, float16, bfloat16 or float64 is needed")
        if tensor.device != query.device:
            raise InvalidInputError(f"{name} is on {tensor.device}, query on {query.device}; move them to one device")
        if tensor.stride(-1) != 1:
            check_dense_axis(name, tensor)
    if not kv_dtypes and not (query.dtype == key.dtype == value.dtype):
        raise InvalidInputError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}; cast them to one dtype, or use autocast"
        )
    if h_kv != h_v:
        raise InvalidInputError(f"key has {h_kv} heads, value {h_v}; they must be equal")
    if not h_q or not h_kv:
        raise InvalidInputError(f"query has {h_q} heads, key and value {h_kv}; one at least is needed of each")
    if h_q % h_kv:
        raise InvalidInputError(
            f"query has {h_q} heads, key and value {h_kv}: H_q must be a multiple of H_kv"
            f"{_other_layout(query, key, value, layout)}"
        )
    if key.shape[-1] * packed != query.shape[-1]:
        width = key.shape[-1] * packed
        hint = " (uint8 holds FP4, two numbers a byte; an FP8 cache is .view(torch.float8_e4m3fn))"
        more = hint if packed > 1 else ""
        raise InvalidInputError(f"query has head dim {query.shape[-1]}, key {width}; they must be equal{more}")
    if not query.shape[-1] or not value.shape[-1]:
        raise InvalidInputError(f"head dims are {query.shape[-1]} and {value.shape[-1]}; both must be at least 1")


def _other_layout(query: Tensor, key: Tensor, value: Tensor, layout: str) -> str:
    """The next step where the tensors of a dense call would fit in the other layout."""
    if not layout:
        return ""
    s, h = (2, 1) if layout == "BSHD" else (1, 2)
    h_q, h_kv = query.shape[h], key.shape[h]
    if not h_kv or h_q % h_kv or value.shape[h] != h_kv or key.shape[s] != value.shape[s]:
        return ""
    other, shape = ("BHSD", "[B, H, S, D]") if layout == "BSHD" else ("BSHD", "[B, S, H, D]")
    return f"; tensors in {shape} need layout={other!r}"


def check_mask(attn_mask: Any, query: Tensor, batch: int, heads: int, s_q: int, s_k: int, axes: str) -> None:
    if attn_mask is None:
        return
    fits = (
        isinstance(attn_mask, Tensor)
        and not attn_mask.is_nested
        and attn_mask.ndim == 4
        and attn_mask.shape[0] in (1, batch)
        and attn_mask.shape[1] in (1, heads)
        and attn_mask.shape[2:] == (s_q, s_k)
    )
    allowed = "" if fits else _mask_shapes(attn_mask, batch, heads, s_q, s_k, axes)
    check_tensor("attn_mask", attn_mask, 4, allowed)
    if not fits:
        raise InvalidInputError(f"attn_mask has shape {tuple(attn_mask.shape)}, allowed: {allowed}")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOATS:
        raise InvalidInputError(
            f"attn_mask is {attn_mask.dtype}; bool (True = attend) or a float to be added is needed"
        )
    if attn_mask.device != query.device:
        raise InvalidInputError(f"attn_mask is on {attn_mask.device}, query on {query.device}; move it")


def _mask_shapes(attn_mask: Any, batch: int, heads: int, s_q: int, s_k: int, axes: str) -> str:
    """The shapes that a mask may have, and how one that torch's SDPA would broadcast becomes one of them."""
    either = ", ".join("1" if n == 1 else f"{n} or 1" for n in (batch, heads))
    allowed = f"[{either}, {s_q}, {s_k}] (B|1, H_q|1, {axes})"
    if not isinstance(attn_mask, Tensor) or attn_mask.is_nested or not 2 <= attn_mask.ndim <= 4:
        return allowed
    shape = tuple(attn_mask.shape)
    rows = "" if shape[-2] == s_q else f".expand(-1, -1, {s_q}, -1)"
    if len(shape) == 2 and shape == (batch, s_k) != (s_q, s_k):
        step = f"[:, None, None].expand(-1, -1, {s_q}, -1)"
    elif shape[-2] not in (1, s_q) or shape[-1] != s_k:
        return allowed
    elif len(shape) == 3:
        # torch aligns on the right: three axes are [H_q, S_q, S_k]. Where only B fits, that is meant.
        step = f"[None]{rows}" if shape[0] in (1, heads) else f"[:, None]{rows}" if shape[0] == batch else ""
    elif len(shape) == 2:
        step = f"[None, None]{rows}"
    else:
        step = rows if shape[0] in (1, batch) and shape[1] in (1, heads) else ""
    return f"{allowed}; pass attn_mask{step}" if step else allowed


def check_alibi(alibi: Any, query: Tensor, heads: int) -> None:
    if alibi is None:
        return
    _check_per_head("alibi", "slope", alibi, query, heads)
    if torch.is_grad_enabled() and alibi.requires_grad:
        raise InvalidInputError(
            "alibi requires a gradient, and slopes have none; pass alibi.detach(), or the bias as a float attn_mask"
        )


def check_segments(given: Any, query: Tensor, batch: int, s_q: int, s_k: int) -> None:
    """Check the segments of queries and keys, a pair."""
    for side, tensor, length in zip(("query", "key"), given, (s_q, s_k), strict=True):
        name = f"segments of the {side} tokens"
        check_index(name, tensor, 2, f"[{batch}, {length}] (B, S)")
        if tuple(tensor.shape) != (batch, length):
            hint = "; a pair (q_segments, k_segments) has one for each side" if given[0] is given[1] else ""
            raise InvalidInputError(f"{name} have shape {tuple(tensor.shape)}, [{batch}, {length}] is needed{hint}")
        if tensor.device != query.device:
            raise InvalidInputError(f"{name} are on {tensor.device}, query on {query.device}; move them")


def check_sinks(sinks: Any, query: Tensor, heads: int) -> None:
    if sinks is None:
        return
    if isinstance(sinks, Tensor) and 2 <= sinks.ndim <= 3 and heads in sinks.shape:
        raise InvalidInputError(
            f"sinks has shape {tuple(sinks.shape)}; a call takes one logit per query head, [{heads}] (H_q). Of one for "
            f"each row: call without sinks and with return_lse=True, then polyattn.merge([out], [lse], sinks=sinks)"
        )
    _check_per_head("sinks", "logit", sinks, query, heads)


def _check_per_head(name: str, one: str, given: Any, query: Tensor, heads: int) -> None:
    check_tensor(name, given, 1, f"[{heads}] (H_q), one {one} per query head")
    if given.shape[0] != heads:
        raise InvalidInputError(f"{name} has {given.shape[0]} entries, one per query head is needed: {heads}")
    if given.dtype not in FLOATS:
        raise InvalidInputError(f"{name} is {given.dtype}; a float dtype is needed")
    if given.device != query.device:
        raise InvalidInputError(f"{name} is on {given.device}, query on {query.device}; move it")


def check_out(
    out: Any,
    query: Tensor,
    shape: tuple[int, ...],
    inputs: tuple[Tensor, ...],
    optional: tuple[Tensor | None, ...] = (),
) -> None:
    """Check a tensor for the output, which may share no memory with `inputs`.

    Args:
        shape: the one that the output has.
        inputs, optional: tensors of which none may want a gradient, nor may `out`.

    Raises:
        InvalidInputError: names what is wrong, its value and what is allowed.
    """
    if out is None:
        return
    check_tensor("out", out, len(shape), str(list(shape)))
    if tuple(out.shape) != shape or out.dtype != query.dtype or out.device != query.device:
        raise InvalidInputError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; {shape} {query.dtype} on {query.device} is needed"
        )
    if out.stride(-1) != 1 and out.shape[-1] != 1:
        raise InvalidInputError(f"out's last axis is not dense (strides {tuple(out.stride())})")
    if overlaps_itself(out):
        raise InvalidInputError(
            f"out has several elements in one place (strides {tuple(out.stride())} of {shape}), as an expanded tensor "
            f"has; pass a tensor with memory for each"
        )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (out, *inputs, *optional)):
        raise InvalidInputError("out= cannot be used while gradients are wanted; drop it, or run under torch.no_grad()")
    if any(shares_memory(out, t) for t in inputs):
        raise InvalidInputError("out shares memory with an input; pass a tensor of its own")
