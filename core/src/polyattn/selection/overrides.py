"""What people asked for: the precedence chain, its scopes, and the process-wide configuration.

Highest first: argument on the call or layer > `with use_backend(...)` > `force_backend(...)` (process-wide) >
component and component.role > command line > environment > config file. What is left is selection's own business.
Only the `with` forms are scoped, by a ContextVar; `HERE` is where compiled code guards on it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from .. import epoch
from ..contract import AttentionRequest
from ..errors import ConfigError, InvalidInputError, did_you_mean
from . import config
from .select import Choice

_F = TypeVar("_F", bound=Callable[..., Any])
Scope = tuple[str, str, str]
"""(backend, component, role), empty strings where nothing is set."""

_NOTHING: Scope = ("", "", "")
AUTOMATIC = "(automatic)"
"""The backend of a scope in which nobody is asked for by name: that of the calls that a method makes."""
TOWER = "mm"
"""The component, or the role within one, of multimodal towers: `mm_attention_backend` speaks for it."""
SCOPE: contextvars.ContextVar[Scope] = contextvars.ContextVar("polyattn_scope", default=_NOTHING)
# Here, not in the objects that are entered: several tasks may enter one.
_BEFORE: contextvars.ContextVar[tuple[Scope, ...]] = contextvars.ContextVar("polyattn_scopes_before", default=())


class _Here(types.ModuleType):
    """The scope of this thread or task where compiled code can guard on it. A guard reads attributes, those of a module
    as anybody does: at every call this asks the ContextVar."""

    scope = property(lambda self: SCOPE.get())


class _Inside(threading.local):
    """The scopes that a graph is inside of while dynamo traces it, where a ContextVar cannot be set."""

    def __init__(self) -> None:
        self.scopes: tuple[Scope, ...] = ()


HERE, INSIDE = _Here("polyattn._here"), _Inside()


class _Process:
    """Process-wide choices; every change bumps the epoch."""

    def __init__(self) -> None:
        self.forced = ""
        self.settings: config.Settings | None = None
        self.reached: set[str] = set()
        self.served: set[str] = set()
        self.left: dict[str, dict[str, None]] = {}


_process = _Process()


def _never() -> bool:
    return False


tracing: Callable[[], bool] = _never
"""Whether torch.compile is tracing this very call; `dispatch` puts torch's own function here (this module is
torch-free)."""


def current_scope() -> Scope:
    """The scope in force here."""
    if not tracing():
        return SCOPE.get()
    found: Scope = INSIDE.scopes[-1] if INSIDE.scopes else HERE.scope
    return found


class _Scoped(contextlib.ContextDecorator):
    """Enter a scope and leave it. Re-entrant, also by tasks and threads at once."""

    def __call__(self, func: _F) -> _F:
        # Their call only makes the object: the scope would be over before the first line of them runs.
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(kind(func) for kind in kinds):
            raise InvalidInputError(
                f"{type(self).__name__}(...) cannot decorate {func.__name__}, a coroutine or generator function: it "
                f"would have no effect. Put `with {type(self).__name__}(...):` inside it"
            )
        return super().__call__(func)

    def _next(self, before: Scope) -> Scope:
        raise TypeError("use use_backend(...) or component(...)")

    def __enter__(self) -> None:
        after = self._next(current_scope())
        if tracing():
            INSIDE.scopes = (*INSIDE.scopes, after)
        else:
            _BEFORE.set((*_BEFORE.get(), SCOPE.get()))
            SCOPE.set(after)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if tracing():
            INSIDE.scopes = INSIDE.scopes[:-1]
        else:
            # A block may end in another context than it began in, where nothing is to be put back.
            *before, scope = _BEFORE.get() or (SCOPE.get(),)
            _BEFORE.set(tuple(before))
            SCOPE.set(scope)


class use_backend(_Scoped):  # noqa: N801 - reads as the statement it is
    """`with polyattn.use_backend("flex_attention"): ...`: every call inside uses that backend.

    Scoped to this thread or asyncio task; also a decorator; works inside and around compiled functions. For
    activation checkpointing and code that runs after the block has ended, see `checkpoint_context_fn`.

    Args:
        name: backend name or alias, optionally `name/kind` and `name@platform`; None lifts an outer `use_backend`.

    Raises:
        InvalidInputError: name is neither a string nor None.
    """

    def __init__(self, name: str | None) -> None:
        self._name = _name_or_none("use_backend", name)

    def _next(self, before: Scope) -> Scope:
        return (self._name, before[1], before[2])


class component(_Scoped):  # noqa: N801
    """`with polyattn.component("text_encoder"): build()`: layers built inside obey that component's override.

    Args:
        name: what overrides call it, for a pipeline its module name (`model_index.json`). role: part of it, such as
            `cross`.
    """

    def __init__(self, name: str, role: str = "") -> None:
        self._name, self._role = _name_or_none("component", name), _name_or_none("role", role)

    def _next(self, before: Scope) -> Scope:
        return (before[0], self._name, self._role)


class restored(_Scoped):  # noqa: N801
    """The scope that was in force elsewhere."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def _next(self, before: Scope) -> Scope:
        return self._scope


