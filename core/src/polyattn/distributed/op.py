"""Layers over ranks in compiled code: one custom op, whose backward is another one.

An op knows tensors and plain values, so a layer is found by a name, which is the same for layers that are alike:
compiled code holds for all of them. What ranks exchanged is not kept for the backward, which exchanges it anew: of a
call only its inputs and results stay in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .agreement import Call

__all__ = ["LAYERS", "attend"]

LAYERS: dict[str, Any] = {}
"""By `key`, the last layer of its kind."""

_CALL = (
    "str layer, Tensor query, Tensor key, Tensor value, Tensor[] text, Tensor? segments, str text_at, int[]? lengths, "
    "bool trained, bool lse"
)
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"
_RESULTS = "Tensor out, Tensor weights, Tensor text_out, Tensor text_weights"
_GRADS = "Tensor? dout, Tensor? dlse, Tensor? dtext, Tensor? dtext_lse"


def _call(query: Any, key: Any, value: Any, text: Any, segments: Any, text_at: str, lengths: Any) -> Call:
    return Call((query, key, value), tuple(text) or None, text_at, segments, None, lengths)


@torch.library.custom_op("polyattn::ranks", mutates_args=(), schema=f"({_CALL}) -> {_FOUR}")
def attend(
    layer: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    text: Sequence[Tensor],
    segments: Tensor | None,
    text_at: str,
    lengths: Sequence[int] | None,
    trained: bool,
    lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, text_out, text_lse) of the rank; what is not there is empty."""
    found = LAYERS[layer].in_op(_call(query, key, value, text, segments, text_at, lengths), trained=trained)
    kept = [one is not None and (lse or i % 2 == 0) for i, one in enumerate(found)]
    # Tensors of their own, empty ones too: results of an op are no views of each other.
    out, weights, words, word_weights = (
        one.contiguous() if keep else query.new_empty(0) for one, keep in zip(found, kept, strict=True)
    )
    return out, weights, words, word_weights


@attend.register_fake
def _(
    layer: str,
    query: Any,
    key: Any,
    value: Any,
    text: Any,
    segments: Any,
    text_at: Any,
    lengths: Any,
    trained: Any,
    lse: Any,
) -> tuple[Tensor, ...]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32

    def results(tensor: Any) -> tuple[Any, Any]:
        shape = (*tensor.shape[:-1], value.shape[-1])
        weights = query.new_empty(shape[:-1], dtype=wide) if lse else query.new_empty(0)
        return query.new_empty(shape), weights

    return (*results(query), *(results(text[0]) if text else (query.new_empty(0), query.new_empty(0))))


@torch.library.custom_op(
    "polyattn::ranks_backward", mutates_args=(), schema=f"({_CALL}, {_RESULTS}, {_GRADS}) -> Tensor[]"
)
def _backward(
    layer: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    text: Sequence[Tensor],
    segments: Tensor | None,
    text_at: str,
    lengths: Sequence[int] | None,
    trained: bool,
    lse: bool,
    out: Tensor,
    weights: Tensor,
    text_out: Tensor,
    text_weights: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    dtext: Tensor | None,
    dtext_lse: Tensor | None,
) -> list[Tensor]:
    call = _call(query, key, value, text, segments, text_at, lengths)
    own, words = (out, weights), (text_out, text_weights) if text else None
    found = LAYERS[layer].op_gradients(call, own, words, (dout, dlse), (dtext, dtext_lse))
    return [one.contiguous() for one in found]


@_backward.register_fake
def _(layer: str, query: Any, key: Any, value: Any, text: Any, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (query, key, value, *text)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    layer, query, key, value, text, segments, text_at, lengths, trained, lse = inputs
    ctx.fixed = layer, len(text), text_at, lengths, trained, lse
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, segments, *text, *output)


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    layer, count, text_at, lengths, trained, lse = ctx.fixed
    query, key, value, segments, *rest = ctx.saved_tensors
    text, results = list(rest[:count]), rest[count:]
    call = (layer, query, key, value, text, segments, text_at, lengths, trained, lse)
    found = _backward(*call, *results, *grads)
    return None, *found[:3], list(found[3:]), None, None, None, None, None


attend.register_autograd(_gradients, setup_context=_setup)
