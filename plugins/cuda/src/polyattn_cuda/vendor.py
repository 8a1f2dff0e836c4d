"""Functions of vendor libraries: imported when a request is bound, held to what the installed version has."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from polyattn import distributions
from polyattn.errors import BackendUnavailableError
from polyattn.records import Requirement

__all__ = ["Operator", "load"]


def load(requirement: Requirement, target: str, needs: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """A function or class of a vendor's library.

    Args:
        requirement: the distribution it comes from. target: "module:attribute".
        needs: keywords that the call will be given, and what for: an older version may lack them.

    Raises:
        BackendUnavailableError: it cannot be imported here, or it lacks an attribute or a keyword.
    """
    dotted, _, attribute = target.partition(":")
    return _checked(requirement, target, lambda: getattr(importlib.import_module(dotted), attribute), needs or {})


class Operator:
    """A `torch.ops` operator of a vendor's library, with what a request fixes.

    Their schemas have no defaults, and grow: what is not given is None, in the order of the installed version.

    Args:
        requirement: the distribution it comes from. target: "module:namespace.name"; importing the module registers it.
        fixed: arguments of every call. needs: as `load`, beside those.

    Attributes:
        function: the operator, all of whose arguments are given by position.

    Raises:
        BackendUnavailableError: see `load`, or the installed version needs an argument that is not among these.
    """

    def __init__(
        self, requirement: Requirement, target: str, fixed: Mapping[str, Any], needs: Mapping[str, str]
    ) -> None:
        dotted, _, name = target.partition(":")
        namespace, _, operator = name.partition(".")

        def found() -> Any:
            importlib.import_module(dotted)
            return getattr(getattr(torch.ops, namespace), operator).default

        self.function: Any = _checked(requirement, target, found, {**dict.fromkeys(fixed, "every call"), **needs})
        arguments = self.function._schema.arguments
        kinds = [argument.type.kind() for argument in arguments]
        self._leading = next(number for number, kind in enumerate([*kinds, ""]) if kind != "TensorType")
        others = arguments[self._leading :]
        self._rest = [fixed.get(argument.name) for argument in others]
        self._place = {argument.name: number for number, argument in enumerate(others)}
        for argument in others:
            if argument.type.kind() != "OptionalType" and argument.name not in fixed:
                raise BackendUnavailableError(
                    f"{target} of {_named(requirement)} needs {argument.name!r}, which polyattn does not know. "
                    f"{_repair(requirement)}"
                )

    def rest(self, **named: Any) -> tuple[Any, ...]:
        """Everything behind its leading tensors, for `function`."""
        filled = self._rest.copy()
        for name, value in named.items():
            filled[self._place[name]] = value
        return tuple(filled)

    def taking(self, *names: str) -> Callable[..., Any]:
        """It as a function of its leading tensors, then of these arguments in order, and of others by name."""
        function, rest, place = self.function, self._rest, self._place
        places = [place[name] for name in names]
        leading = self._leading

        def call(*given: Any, **named: Any) -> Any:
            filled = rest.copy()
            for number, value in zip(places, given[leading:], strict=True):
                filled[number] = value
            for name, value in named.items():
                filled[place[name]] = value
            return function(*given[:leading], *filled)

        return call


def _checked(
    requirement: Requirement, target: str, find: Callable[[], Any], needs: Mapping[str, str]
) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = find()
    except Exception as exc:  # on a machine they were not built for, libraries raise OSError, RuntimeError, ...
        raise BackendUnavailableError(
            f"{_named(requirement)} has no usable {target}: {type(exc).__name__}: {exc}. {_repair(requirement)}"
        ) from exc
    if needs:
        taken = _keywords(found)
        for keyword, purpose in needs.items():
            if keyword not in taken:
                raise BackendUnavailableError(
                    f"{target} of {_named(requirement)} takes no {keyword!r}, which {purpose} needs. "
                    f"{_repair(requirement)}"
                )
    return found


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """What a function may be given by name. Operators show it in their schema alone."""
    schema = getattr(getattr(function, "_opoverload", function), "_schema", None)
    if schema is not None:
        return frozenset(argument.name for argument in schema.arguments)
    return frozenset(inspect.signature(function).parameters)


def _named(requirement: Requirement) -> str:
    for name in (requirement.distribution, *requirement.also):
        if version := distributions.distribution_version(name):
            return f"{name} {version}"
    return requirement.distribution


def _repair(requirement: Requirement) -> str:
    return f"Install one that does: {requirement.hint}"