AGAIN: list[Callable[[Scope], contextlib.AbstractContextManager[None]]] = [restored]
"""The last one makes what a recomputation is inside of. Rooms above this one that know of more put theirs behind it."""


def checkpoint_context_fn() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """`torch.utils.checkpoint.checkpoint(..., context_fn=polyattn.checkpoint_context_fn)`: the recomputation sees the
    scopes of the forward and where its `polyattn.video.Run` was, also when the backward runs outside them, after the
    run, or in another thread."""
    scope = current_scope()
    return restored(scope), AGAIN[-1](scope)


def force_backend(name: str | None) -> None:
    """Use one backend everywhere in this process (None lifts it). Below `use_backend`, above components."""
    _process.forced = _name_or_none("force_backend", name)
    epoch.bump()


def global_force_attn_backend(name: str | None) -> None:
    """The seed pages' name of `force_backend`."""
    force_backend(name)


@contextlib.contextmanager
def global_force_attn_backend_context_manager(name: str | None) -> Iterator[None]:
    """`force_backend` for the length of a block; process-wide all the same, so not for concurrent threads."""
    before = _process.forced
    force_backend(name)
    try:
        yield
    finally:
        force_backend(before or None)


def current_settings() -> config.Settings:
    """The process's configuration: what `configure` set, else environment and config file."""
    settings = _process.settings
    if settings is None:
        settings = _process.settings = config.load_settings()
    return settings


def configure(**settings: Any) -> config.Settings:
    """Set the process's configuration as a command line would; what is not given comes from environment and file.

    Args:
        settings: fields of `polyattn.selection.config.Settings` in any of their text forms, for example
            `attention_backend="flex_attention"`, `component_attention_backends="text_encoder=torch_sdpa"`,
            `attention_backend_config="sparsity=0.9"`, `strict=True`. No argument re-reads environment and file.

    Returns:
        The settings in force.

    Raises:
        ConfigError: unknown field (near match offered) or a value that does not parse.
    """
    return configure_by("configure()", settings)


def configure_by(source: str, settings: Mapping[str, Any]) -> config.Settings:
    """`configure` for whoever reads them: messages about the settings say `source`."""
    _process.settings = config.load_settings(cli=settings or None, cli_source=source)
    _process.reached, _process.served, _process.left = set(), set(), {}
    epoch.bump()
    return _process.settings


