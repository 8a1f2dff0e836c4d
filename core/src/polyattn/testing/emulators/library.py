"""A vendor's library in plain torch on the CPU: its names, its signatures, its documented meaning, its traps."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ...registry import distributions
from .signing import Signatures
from .typed import mismatches

if TYPE_CHECKING:
    import pytest

__all__ = ["Call", "Library", "release"]

_OPERATORS = "torch.ops."

_REGISTERED: dict[str, Any] = {}
_INSTALLED: dict[str, Callable[..., Any]] = {}
"""What registered operators do now."""


class Call(NamedTuple):
    """Records one call of a library.

    Attributes:
        name: of the function; of a method with its class, `Wrapper.plan`.
        positional: how many arguments came without a keyword. given: those that were given, by name.
        arguments: all of them, defaults included.
    """

    name: str
    positional: int
    given: Mapping[str, Any]
    arguments: Mapping[str, Any]


def release() -> None:
    """Give the names of all operators back to torch: a real library registers its own when it is loaded, and ends the
    process where they are taken."""
    while _REGISTERED:
        fragment, _ = _REGISTERED.popitem()[1]
        fragment._destroy()


class Library:
    """Describes one version of a vendor's distribution.

    Args:
        distribution: its name on the registry. version: what its metadata says.
        modules: dotted names of its modules; `torch.ops.acme` is a namespace of operators.
        signatures: those of its functions.

    Attributes:
        calls: what was called so far, in order.
    """

    def __init__(self, distribution: str, version: str, *modules: str, signatures: Signatures | None = None) -> None:
        self.distribution, self.version, self.signatures = distribution, version, signatures
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
            if parent and not dotted.startswith(_OPERATORS):
                setattr(self._module(parent), name, made)
        return self.modules[dotted]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Library:
        """Make it importable, and known to the package metadata that polyattn reads."""
        for dotted, module in self.modules.items():
            if dotted.startswith(_OPERATORS):
                import torch

                monkeypatch.setattr(torch.ops, dotted.removeprefix(_OPERATORS), module, raising=False)
            else:
                monkeypatch.setitem(sys.modules, dotted, module)
        for key, body in self._operators.items():
            self._registered(key)
            monkeypatch.setitem(_INSTALLED, key, body)
        real = distributions.distribution_version
        mine = {self.distribution: self.version}
        monkeypatch.setattr(distributions, "distribution_version", lambda name: mine.get(name) or real(name))
        return self

    def add(self, dotted: str, **members: Any) -> None:
        """Members of a module that are no recorded functions: classes, constants."""
        for name, member in members.items():
            setattr(self._module(dotted), name, member)

    def function(
        self, dotted: str, key: str, name: str = "", mistyped: Collection[str] = ()
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: a function of module `dotted` whose signature is entry `key`. The decorated one gets every
        argument by name, defaults included; it is called `name`, or as the last part of the key.

        Args:
            mistyped: parameters whose annotation the vendor's own code contradicts: their types are not checked.
        """

        def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
            bound = self._signature(key)
            untyped = [bound.parameters[n].replace(annotation=inspect.Parameter.empty) for n in mistyped]
            replaced = {**bound.parameters, **{parameter.name: parameter for parameter in untyped}}
            bound = bound.replace(parameters=list(replaced.values()))
            call = self.held(name or key.rpartition(".")[2], bound, body)
            setattr(self._module(dotted), call.__name__, call)
            return call

        return decorate

    def method(self, key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: a method of a class whose signature is entry `key`, which is written without `self`."""

        def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
            called = ".".join(key.split(".")[-2:])
            bound = self._signature(key)
            itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

            @functools.wraps(body)
            def call(self_: Any, /, *args: Any, **kwargs: Any) -> Any:
                return body(self_, **self._bind(called, bound, args, kwargs))

            call.__signature__ = inspect.Signature([itself, *bound.parameters.values()])  # type: ignore[attr-defined]
            return call

        return decorate

    def operator(self, key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: operator `key` ("torch.ops.acme.forward", an entry with a schema) on CPU tensors, as `function`.
        It is registered with torch, which binds its calls; what is None counts as not given."""

        def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
            names = [argument.name for argument in self._registered(key)._schema.arguments]

            def call(*args: Any) -> Any:
                arguments = dict(zip(names, args, strict=True))
                given = {name: value for name, value in arguments.items() if value is not None}
                self.calls.append(Call(key.rpartition(".")[2], len(args), given, arguments))
                return body(**arguments)

            self._operators[key] = call
            return body

        return decorate

    def _registered(self, key: str) -> Any:
        """The operator, which torch has until `release`: what it does changes with the library. Where the real library
        is loaded it is that one's, on CPU tensors."""
        import torch

        if key not in _REGISTERED:
            self._signature(key)  # raises where there is no such entry
            assert self.signatures is not None
            namespace, name = key.removeprefix(_OPERATORS).split(".")
            fragment: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
            if not hasattr(getattr(torch.ops, namespace), name):
                fragment.define(self.signatures.entries[key]["schema"].removeprefix(f"{namespace}::"))
            fragment.impl(name, lambda *args: _INSTALLED[key](*args), "CPU")
            _REGISTERED[key] = fragment, getattr(getattr(torch.ops, namespace), name).default
        return _REGISTERED[key][1]

    def held(self, name: str, bound: inspect.Signature, body: Callable[..., Any]) -> Callable[..., Any]:
        """`body` behind this signature: it gets every argument by name, and its calls are recorded as `name`."""

        @functools.wraps(body)
        def call(*args: Any, **kwargs: Any) -> Any:
            return body(**self._bind(name, bound, args, kwargs))

        call.__name__ = name
        call.__signature__ = bound  # type: ignore[attr-defined]
        return call

    def _signature(self, key: str) -> inspect.Signature:
        if self.signatures is None:
            raise TypeError(f"Library({self.distribution!r}) was made without signatures=, and {key} needs one")
        return self.signatures.signature(key)

    def _bind(
        self, name: str, bound: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        found = bound.bind(*args, **kwargs)
        for parameter in bound.parameters.values():
            # What a library swallows it does not do.
            if parameter.kind is inspect.Parameter.VAR_KEYWORD and found.arguments.pop(parameter.name, None):
                raise TypeError(f"{name}() would swallow {', '.join(set(kwargs) - set(bound.parameters))}")
        given = dict(found.arguments)
        plain = {n: value for n, value in given.items() if not _variadic(bound, n)}
        if wrong := mismatches(bound, plain):
            raise TypeError(f"{name}(): {'; '.join(wrong)}")
        found.apply_defaults()
        arguments = {n: value for n, value in found.arguments.items() if not _variadic(bound, n)}
        self.calls.append(Call(name, len(args), given, arguments))
        return arguments


def _variadic(bound: inspect.Signature, name: str) -> bool:
    return bound.parameters[name].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
