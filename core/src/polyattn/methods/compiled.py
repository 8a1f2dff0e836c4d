"""What the custom op of a call with a place does when it runs: the eager call, at the place that holds then."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import Place
from ..dispatch.bound_table import Recent
from ..dispatch.compile.trace_placed import place_of
from ..dispatch.placed import asked, at
from ..epoch import EPOCH
from ..errors import BackendUnavailableError, InvalidInputError
from ..semantics.autograd import recording, refuse_second
from .custom_op import LEARNED
from .points import Ahead

__all__ = ["backward", "forward", "refuse_second", "trained", "wanted"]

_POINTS_KEPT = 2048
_points: Recent[int, Place] = Recent(_POINTS_KEPT)
"""Where forwards were whose gradients are still to be computed, by number."""
_numbers = itertools.count(1)
_Given = Sequence[Any]
"""The arguments of the op, in order."""


@functools.lru_cache(maxsize=512)
def _read(plan: str) -> Mapping[str, Any]:
    data: dict[str, Any] = json.loads(plan)
    window = data["static"][1]
    data["static"] = (data["static"][0], tuple(window) if isinstance(window, list) else window, *data["static"][2:])
    return data


def wanted(plan: str) -> Sequence[int]:
    """Which tensors want a gradient: places among the tensors of the op, those of `learned` last."""
    found: Sequence[int] = _read(plan)["wanted"]
    return found


def _tensors(given: _Given) -> list[Any]:
    *tensors, learned, _, _ = given
    return [*tensors, *learned]


def trained(given: _Given) -> list[Tensor]:
    """The tensors that want a gradient."""
    tensors = _tensors(given)
    return [tensors[place] for place in wanted(given[-1])]


def forward(*given: Any) -> tuple[Tensor, Tensor]:
    """The op: (output, contiguous; the number of the point at which it was computed, 0 where no gradient is wanted)."""
    tensors, plan = _tensors(given), given[-1]
    place, number = _place(given, tensors), 0
    if wanted(plan):
        number = next(_numbers)
        # Not the run: what it is told and what it keeps is for the forward alone.
        _points.keep(number, dataclasses.replace(place, run=None, kept=None, tensors={}))
        with recording():
            # The kernels that the backward runs again, and not those of inference.
            out = _call(plan, _leaves(tensors, plan), place).detach()
    else:
        out = _call(plan, tensors, place)
    out = out.contiguous()
    if any(isinstance(t, Tensor) and t.data_ptr() == out.data_ptr() for t in tensors):
        out = out.clone()
    return out, torch.tensor(number)


def backward(dout: Tensor, *given: Any) -> list[Tensor]:
    """The gradients of what wants one, by running the call again where it was."""
    *arguments, point = given
    tensors, plan = _tensors(arguments), arguments[-1]
    place = _points.get(int(point)) or _points.recall(int(point))
    if place is None:
        raise InvalidInputError(
            f"the gradient of a compiled call with a place comes after {_POINTS_KEPT} other calls, and where it was is "
            "forgotten: compute gradients sooner, or leave this attention out of torch.compile"
        )
    leaves = _leaves(tensors, plan)
    with recording():
        out = _call(plan, leaves, place)
        inputs = [leaves[one] for one in wanted(plan)]
        grads = torch.autograd.grad(out, inputs, dout, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.contiguous() for g, t in zip(grads, inputs, strict=True)]


def _leaves(tensors: Sequence[Any], plan: str) -> list[Any]:
    leaves = list(tensors)
    for place in wanted(plan):
        leaves[place] = tensors[place].detach().requires_grad_()
    return leaves


def _call(plan: str, tensors: Sequence[Any], place: Place) -> Tensor:
    data = _read(plan)
    backend, scope = data["backend"], tuple(data["scope"])
    if not asked(backend, scope, EPOCH.value):
        raise BackendUnavailableError(
            "a saved graph calls a method, and the configuration of this process names none: configure it as where the "
            "graph was made (polyattn.configure, polyattn.use_backend), or make the graph again"
        )
    six = (*tensors[:5], None)
    place = dataclasses.replace(place, tensors=dict(zip(data["names"], tensors[LEARNED:], strict=True)))
    out: Tensor = at(six, data["static"], backend, scope, place)
    return out


def _place(given: _Given, tensors: Sequence[Any]) -> Place:
    """The place that the graph says, where the run of this task is now."""
    data, more = _read(given[-1]), {"layer": tensors[5], "timestep": tensors[6]}
    place = place_of(given[-2], **more, branch=data["branch"], role=data["role"])
    return place if data["given"] is None else Ahead(tuple(data["given"])).now(place)