def add_options(source: str, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Set options of backends in the process's configuration, beside those that are set; `source` is who did it.

    Args:
        options: backend -> option -> value, unchecked.
    """
    settings = current_settings()
    merged = {backend: dict(given) for backend, given in settings.attention_backend_config.items()}
    sources = dict(settings.sources)
    for backend, given in options.items():
        merged.setdefault(backend, {}).update(given)
        sources[f"attention_backend_config.{backend}"] = source
        sources.update({f"attention_backend_config.{backend}.{option}": source for option in given})
    _process.settings = dataclasses.replace(settings, attention_backend_config=merged, sources=sources)
    epoch.bump()


def above_components(scope: Scope) -> bool:
    """Whether `use_backend` or `force_backend` has a say here, which rank above the overrides of components."""
    return bool(scope[0] or _process.forced)


def current_choice(argument: str | None, scope: Scope, request: AttentionRequest | None = None) -> Choice | None:
    """The highest-ranking explicit choice, or None for automatic selection. Marks the component as reached.

    Args:
        argument: what the call or layer names. scope: of the `with` forms.
        request: a serving request is asked for by its phase: `decode_attention_backend` before `attention_backend`. No
            setting reaches a request of linear attention.
    """
    backend, name, role = scope
    settings = _process.settings or current_settings()
    component_choice = None
    if name:
        reach(scope)
    for key in (f"{name}.{role}", name) if name else ():
        if key in settings.component_attention_backends:
            component_choice = Choice(settings.component_attention_backends[key], f"component {key}")
            break
    if argument is not None:
        return Choice(_name_or_none("backend", argument), "argument")
    if backend:
        return None if backend == AUTOMATIC else Choice(backend, "use_backend")
    if _process.forced:
        return Choice(_process.forced, "force_backend")
    # Settings are about softmax attention: a hybrid model has both kinds, and few backends do.
    if component_choice is not None or (request is not None and request.family == "linear"):
        return component_choice
    tower = ("mm_attention_backend",) if TOWER in (name, role) else ()
    for field in (*tower, _phase_field(settings, request), "attention_backend"):
        if (configured := getattr(settings, field)) is not None:
            return Choice(configured, settings.source(field))
    return None


def _phase_field(settings: config.Settings, request: AttentionRequest | None) -> str:
    """The setting of a serving phase; drafts are verified by the backend of `speculative_attention_mode`."""
    if request is None or request.family not in ("paged", "mla"):
        return "attention_backend"
    verifier = settings.speculative_attention_mode or "prefill"
    phase = {"decode": "decode", "verify": verifier}.get(request.phase, "prefill")
    return f"{phase}_attention_backend"


def reach(scope: Scope) -> None:
    """Note that a layer was built, or a call made, as part of the scope's component."""
    _, name, role = scope
    if name:
        _process.reached.update((name, f"{name}.{role}") if role else (name,))


def note_served(method: str) -> None:
    """Note that a method served a call."""
    _process.served.add(method)


def note_left(method: str, why: str) -> None:
    """Note that a method left calls of one kind to others, by which rule."""
    _process.left.setdefault(method, {})[why] = None


def check_components() -> None:
    """Call once a model is built: an override that reached no layer is a mistake, not a preference. After a first step
    it also finds methods that were asked for and left every call to others.

    Raises:
        ConfigError: naming the overrides that no layer asked for, and the components that were seen; or the method
            that served no call, and the rules by which it left them.
    """
    for name in sorted(_process.left.keys() - _process.served):
        raise ConfigError(
            f"{name} was asked for and served no call: it left all of them to others, because "
            f"{'; '.join(_process.left[name])}. Give the calls a place (place=polyattn.video.Place(...)) that it "
            "serves, or ask for another backend"
        )
    wanted = set(current_settings().component_attention_backends)
    if missed := sorted(wanted - _process.reached):
        near = did_you_mean(missed[0], _process.reached)
        seen = f"Reached: {', '.join(sorted(_process.reached))}. Check the component names"
        none = "No layer was built or called inside `with polyattn.component(...):`. Put the part's code into that"
        raise ConfigError(
            f"component override{'s' if len(missed) > 1 else ''} {', '.join(missed)} reached no layer.{near} "
            f"{seen if _process.reached else none}, or remove them"
        )


def _name_or_none(what: str, name: str | None) -> str:
    if name is not None and not isinstance(name, str):
        raise InvalidInputError(f"{what}={name!r} is a {type(name).__name__}; give a name as a string, or None")
    return name or ""
