"""This module gives the components of a pipeline their backends: `prepare`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import ConfigError, did_you_mean
from ...registry.manager import get_manager
from ...selection import overrides
from ...selection.aliases import names_method
from ...selection.config import parse_backend_config, resolve_options
from ...selection.inspection import catalogue
from ..common.names import backend_words
from .families import FAMILIES, family_of
from .places import Denoising, Part
from .processors import attention_modules, calls_sdpa, direct
from .registry import NAME, dispatch, install, installed, reset_on, set_on
from .rules import KINDS, ROLES, Rule, Rules, read_rules

__all__ = [
    "Component", "Prepared", "Wanted", "apply", "check_backends", "check_names", "is_ours", "known_to_both", "prepare",
    "prepared", "read_wanted",
]  # fmt: skip

Overrides = Mapping[str, Any] | str | None
Options = Mapping[str, Any] | str | os.PathLike[str] | None


@dataclasses.dataclass(frozen=True)
class Component:
    """A component is one entry of a pipeline's model_index.json.

    Attributes:
        name: as it stands there. kind: class of the object. served: whether polyattn serves its attention.
        why: who does, and by which way; or why polyattn does not.
    """

    name: str
    kind: str
    served: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What was asked of a pipeline.

    Attributes:
        rules: component -> its rules. options: backend -> its options. source: who asked, for messages.
        native: a backend of diffusers, for its models that have no default of their own; None = none.
    """

    rules: Mapping[str, Rules]
    options: Mapping[str, Mapping[str, Any]]
    source: str = "prepare()"
    native: str | None = None

    def rules_of(self, name: str) -> Rules | None:
        """Return the rules of a component, None where nobody asked for any."""
        rules = self.rules.get(name)
        return rules if rules is None or rules.default else dataclasses.replace(rules, default=self.native)


_prepared: weakref.WeakKeyDictionary[Any, Prepared] = weakref.WeakKeyDictionary()


def prepared(pipe: Any) -> Prepared | None:
    """Return what `prepare` made of a pipeline, None where it was not called."""
    return _prepared.get(pipe)


class Prepared:
    """A pipeline whose components have their backends, until `remove`.

    Attributes:
        components: every component that is a model, in the pipeline's order. parts: of those that polyattn serves.
        source: who asked for it, for messages.
    """

    def __init__(
        self, components: tuple[Component, ...], parts: tuple[Part, ...], undo: contextlib.ExitStack, source: str
    ) -> None:
        self.components, self.parts, self.source = components, parts, source
        self._undo = undo

    def remove(self) -> None:
        """Give the pipeline back its hooks, its scheduler and its own attention. A second call does nothing."""
        self._undo.close()


def check_names(known: Iterable[str], asked: Iterable[str]) -> None:
    """See that overrides name components of a pipeline, before anything is loaded.

    Args:
        known: names of model_index.json. asked: "component" or "component.role".

    Raises:
        ConfigError: one of them is no component, or its role is none.
    """
    names = [name for name in known if not name.startswith("_")]
    for key in asked:
        name, dot, role = key.partition(".")
        if name not in names:
            raise ConfigError(
                f"the pipeline has no component {name!r}.{did_you_mean(name, names)} Its model_index.json has "
                f"{', '.join(sorted(names))}"
            )
        if dot and role not in ROLES:
            raise ConfigError(
                f"the component {name} has no role {role!r}.{did_you_mean(role, ROLES)} Roles: {', '.join(ROLES)}"
            )


