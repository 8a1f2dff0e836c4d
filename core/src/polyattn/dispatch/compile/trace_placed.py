"""A call with a place, where a method is asked for: one op, which asks where the run is when the graph runs."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ...contract import Place
from ...errors import InvalidInputError
from ...selection import overrides
from ..call_key import Static
from .errors import refuse_transforms
from .facts import constants
from .trace import MAKERS, publish, traced

__all__ = ["numbers_of", "place_of", "trace_placed"]

_COUNTS = ("layers", "step", "steps")
_UNSAID = (-1, -1, -1)


def numbers_of(place: Place) -> list[int]:
    """The numbers of a place, which may be symbols of a graph; -1 = not said, or a layer that is a tensor."""
    layer = None if isinstance(place.layer, Tensor) else place.layer
    counts = [-1 if count is None else count for count in (layer, place.layers, place.step, place.steps)]
    return [*counts, *(place.grid or _UNSAID), *place.text, *(place.valid_text or _UNSAID[:2])]


def place_of(numbers: list[int], **more: Any) -> Place:
    """A place of its numbers. more: its other fields; a layer holds where no number is said."""
    layer, *counts = (None if one < 0 else one for one in numbers[:4])
    grid, text, valid = (None if part[0] < 0 else tuple(part) for part in (numbers[4:7], numbers[7:9], numbers[9:]))
    said = {"grid": grid, "text": text, "valid_text": valid, **dict(zip(_COUNTS, counts, strict=True))}
    return Place(**{**more, **said, **({} if layer is None else {"layer": layer})})


def trace_placed(
    tensors: tuple[Any, ...], static: Static, backend: str | None, scope: overrides.Scope, place: Place
) -> Any:
    """A call with a place being traced; the op is `polyattn.methods.custom_op`.

    Args:
        tensors: query, key, value, attn_mask, sinks. place: its run is ahead, or it has none. The rest: `trace_dense`.
    """
    query = tensors[0]
    kind, timestep = query.device.type, place.timestep
    if timestep is not None and not isinstance(timestep, Tensor):
        timestep = torch.tensor(timestep)
    number = place.layer if isinstance(place.layer, Tensor) else None
    names = tuple([name for name, tensor in place.tensors.items() if tensor is not None])
    learned = [place.tensors[name] for name in names]
    odd = tuple([name for name in names if not isinstance(place.tensors[name], Tensor)])
    grad = torch.is_grad_enabled()
    every = (*tensors, number, timestep, *learned)
    wants = tuple([isinstance(t, Tensor) and grad and t.requires_grad for t in every])
    said = (names, place.branch, place.role, None if place.run is None else place.run.given, wants, odd)
    autocast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
    given = (tensors, number, timestep, learned, numbers_of(place))
    return traced("placed", (said, autocast), constants(static), backend, scope, *given)


def _made(facts: Any, static: tuple[Any, ...], backend: str | None, scope: overrides.Scope, around: str) -> str:
    (names, branch, role, given, wants, odd), autocast = facts
    refuse_transforms(around)
    if odd:
        raise InvalidInputError(f"place: tensors[{odd[0]!r}] must be a tensor, or None where there is none")
    Static(*static).checked()
    text = json.dumps(
        {
            "static": static,
            "backend": backend,
            "scope": scope,
            "names": names,
            "branch": branch,
            "role": role,
            "given": given,
            "wanted": [place for place, wanted in enumerate(wants) if wanted],
        }
    )

    def plan(tensors: tuple[Any, ...], number: Any, timestep: Any, learned: list[Tensor], numbers: list[int]) -> Tensor:
        if autocast is not None:
            tensors = tuple([t.to(autocast) if _narrows(t) else t for t in tensors[:4]]) + tensors[4:]
        out: Tensor = torch.ops.polyattn.placed(*tensors, number, timestep, learned, numbers, text)[0]
        return out

    return publish(plan)


def _narrows(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64


MAKERS["placed"] = _made
