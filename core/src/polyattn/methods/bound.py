"""A method as a backend's function: it is bound once for each kind of call and called with a place."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..contract import AttentionRequest, BackendInfo, Bound, Like, Method, Place
from ..dispatch.block_sparse import block_sparse_attention
from ..dispatch.dense import attention
from ..dispatch.linear import linear_attention
from ..dispatch.varlen import varlen_attention
from ..errors import InvalidInputError, PluginError, did_you_mean
from ..selection import overrides
from ..selection.inspection import explain
from ..selection.select import Selection
from .text import no_padding

__all__ = ["bind"]

_EAGER: weakref.WeakValueDictionary[tuple[str, AttentionRequest], _Attend] = weakref.WeakValueDictionary()
"""By backend and request, the calls that are not captured, for as long as somebody holds them."""
_AUTOMATIC: overrides.Scope = (overrides.AUTOMATIC, "", "")
_PLANS_KEPT = 16


def bind(target: Any, backend: BackendInfo, request: AttentionRequest) -> Bound:
    """The functions of a method.

    Args:
        target: makes a `polyattn.contract.Method` of the backend's options. request: with these options.
    """
    key = (backend.name, dataclasses.replace(request, graph_capture=False))
    attend, before = _Attend(target(**dict(request.options)), backend.name, request), _EAGER.get(key)
    if not request.graph_capture:
        _EAGER[key] = attend
    elif before is not None:  # a plan is copied to the device, which no capture can do
        attend.as_planned_by(before)
    return Bound(attend)


class _Inner:
    """The calls of a method. Who serves them is chosen as if nobody had named a backend: the name means the method.
    made: takes the functions that are called, in order."""

    def __init__(self, request: AttentionRequest, made: list[Any] | None = None) -> None:
        self.scale, self._made = request.scale, made
        self._fixed = {"scale": request.scale}
        self._deterministic = {"deterministic": True} if request.deterministic else {}

    def dense(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        more = {**self._fixed, **self._deterministic, "layout": "BHSD", **given}
        return self._call(attention, query, key, value, more)

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return self._call(varlen_attention, query, key, value, {**self._fixed, **self._deterministic, **given})

    def block_sparse(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return self._call(block_sparse_attention, query, key, value, {**self._fixed, "layout": "BHSD", **given})

    def linear(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return self._call(linear_attention, query, key, value, {**self._fixed, **given})

    def _call(self, call: Any, query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]) -> Any:
        if self._made is not None:
            self._made.append(call)
        with overrides.restored(_AUTOMATIC):
            return call(query, key, value, **given)


class _Asking(_Inner):
    """The same calls, explained instead of run, each kind once. Results are tensors without contents."""

    def __init__(self, request: AttentionRequest, mode: Any) -> None:
        super().__init__(request)
        self.found: list[Selection] = []
        self._mode = mode

    def _call(self, call: Any, query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]) -> Any:
        # What a plan holds has contents, and nothing here may read any.
        fake = tree_map_only(Tensor, self._mode.from_tensor, dict(given))
        with overrides.restored(_AUTOMATIC):
            said = explain(call, query, key, value, **fake)
        if said not in self.found:
            self.found.append(said)
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        if call is linear_attention:
            out = value.new_empty(value.shape)
            return out, value.new_empty((*value.shape[:1], *value.shape[2:3], query.shape[-1], value.shape[-1]))
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        return (out, query.new_empty(query.shape[:-1], dtype=wide)) if given.get("return_lse") else out


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Attend:
    """`DenseForward` of a method."""

    def __init__(self, method: Method, name: str, request: AttentionRequest) -> None:
        self._method, self._name, self._request = method, name, request
        self._turned = request.layout == "BSHD"
        self._inner = _Inner(request)
        # Of a bound object, so that plans end with it.
        self._plan = functools.lru_cache(maxsize=_PLANS_KEPT)(self._planned)
        self._misspelt = functools.lru_cache(maxsize=_PLANS_KEPT)(self._slip)
        self._kernels: dict[tuple[Hashable, ...], tuple[str, ...]] = {}

    def as_planned_by(self, other: _Attend) -> None:
        """Take the method of a like call, with the plans that it has made."""
        self._method, self._plan = other._method, other._plan

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        place: Place | None = None,
    ) -> Any:
        """See `polyattn.contract.DenseForward`. The rows of a method take neither masks nor sinks."""
        place = self._here(query, place)
        if place.run is None:
            result = self._attend(query, key, value, place, self._inner)
        else:
            made: list[Any] = []
            result = self._attend(query, key, value, place, _Inner(self._request, made))
            self._tell(query, key, value, place, tuple(made))
        return result if out is None else out.copy_(result)

    def calls(self, query: Tensor, key: Tensor, value: Tensor, place: Place) -> tuple[Selection, ...]:
        """Who would serve the calls that the method makes here, in order. Nothing is run."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        place = self._here(query, place)
        # What is asked leaves nothing in what is kept: tensors there have no contents, nor is a number read there.
        place = dataclasses.replace(place, kept=dict(place.kept or {}), layer=place.layer_number)
        if not self._method.leaves_dense(place):
            self._plan(self._shared(place), self._like(query, key))  # of numbers, so outside of the mode below
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            asking = _Asking(self._request, mode)
            known = query.device.type != "meta"
            fakes = [mode.from_tensor(t.detach()) if known else t for t in (query, key, value)]
            for fake, tensor in zip(fakes, (query, key, value), strict=True):
                fake.requires_grad_(tensor.requires_grad)
            self._attend(fakes[0], fakes[1], fakes[2], place, asking)
        return tuple(asking.found)

    def _tell(self, query: Tensor, key: Tensor, value: Tensor, place: Place, made: tuple[Any, ...]) -> None:
        """Tell the run of a call who served it. Kernels are asked for once for calls that are alike, and that made
        calls of the same families: a method may do another thing in another step or layer."""
        why, like = self._method.leaves_dense(place), self._like(query, key)
        grads = tuple(t.requires_grad for t in (query, key, value)) if torch.is_grad_enabled() else ()
        alike = (made, why, like, place.grid, place.text, place.valid_text, value.shape, grads)
        kernels = self._kernels.get(alike)
        if kernels is None:
            if len(self._kernels) >= _PLANS_KEPT:
                self._kernels.clear()
            found = self.calls(query, key, value, place)
            own = () if why else getattr(self._method, "own_kernels", ())
            own = own(place, like, any(grads)) if callable(own) else own
            kernels = self._kernels[alike] = (*own, *(f"{one.request.family}: {one.id}" for one in found))
        said = None if why else getattr(self._method, "density", None)
        density = None if said is None else said(self._plan(self._shared(place), like), place)
        place.run.told(place, self._name, kernels, why=why, density=density)

    def _here(self, query: Tensor, place: Place | None) -> Place:
        if place is None:
            raise InvalidInputError(f"{self._name} needs a place, and the call has none; pass place=")
        tokens = query.shape[1 if self._turned else 2]
        if place.tokens is not None and place.tokens != tokens:
            raise InvalidInputError(
                f"{self._name}: the call has {tokens} tokens and its place {place.tokens}: grid={place.grid} with "
                f"text={place.text} before and after it. Give the grid of the tokens as the model orders them"
            )
        if wrong := self._misspelt(tuple(place.tensors)):
            raise InvalidInputError(wrong)
        return place

    def _slip(self, names: tuple[str, ...]) -> str:
        """What is wrong with the names of tensors, or nothing. One place serves all methods."""
        reads = set(getattr(self._method, "reads", ()))
        for name in names:
            near = "" if name in reads else did_you_mean(name, reads - set(names))
            if near:
                return f"{self._name}: the place has a tensor {name!r}, which no method reads.{near}"
        return ""

    def _like(self, query: Tensor, key: Tensor) -> Like:
        s, h = (1, 2) if self._turned else (2, 1)
        batch, tokens, heads = query.shape[0], query.shape[s], query.shape[h]
        return Like(batch, heads, key.shape[h], tokens, query.shape[3], query.dtype, query.device)

    def _shared(self, place: Place) -> _Shared:
        return _Shared(place, by_step=getattr(self._method, "plans_by_step", True))

    def _planned(self, shared: _Shared, like: Like) -> Any:
        if _capturing(like.device):
            raise InvalidInputError(
                f"{self._name} is captured at a place that it has no plan for: make the same call once before the "
                "capture"
            )
        # Plans are kept for calls of all modes: an inference tensor could not be saved for a backward.
        with torch.inference_mode(False), torch.no_grad():
            return self._method.plan(shared.leave(), like)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, place: Place, inner: Any) -> Any:
        why = self._method.leaves_dense(place)
        explained = isinstance(inner, _Asking)
        plan = None if why else self._plan(self._shared(place), self._like(query, key))
        if self._turned:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if why:
            result = inner.dense(query, *no_padding(place, key, value))
            if explained:
                (said,) = inner.found
                inner.found[:] = [said.left_by(self._name, why)]
            else:
                overrides.note_left(self._name, why)
        else:
            kept = {} if place.kept is None else place.kept
            result = self._method.attend(plan, query, key, value, place=place, kept=kept, inner=inner)
            shape = (*query.shape[:-1], value.shape[-1])
            if not isinstance(result, Tensor) or result.shape != shape:
                found = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise PluginError(
                    f"{self._name}: attend of {type(self._method).__name__} returned {found}; a tensor {list(shape)} "
                    "[B, H_q, S, D_v] is needed. Mend the method, or name another backend"
                )
            if not explained:
                overrides.note_served(self._name)
        # In one order of memory, whoever made it: graphs that follow see no difference between steps.
        return result.transpose(1, 2).contiguous() if self._turned else result


class _Shared:
    """A place as plans know it: equal where a plan holds for both."""

    __slots__ = ("_key", "_place")

    def __init__(self, place: Place, *, by_step: bool) -> None:
        self._place: Place | None = place
        self._key: tuple[Hashable, ...] = (
            *(place.grid, place.text, place.valid_text, place.layers, place.role, place.heads),
            *((place.step, place.steps, place.branch) if by_step else ()),
        )

    def leave(self) -> Place:
        """The place, once: what is kept with a plan holds no tensors, no run and nothing that a run keeps."""
        place, self._place = self._place, None
        assert place is not None
        return place

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shared) and self._key == other._key