def read_wanted(
    known: Iterable[str], components: Overrides = None, config: Options = None, source: str = "prepare()"
) -> Wanted:
    """Read what is asked of a pipeline.

    Args:
        known: names of its components. components, config: as `prepare`. source: who asks, for messages.

    Raises:
        ConfigError: as `prepare`; nothing is loaded.
    """
    names = tuple(known)
    found: dict[str, dict[str, Any]] = {}
    where = f"the rules of {source}"
    settled = {} if config is None else parse_backend_config(config, where=f"config of {source}")
    for name in [name for name in settled if name in names]:
        given = settled.pop(name)
        found[name] = {key: dict(value) if isinstance(value, Mapping) else value for key, value in given.items()} if (
            isinstance(given, Mapping)
        ) else {"default": given}  # fmt: skip
    pairs = _pairs(components, source)
    check_names(names, pairs)
    for key, given in pairs.items():
        name, dot, role = key.partition(".")
        rules = found.setdefault(name, {})
        if isinstance(given, Mapping):
            more: Mapping[str, Any] = {"roles": {role: given}} if dot else given
        else:
            more = {"roles": {role: given}} if dot else {"default": given}
        for kind, value in more.items():
            if kind in KINDS and isinstance(value, Mapping):
                before = rules.setdefault(kind, {})
                if twice := [word for word in value if word in before]:
                    raise ConfigError(f"{where} name {name}.{twice[0]} twice; leave one of them out")
                before.update(value)
            elif kind in rules:
                raise ConfigError(f"{where} name a {kind} of {name} twice; leave one of them out")
            else:
                rules[kind] = value
    rules_of = {name: read_rules(name, given) for name, given in found.items()}
    named = {backend for rules in rules_of.values() for backend in rules.backends()}
    return Wanted(rules_of, _options(settled, named, f"config of {source}"), source)


def _pairs(components: Overrides, source: str) -> dict[str, Any]:
    if components is None:
        return {}
    if isinstance(components, str):
        from ...selection.config import parse_components

        return dict(parse_components(components, where=f"components of {source}"))
    if not isinstance(components, Mapping):
        raise ConfigError(
            f"components={components!r} is a {type(components).__name__}; give a mapping of component to backend"
        )
    return dict(components)


def _options(given: Mapping[str, Any], named: Iterable[str], where: str) -> dict[str, dict[str, Any]]:
    """Find whose the options are: of the backend under whose name they stand, of the one that is named and has
    options, or of the only one that is named."""
    if not given:
        return {}
    setting = overrides.current_settings().attention_backend
    asked = {*named, *([setting] if setting else ())}
    words = set(backend_words())
    infos = get_manager().backends.values()
    able = sorted(
        name
        for name in asked
        if any(info.config for info in infos if name in (info.name, *(alias.name for alias in info.aliases)))
    )
    flat = [key for key, value in given.items() if not isinstance(value, Mapping)]
    if flat and len(able) > 1:
        raise ConfigError(
            f"{where} gives {', '.join(flat)}, and {' and '.join(able)} are named and have options; put "
            f"them under the name of theirs, {{{able[0]!r}: {{{flat[0]!r}: ...}}}}"
        )
    owner = able[0] if able else min(asked) if len(asked) == 1 else None
    return resolve_options(given, owner, where, words)


def prepare(pipe: Any, components: Overrides = None, config: Options = None) -> Prepared:
    """Give the attention of a diffusers pipeline to polyattn, each component its backend.

    Every component whose attention can be reached is served: models of diffusers, and text encoders of transformers.
    Models whose family is known tell methods of sparse attention the grid of their tokens, the step and the branch.
    What was prepared before is prepared anew. diffusers' own active backend stays what it is.

    Args:
        pipe: a `DiffusionPipeline`.
        components: backends by component, a name of model_index.json, or by component.role, role "self" or "cross":
            {"transformer": "video_sparse_attn", "transformer.cross": "fa"}; a string of pairs is read too. A name
            that only diffusers knows ("native", "_flash_3_hub", ...) is given to diffusers. Components that are not
            named follow polyattn's overrides and automatic choice.
        config: rules by component, {"transformer": {"default": "sage_attn", "steps": {"0-3": "fa"}}} (see
            `rules.py`), and options of backends, by backend or for the one that is named and has some.

    Returns:
        What was done; `remove()` takes it back.

    Raises:
        ConfigError: an unknown component, role, backend or rule; an override of a component that cannot be reached, of
            a layer that there is not, or of a method for a model without a grid.
        BackendUnavailableError: diffusers or transformers is missing or too old.
    """
    return apply(pipe, read_wanted(pipe.components, components, config))


