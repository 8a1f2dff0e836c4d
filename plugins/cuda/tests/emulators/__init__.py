"""Vendor libraries in plain torch on the CPU: their names, their documented semantics, their traps.

One file per library. A `Library` holds the modules that an adapter would import. Each of its functions has the vendor's
own signature (`signatures.json` beside this folder, read from the vendor's files), takes a call only if it binds to it,
and records what it was given. Its operators are registered with torch under the vendor's own schemas.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from polyattn import distributions

__all__ = ["OTHER", "Call", "Library", "signature"]

_SIGNATURES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "signatures.json").read_text())

OTHER = object()
"""A default that is no literal in the vendor's source (a dtype, usually)."""


class Call(NamedTuple):
    """One call of a library.

    Attributes:
        name: of the function; of a method with its class, `Wrapper.plan`.
        positional: how many arguments came without a keyword. given: those that were given, by name.
        arguments: all of them, defaults included.
    """

    name: str
    positional: int
    given: Mapping[str, Any]
    arguments: Mapping[str, Any]


@functools.cache
def signature(key: str) -> inspect.Signature:
    """The vendor's signature of this entry of signatures.json, without `self`."""
    return inspect.signature(eval(f"lambda {_SIGNATURES[key]['parameters']}: None", {"OTHER": OTHER}))


class Library:
    """One version of a vendor's distribution.

    Args:
        distribution: its name on the registry. version: what its metadata says.
        modules: dotted names of its modules.

    Attributes:
        calls: what was called so far, in order.
    """

    def __init__(self, distribution: str, version: str, *modules: str) -> None:
        self.distribution, self.version = distribution, version
        self.calls: list[Call] = []
        self.modules: dict[str, ModuleType] = {}
        self._operators: dict[str, Callable[..., Any]] = {}
        for dotted in modules:
            self._module(dotted)

    def _module(self, dotted: str) -> ModuleType:
        if dotted not in self.modules:
            made = self.modules[dotted] = ModuleType(dotted)
            made.__spec__ = ModuleSpec(dotted, None, is_package=True)
            made.__path__ = []
            parent, _, name = dotted.rpartition(".")
            if parent:
                setattr(self._module(parent), name, made)
        return self.modules[dotted]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Library:
        """Make it importable, and known to the package metadata that polyattn reads."""
        for dotted, module in self.modules.items():
            monkeypatch.setitem(sys.modules, dotted, module)
        for key, body in self._operators.items():
            monkeypatch.setitem(_INSTALLED, key, body)
        real = distributions.distribution_version
        mine = {self.distribution: self.version}
        monkeypatch.setattr(distributions, "distribution_version", lambda name: mine.get(name) or real(name))
        return self

    def add(self, dotted: str, **members: Any) -> None:
        """Members of a module that are no recorded functions: classes, constants."""
        for name, member in members.items():
            setattr(self._module(dotted), name, member)

    def function(self, dotted: str, key: str, name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: a function of module `dotted` whose signature is entry `key`. The decorated one gets every
        argument by name, defaults included; it is called `name`, or as the last part of the key."""

        def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
            called = name or key.rpartition(".")[2]
            bound = signature(key)

            @functools.wraps(body)
            def call(*args: Any, **kwargs: Any) -> Any:
                return body(**self._bind(called, bound, args, kwargs))

            call.__signature__ = bound  # type: ignore[attr-defined]
            setattr(self._module(dotted), called, call)
            return call

        return decorate

    def operator(self, key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: operator `key` (torch.ops...) on CPU tensors, as `function`. Torch binds its calls to the schema;
        what is None counts as not given."""

        def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
            names = [argument.name for argument in _operator(key)._schema.arguments]

            def call(*args: Any) -> Any:
                arguments = dict(zip(names, args, strict=True))
                given = {name: value for name, value in arguments.items() if value is not None}
                self.calls.append(Call(key.rpartition(".")[2], len(args), given, arguments))
                return body(**arguments)

            self._operators[key] = call
            return body

        return decorate

    def method(self, key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: a method of a class whose signature is entry `key`, which is written without `self`."""

        def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
            called = ".".join(key.split(".")[-2:])
            bound = signature(key)
            itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

            @functools.wraps(body)
            def call(self_: Any, /, *args: Any, **kwargs: Any) -> Any:
                return body(self_, **self._bind(called, bound, args, kwargs))

            call.__signature__ = inspect.Signature([itself, *bound.parameters.values()])  # type: ignore[attr-defined]
            return call

        return decorate

    def _bind(
        self, name: str, bound: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        found = bound.bind(*args, **kwargs)
        for parameter in bound.parameters.values():
            # What a library swallows it does not do.
            if parameter.kind is inspect.Parameter.VAR_KEYWORD and found.arguments.pop(parameter.name, None):
                raise TypeError(f"{name}() would swallow {', '.join(set(kwargs) - set(bound.parameters))}")
        given = dict(found.arguments)
        found.apply_defaults()
        arguments = {n: value for n, value in found.arguments.items() if not _variadic(bound, n)}
        self.calls.append(Call(name, len(args), given, arguments))
        return arguments


_INSTALLED: dict[str, Callable[..., Any]] = {}
"""What the operators do now, by key: torch has them for as long as the process lives."""


@functools.cache
def _operator(key: str) -> Any:
    _, _, namespace, name = key.split(".")
    fragment = torch.library.Library(namespace, "FRAGMENT")
    fragment.define(_SIGNATURES[key]["schema"])
    fragment.impl(name, lambda *args: _INSTALLED[key](*args), "CPU")
    _FRAGMENTS.append(fragment)
    return getattr(getattr(torch.ops, namespace), name).default


_FRAGMENTS: list[torch.library.Library] = []


def _variadic(bound: inspect.Signature, name: str) -> bool:
    return bound.parameters[name].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
