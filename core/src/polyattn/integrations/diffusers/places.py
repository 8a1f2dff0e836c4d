"""This module tells a call of diffusers its place: hooks on the model and its attention layers, and on the scheduler.

The function that diffusers calls gets tensors and nothing else. The hooks say beside it whose call it is: the hook of a
model its grid, that of a layer its number and role, the functions of the scheduler the step.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...contract import Place
from ...dispatch.call_key import Static, site_of
from ...dispatch.dense import DenseSite
from ...dispatch.placed import asked, asked_traced, at
from ...epoch import EPOCH
from ...errors import ConfigError
from ...selection.overrides import Scope, above_components, reach
from ...video import Run, place
from .families import Family, Grid, given_to
from .rules import ROLES, Rules

__all__ = ["HERE", "Denoising", "Part", "Told", "placed", "tell"]

_is_tracing = torch.compiler.is_dynamo_compiling
_watching: weakref.WeakKeyDictionary[Any, Denoising] = weakref.WeakKeyDictionary()
"""Scheduler -> who is told what it does. Copies that a pipeline makes of a scheduler are not in it."""


@functools.lru_cache(maxsize=256)
def _watched(kind: Any) -> type:
    """Make a class of schedulers that tells its watcher of a call once it is done. The functions are those of a class,
    not of the object: a copy of the object calls them for itself."""

    def told(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = method(self, *args, **kwargs)
            if (watcher := _watching.get(self)) is not None:
                getattr(watcher, f"after_{name}")()
            return found

        return call

    names = "set_timesteps", "step"
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **{name: told(name) for name in names}})


class _Here(threading.local):
    """Where this thread is.

    Attributes:
        part: the component that runs, None = none that was prepared. role: "self" or "cross" of the layer that runs.
        layer: its number, an int64 tensor without axes; None where it has no place. backend: what the rules of the
            component name for it, None = nobody.
    """

    part: Part | None = None
    role: str = ""
    layer: Tensor | None = None
    backend: str | None = None


HERE = _Here()


@dataclasses.dataclass
class Told:
    """What is kept of calls that are alike, enough to ask later who serves them.

    Attributes:
        tensors: shape, dtype and device of query, key, value and mask (None = no mask).
        static, backend, scope, place: as they were called. calls: how many.
    """

    tensors: tuple[Any, ...]
    static: Static
    backend: str | None
    scope: Scope
    place: Place | None
    calls: int = 0


class Denoising:
    """One pipeline's denoising, from `set_timesteps` to the last `step` of its scheduler.

    Args:
        pipe: whose `scheduler` it is; that one has a class that tells of its calls until `end`, and a scheduler that is
            put in its place is followed.

    Attributes:
        step: number of the step that runs, None before the first `set_timesteps`. steps: how many there are.
        number: of the run; one is over with its last step. What encodes text runs before `set_timesteps`.
    """

    def __init__(self, pipe: Any, parts: Iterable[Part]) -> None:
        self.parts = tuple(parts)
        self.step: int | None = None
        self.steps: int | None = None
        self.number = 0
        self._pipe = weakref.ref(pipe)
        self._scheduler: Any = None
        self.follow()

    def follow(self) -> None:
        """Look whether the pipeline has another scheduler by now, which then begins a run here."""
        pipe = self._pipe()
        scheduler = None if pipe is None else getattr(pipe, "scheduler", None)
        if scheduler is self._scheduler:
            return
        begun = self._scheduler is not None
        self._leave_scheduler()
        self._scheduler = scheduler
        if scheduler is not None:
            kind: Any = type(scheduler)
            scheduler.__class__ = _watched(kind)
            _watching[scheduler] = self
        if begun and scheduler is not None and len(scheduler.timesteps):
            self.after_set_timesteps()

    def after_set_timesteps(self) -> None:
        """A run of the pipeline begins."""
        if self.step:  # the last run was broken off
            self.number += 1
        self.step, self.steps = 0, len(self._scheduler.timesteps)
        for part in self.parts:
            part.begin(self.steps)

    def after_step(self) -> None:
        """A step is done."""
        # Some pipelines step twice for one pass, for sound beside the video.
        done, last = (self.step or 0) + 1, max((self.steps or 1) - 1, 0)
        self.step = min(done, last)
        if done > last:
            self.step, self.number = 0, self.number + 1
        for part in self.parts:
            part.check_reached()
            part.passes = 0

    def _leave_scheduler(self) -> None:
        if self._scheduler is not None:
            _watching.pop(self._scheduler, None)
            self._scheduler.__class__ = type(self._scheduler).__mro__[1]

    def end(self) -> None:
        """Give the scheduler its class back, and end the runs."""
        self._leave_scheduler()
        self._scheduler = None
        for part in self.parts:
            part.run.end()


class Part:
    """One component of a prepared pipeline.

    Args:
        name: as the pipeline has it. model: a model of diffusers, which may be compiled. family: of the model, None =
            none is known. rules: who serves which of its calls. layers: (name, module) of its attention.

    Attributes:
        run: of `polyattn.video`, one for each run of the pipeline. branch: of guidance, as the pipeline says it.
        grid, here: of the pass that runs, and its branch. passes: of this step until now. ran: whether there was one in
            this run. traced: whether one of compiled code that has the hooks inside.
        told: calls by what tells them apart; compiled code tells nothing. blocks: how many blocks have a place.
        valid: text tokens that masks of this pass leave, read once for each.
        pretend: stands for the calls of a pipeline that is not run, None = they are made.
    """

    def __init__(
        self, name: str, model: Any, family: Family | None, rules: Rules, layers: list[tuple[str, Any]]
    ) -> None:
        self.name, self.family, self.rules = name, family, rules
        self.denoising: Denoising | None = None
        self.grid: Grid | None = None
        self.branch = self.here = ""
        self.passes, self.ran, self.traced = 0, False, False
        self.told: dict[tuple[Any, ...], Told] = {}
        self.valid: dict[Any, int | None] = {}
        self.pretend: Callable[..., Any] | None = None
        self._layers, self._checked, self._number = layers, False, 0
        self._point: Any = None
        self._at: dict[str, Any] = {}
        inner = getattr(model, "_orig_mod", model)
        self._inner = weakref.ref(inner)
        self._numbers = _numbers(inner, family)
        self.blocks = len(set(self._numbers.values()))
        self.run = Run(layers=self.blocks or None)
        # Of a compiled model the outer one: what the hooks do is no part of a graph.
        self._handles = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]
        self._coders = {name: vars(inner).get(name) for name in _CODERS if callable(getattr(inner, name, None))}
        for name in self._coders:
            method = getattr(inner, name)
            setattr(inner, name, functools.update_wrapper(functools.partial(_coded, self, method), method))
        joint = family is not None and bool(family.text)
        for layer, module in layers:
            number = self._numbers.get(layer)
            module._polyattn_joint = joint
            # A buffer, which differs without being a reason to compile a block anew.
            buffer = None if number is None else torch.tensor(number)
            module.register_buffer("_polyattn_layer", buffer, persistent=False)
            self._handles.append(module.register_forward_pre_hook(_enter_layer, with_kwargs=True))
            self._handles.append(module.register_forward_hook(_leave_layer))
        self._assign(None, None, "")
        if hasattr(inner, "cache_context"):
            inner.cache_context = functools.partial(_Branch, self, type(inner).cache_context.__get__(inner))

    def __deepcopy__(self, memo: Any) -> Part:
        return self  # a copy of the model, whose hooks are copied with it, is the same component

    def begin(self, steps: int | None) -> None:
        """Begin a run: what methods kept of the last one is forgotten."""
        self.run.end()
        self.run = Run(steps=steps, layers=self.blocks or None)
        self.passes, self.ran, self.traced, self._checked = 0, False, False, False
        if steps is not None:
            for rule in self.rules.others:
                if rule.kind == "steps" and rule.beyond(steps):
                    raise ConfigError(
                        f"the rule of {self.name} for {rule} reaches no step: the pipeline makes {steps}, numbered 0 "
                        f"to {steps - 1}; change the rule or the number of steps"
                    )

    def check_reached(self) -> None:
        """See after the first step that each role with a backend of its own had a call.

        Raises:
            ConfigError: a role had none.
        """
        if self._checked or not (self.ran or self.traced):  # of two transformers one may begin later
            return
        self.ran = self._checked = True
        if not self.told:  # compiled: nobody knows which roles there were
            for role in ROLES:
                reach(("", self.name, role))
            return
        seen = {told.scope[2] for told in self.told.values()}
        for rule in self.rules.others:
            if rule.kind == "roles" and rule.spoken not in seen:
                raise ConfigError(
                    f"the override {self.name}.{rule.spoken}={rule.backend} reached no layer: all calls of {self.name} "
                    f"have the role {' or '.join(sorted(seen))}; remove it, or name one of these"
                )

    def end(self) -> None:
        """Take the hooks out again."""
        for handle in self._handles:
            handle.remove()
        for _, module in self._layers:
            module._buffers.pop("_polyattn_layer", None)
            module._non_persistent_buffers_set.discard("_polyattn_layer")
            for word in ("_polyattn_joint", "_polyattn_self", "_polyattn_cross"):
                vars(module).pop(word, None)
        if (inner := self._inner()) is not None:
            vars(inner).pop("cache_context", None)
            for name, before in self._coders.items():
                vars(inner).pop(name, None)
                if before is not None:
                    setattr(inner, name, before)
        self.run.end()

    def _assign(self, step: int | None, steps: int | None, branch: str) -> None:
        """Tell each layer the backends that the rules name for its two roles."""
        self._at = {"step": step, "steps": steps, "branch": branch, "layers": self.blocks}
        for name, module in self._layers:
            layer = self._numbers.get(name)
            module._polyattn_self, module._polyattn_cross = self.named(layer, "self"), self.named(layer, "cross")

    def named(self, layer: int | None, role: str) -> str | None:
        """Return the backend that the rules name for a layer in the pass that runs, None = none."""
        return self.rules.pick(layer=layer, role=role, **self._at)

    def _enter(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        HERE.part = self
        if _is_tracing():  # the model was compiled around the hooks: steps and branches are not known inside
            self.traced = True
            return
        if self.denoising is not None:
            self.denoising.follow()
            if self._number != self.denoising.number:
                self._number, self.told = self.denoising.number, {}
        self.valid.clear()
        inner = self._inner()
        self.grid = None if self.family is None else self.family.grid(inner, given_to(inner, args, kwargs))
        denoising = self.denoising
        # No step encodes or decodes.
        step, steps = (None, None) if denoising is None or model is None else (denoising.step, denoising.steps)
        # A pipeline that names no branches has as many as its steps have passes.
        branch = self.branch or ("" if not self.passes else f"pass {self.passes}")
        if self.rules.moves():
            self._assign(step, steps, branch)
        self.here = branch
        self._point = self.run.at(grid=self.grid, step=step, branch=branch)
        self._point.__enter__()

    def _leave(self, model: Any, args: Any, output: Any) -> None:
        HERE.part, HERE.layer, HERE.role, HERE.backend = None, None, "", None
        if not _is_tracing() and self._point is not None:
            self._point.__exit__(None, None, None)
            self._point = None
            self.passes, self.ran = self.passes + 1, True


_CODERS = "encode", "decode"
"""What pipelines call of an autoencoder in the place of `forward`, whose hooks do not see it."""


def _coded(part: Part, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Encode or decode, with what the hooks do around `forward`."""
    part._enter(None, args, kwargs)
    try:
        return method(*args, **kwargs)
    finally:
        part._leave(None, None, None)


