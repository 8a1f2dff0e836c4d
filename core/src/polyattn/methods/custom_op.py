"""The custom op of a call with a place: what compiled code calls where a method is asked for.

Where a run is, is no part of the graph: the op asks it when it runs, so that no step, branch or layer compiles anything
again. It is registered with those of the families (`polyattn.dispatch.compile.registration`), and what runs it is
imported when it runs.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["LEARNED"]

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, Tensor? layer, Tensor? timestep, "
    "Tensor[] learned, SymInt[] numbers, str plan"
)
LEARNED = 7
"""How many tensors stand before `learned`."""
# A recorded launch would be that of one step for ever.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@functools.cache
def _compiled() -> Any:
    """Imported when an op runs first: it takes longer than all of this."""
    return import_module(".compiled", __package__)


def _run(*given: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _compiled().forward(*given)
    return found


def _fake(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    point = torch.empty((), dtype=torch.int64, device="cpu")
    return query.new_empty((*query.shape[:-1], value.shape[-1])), point


def _gradients(*given: Any) -> list[Tensor]:
    found: list[Tensor] = _compiled().backward(*given)
    return found


def _fake_gradients(dout: Tensor, *given: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in _compiled().trained(given[:-1])]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, learned, ctx.numbers, ctx.plan = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *learned, output[1])


def _differentiate(ctx: Any, dout: Tensor | None, _: Any) -> tuple[Any, ...]:
    *saved, point = ctx.saved_tensors
    given = (*saved[:LEARNED], saved[LEARNED:], ctx.numbers, ctx.plan)
    found: list[Any] = [None] * len(saved)
    if dout is not None:
        grads = _backward(dout, *given, point)
        for place, grad in zip(_compiled().wanted(ctx.plan), grads, strict=True):
            found[place] = grad
    return (*found[:LEARNED], found[LEARNED:], None, None)


def _second(ctx: Any, *grads: Any) -> Any:
    _compiled().refuse_second()


_forward = torch.library.custom_op(
    "polyattn::placed", _run, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)", tags=_TAGS
)
_forward.register_fake(_fake)
_forward.register_autograd(_differentiate, setup_context=_keep)
_backward = torch.library.custom_op(
    "polyattn::placed_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor dout, {_ARGUMENTS}, Tensor point) -> Tensor[]",
    tags=_TAGS,
)
_backward.register_fake(_fake_gradients)
_backward.register_autograd(_second)