def apply(pipe: Any, wanted: Wanted) -> Prepared:
    """Do to a pipeline what was asked of it. Result and errors as `prepare`."""
    if not installed():
        install()
    if (before := _prepared.pop(pipe, None)) is not None:
        before.remove()
    names = {name: part for name, part in pipe.components.items() if hasattr(part, "named_modules")}
    check_backends(wanted)
    if idle := [name for name in wanted.rules if name not in names]:
        raise ConfigError(
            f"the override of {idle[0]} reaches no layer: it is {type(pipe.components[idle[0]]).__name__} in this "
            "pipeline, which is no model; remove the override"
        )
    with contextlib.ExitStack() as undo:
        rows, parts = [], []
        for name, model in names.items():
            row, part = _component(name, model, wanted, undo)
            rows.append(row)
            if part is not None:
                parts.append(part)
                undo.callback(part.end)
        denoising = Denoising(pipe, parts)
        undo.callback(denoising.end)
        for part in parts:
            part.denoising = denoising
        if wanted.options:
            overrides.add_options(wanted.source, wanted.options)
        done = _prepared[pipe] = Prepared(tuple(rows), tuple(parts), undo.pop_all(), wanted.source)
        done._undo.callback(_prepared.pop, pipe, None)
        return done


def check_backends(wanted: Wanted) -> None:
    """See that every backend that is named is one, before anything is loaded.

    Raises:
        ConfigError: neither polyattn nor diffusers has it, or rules stand beside one of diffusers.
    """
    for name in wanted.rules:
        rules = wanted.rules_of(name)
        assert rules is not None
        for backend in rules.backends():
            if not is_ours(backend, name) and rules.others:
                raise ConfigError(
                    f"{backend!r} is a backend of diffusers, which serves {name} as a whole or not at all; leave "
                    f"the rules of {name} out, or name backends of polyattn"
                )


def is_ours(backend: str, asked_for: str) -> bool:
    """Tell whether polyattn has a backend; else diffusers has it. A name that both know is polyattn's.

    Args:
        asked_for: what it is to serve, for the message.

    Raises:
        ConfigError: nobody has it.
    """
    words = backend_words()
    if _ours(backend, words):
        return True
    native = [member.value for member in dispatch().AttentionBackendName]
    if backend not in native:
        known = [*words, *(one for one in native if not one.startswith(NAME))]
        raise ConfigError(
            f"no backend is named {backend!r}, which is asked for {asked_for}.{did_you_mean(backend, known)} "
            "`polyattn list` has those of polyattn, diffusers' AttentionBackendName those of diffusers"
        )
    return False


def known_to_both(backends: Iterable[str]) -> list[str]:
    """List those of these backends whose name diffusers knows too."""
    native = {member.value for member in dispatch().AttentionBackendName}
    return [backend for backend in backends if backend in native and _ours(backend, backend_words())]


def _ours(backend: str, words: Iterable[str]) -> bool:
    return backend.partition("@")[0].partition("/")[0] in words