class _Branch:
    """`cache_context` of a model: what it said before, and the name of the branch for polyattn."""

    def __init__(self, part: Part, context: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> None:
        self._part, self._name = part, name
        self._inner = context(name, *args, **kwargs)

    def __enter__(self) -> Any:
        self._part.branch = str(self._name)
        return self._inner.__enter__()

    def __exit__(self, *error: object) -> Any:
        self._part.branch = ""
        return self._inner.__exit__(*error)


def _numbers(model: Any, family: Family | None) -> dict[str, int]:
    """Number the attention layers of the blocks that attend over the video: name -> number of the block."""
    found: dict[str, int] = {}
    number = 0
    if family is None:
        return found
    for attribute in family.blocks:
        for i, block in enumerate(getattr(model, attribute, ())):
            inside = {name for name, _ in block.named_modules() if name}
            found |= {f"{attribute}.{i}.{name}": number for name in inside - {*family.beside}}
            number += 1
    return found


# The same functions for all layers, which say no number: what is compiled for one block holds for all.
def _enter_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    encoder = kwargs.get("encoder_hidden_states")
    if encoder is None and len(args) > 1:
        encoder = args[1]
    crosses = encoder is not None and not module._polyattn_joint
    HERE.role = "cross" if crosses else "self"
    HERE.backend = module._polyattn_cross if crosses else module._polyattn_self
    HERE.layer = module._polyattn_layer


def _leave_layer(module: Any, args: Any, output: Any) -> None:
    HERE.layer, HERE.role, HERE.backend = None, "", None


def placed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, static: Static, pinned: str | None, scope: Scope
) -> Any:
    """Make a call of `polyattn.attention` in the place where this thread is.

    Args:
        pinned: the backend that the layer's name pins, which is stronger than rules. scope: of overrides, around the
            pipeline.
    """
    part, role = HERE.part, HERE.role
    assert part is not None
    backend = HERE.backend if pinned is None and not above_components(scope) else pinned
    scope = scope[0], part.name, role
    tracing = _is_tracing()
    here = None
    if (
        HERE.layer is not None
        and part.grid is not None
        and (asked_traced(backend, scope, EPOCH.token) if tracing else asked(backend, scope, EPOCH.value))
    ):  # without a method nobody looks at a place
        here, mask = _place(part, role, query, mask, static.layout, tracing)
    if not tracing:
        tell(part, (query, key, value, mask), static, backend, scope, here)
    if part.pretend is not None:
        return part.pretend(query, key, value, mask, static, pinned, scope)
    if here is None and not tracing:
        return site_of(DenseSite, static, backend, scope)(query, key, value, mask)
    return at((query, key, value, mask, None, None), static, backend, scope, here)


def tell(
    part: Part, tensors: tuple[Any, ...], static: Static, backend: str | None, scope: Scope, here: Place | None
) -> None:
    """Note a call for `report`."""
    alike: tuple[Any, ...] = part.run.number(HERE.layer), scope[2], backend, None if here is None else here.text
    if here is not None and part.pretend is not None:  # of a run that is made, the run itself knows
        alike += (here.grid, here.step)
    told = part.told.get(alike)
    if told is None:
        kept = None if here is None else dataclasses.replace(here, kept=None, run=None)
        shapes = tuple(None if t is None else (t.shape, t.dtype, t.device) for t in tensors)
        told = part.told[alike] = Told(shapes, static, backend, scope, kept)
    told.calls += 1


def _place(
    part: Part, role: str, query: Tensor, mask: Tensor | None, layout: str, tracing: bool
) -> tuple[Place | None, Tensor | None]:
    """Make the place of a call, None where it is over other tokens than those of the video; and what is left of its
    mask: one of padded text is said by the place."""
    grid = part.grid
    assert grid is not None
    assert part.family is not None
    tokens = query.shape[1 if layout == "BSHD" else 2]
    words = tokens - grid[0] * grid[1] * grid[2]
    given: dict[str, Any] = {"role": role}
    if words < 0 or (words and not part.family.text):
        return None, mask
    if role == "self" and words > 0 and part.family.text:
        front = part.family.text == "front"
        given["text"] = (words, 0) if front else (0, words)
        if mask is not None and not tracing:
            alike = mask.data_ptr(), mask.shape, mask.stride()
            if alike not in part.valid:
                part.valid[alike] = _valid(mask, words, front)
            if (count := part.valid[alike]) is not None:
                given["valid_text"], mask = ((count, 0) if front else (0, count)), None
    if not tracing and "text" in given:
        # A block may attend with its text and without it.
        given["kept"] = part.run.kept((part.run.number(HERE.layer), given["text"]), part.here)
    return place(layer=HERE.layer, **given), mask


def _valid(mask: Tensor, words: int, front: bool) -> int | None:
    """Count the text tokens that a mask of keys leaves, None where it says anything else than that the last ones of
    each sequence are padding, as many in each. It is read from its device."""
    if mask.dtype is not torch.bool or (mask.shape[2] > 1 and mask.stride(2)) or (mask.shape[1] > 1 and mask.stride(1)):
        return None
    rows = mask[:, 0, 0]
    spoken = rows[:, :words] if front else rows[:, -words:]
    count = int(spoken[0].sum())
    video = rows[:, words:] if front else rows[:, :-words]
    plain = torch.arange(words, device=mask.device) < count
    return count if bool(video.all()) and bool((spoken == plain).all()) else None