def _component(name: str, model: Any, wanted: Wanted, undo: contextlib.ExitStack) -> tuple[Component, Part | None]:
    kind = type(getattr(model, "_orig_mod", model)).__name__
    if _of_transformers(model):
        return _text_encoder(name, model, kind, wanted.rules.get(name), undo), None
    rules = wanted.rules_of(name)
    layers = attention_modules(model) if hasattr(model, "set_attention_backend") else []
    reached = [(layer, module) for layer, module in layers if direct(module.processor) or calls_sdpa(module.processor)]
    if not reached:
        why = "its attention is in its own code" if layers else "it has no attention layer of diffusers"
        if rules is not None:
            raise ConfigError(f"the override of {name} reaches no layer: {why} ({kind}); remove the override of {name}")
        return Component(name, kind, False, why), None
    native = wanted.native if rules is None else rules.default
    if native is not None and not _ours(native, backend_words()):
        set_on(model, native)
        undo.callback(reset_on, model)
        overrides.reach(("", name, ""))
        return Component(name, kind, False, f"diffusers' own backend {native!r}, as asked"), None
    rules, family = rules or Rules(), family_of(model)
    methods = [backend for backend in rules.backends() if names_method(backend, catalogue())]
    if methods and family is None:
        raise ConfigError(
            f"{methods[0]} needs the grid of the tokens of {name}, and it is not known for {kind}; known: "
            f"{', '.join(sorted(FAMILIES))}. Name a dense backend for {name}"
        )
    part = Part(name, model, family, rules, layers)
    for rule in rules.others:
        if rule.kind == "layers" and rule.beyond(part.blocks):
            part.end()
            raise _no_layer(name, kind, rule, part.blocks)
    set_on(model, NAME)
    undo.callback(reset_on, model)
    missed = len(layers) - len(reached)
    aside = f"; {missed} more compute attention in their own code" if missed else ""
    return Component(name, kind, True, f"{len(reached)} attention layers on polyattn{aside}"), part


def _no_layer(name: str, kind: str, rule: Rule, blocks: int) -> ConfigError:
    if not blocks:
        return ConfigError(f"the rule of {name} for {rule} reaches no layer: the blocks of {kind} are not known")
    return ConfigError(
        f"the rule of {name} for {rule} reaches no layer: {kind} has {blocks} blocks, numbered 0 to {blocks - 1}"
    )


def _of_transformers(model: Any) -> bool:
    from ..transformers.registry import interfaces

    return isinstance(model, interfaces()[2])


def _text_encoder(name: str, model: Any, kind: str, rules: Rules | None, undo: contextlib.ExitStack) -> Component:
    from ...errors import UnsupportedRequestError

    backend = None if rules is None else rules.default
    if rules is not None and rules.others:
        raise ConfigError(
            f"the rules of {name} are by {rules.others[0].kind}, which {kind}, a model of transformers, does not have; "
            f"give {name} one backend"
        )
    before = model.config._attn_implementation
    if backend is not None and not _ours(backend, backend_words()):
        raise ConfigError(
            f"{backend!r} is a backend of diffusers, and {name} is {kind}, a model of transformers; name a backend of "
            f"polyattn for it"
        )
    try:
        model.set_attn_implementation(NAME)
    except UnsupportedRequestError as refusal:
        if rules is not None:
            raise
        return Component(name, kind, False, str(refusal))
    undo.callback(model.set_attn_implementation, before)
    scope = _Scope(name, backend)
    for handle in (
        model.register_forward_pre_hook(scope.enter),
        model.register_forward_hook(scope.leave, always_call=True),
    ):
        undo.callback(handle.remove)
    return Component(name, kind, True, f"polyattn in transformers, instead of {before}")


class _Scope:
    """The component of overrides that the calls of a text encoder belong to, and the backend that was named for it."""

    def __init__(self, name: str, backend: str | None) -> None:
        self._name, self._backend = name, backend
        self._inside: list[overrides.restored] = []

    def enter(self, model: Any, args: Any) -> None:
        outer = overrides.current_scope()
        chosen = outer[0] if overrides.above_components(outer) else self._backend or ""
        scope = overrides.restored((chosen, self._name, ""))
        scope.__enter__()
        self._inside.append(scope)

    def leave(self, model: Any, args: Any, output: Any) -> None:
        if self._inside:
            self._inside.pop().__exit__(None, None, None)
