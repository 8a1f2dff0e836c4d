"""What adapters share: functions of a library, imported when a request is bound, held to what the installed one has.

    from polyattn import adapters

    class Adapter:
        def bind(self, request):
            attend = adapters.load(ACME, "acme.attention:attend", {"return_lse": "the LSE"} if request.lse else None)

No adapter imports its library at module level: on a machine without it the import fails, in ways of its own.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..contract import Requirement
from ..errors import BackendUnavailableError
from ..registry import distributions

__all__ = ["Operator", "keywords", "load"]


def load(requirement: Requirement, target: str, needs: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """Import a function or class of a library, and check that it takes what the call needs.

    Args:
        requirement: the distribution it comes from. target: "module:attribute"; the attribute may be dotted, as in
            "torch:ops.acme.attend" (an operator that importing the library registers: load something of it first).
        needs: keywords that the call will be given, and what for: an older version may lack them.

    Raises:
        BackendUnavailableError: it cannot be imported here, or it lacks an attribute or a keyword.
    """
    dotted, _, attribute = target.partition(":")
    return _checked(
        requirement, target, lambda: operator.attrgetter(attribute)(importlib.import_module(dotted)), needs or {}
    )


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
        namespace, _, called = name.partition(".")

        def found() -> Any:
            importlib.import_module(dotted)
            return getattr(getattr(torch.ops, namespace), called).default

        operator: Any = _checked(requirement, target, found, {**dict.fromkeys(fixed, "every call"), **needs})
        self.function: Callable[..., Any] = operator
        arguments = operator._schema.arguments
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
        remedy = _repair(requirement, broken=True)
        raise BackendUnavailableError(
            f"{_named(requirement)} has no usable {target}: {type(exc).__name__}: {exc}. {remedy}"
        ) from exc
    if needs:
        taken = keywords(found)
        for keyword, purpose in needs.items():
            if keyword not in taken:
                raise BackendUnavailableError(
                    f"{target} of {_named(requirement)} takes no {keyword!r}, which {purpose} needs. "
                    f"{_repair(requirement)}"
                )
    return found


def keywords(function: Any) -> frozenset[str]:
    """List what a loaded function may be given by name.

    Args:
        function: a Python function, or an operator or overload of `torch.ops`, which shows it in its schemas alone.
    """
    one = getattr(function, "_opoverload", None)
    if one is not None:
        overloads = [one]
    elif hasattr(function, "_schema"):
        overloads = [function]
    elif hasattr(function, "_overload_names"):
        overloads = [getattr(function, name) for name in function.overloads()]
    else:
        return frozenset(inspect.signature(function).parameters)
    return frozenset(argument.name for overload in overloads for argument in overload._schema.arguments)


def _named(requirement: Requirement) -> str:
    return " ".join(_installed(requirement) or [requirement.distribution])


def _installed(requirement: Requirement) -> tuple[str, str] | None:
    """Name and version of the distribution that is here, of those that a requirement takes."""
    for name in (requirement.distribution, *requirement.also):
        if version := distributions.distribution_version(name):
            return name, version
    return None


def _repair(requirement: Requirement, *, broken: bool = False) -> str:
    """What to do about a library that is not as it is needed. broken: it cannot be loaded at all."""
    another = f"Install one that does: {distributions.remedy(requirement)}"
    installed = _installed(requirement)
    if installed is None or installed[0] == "torch":  # nobody goes on without that
        return another
    name, version = installed
    without = f"or go on without it: POLYATTN_WITHOUT={name}"
    changed = distributions.changed_files(name) if broken else ()
    if not changed:
        return f"{another}, {without}"
    more = f" and {len(changed) - 1} more" if changed[1:] else ""
    return (
        f"It is not as it was installed: another package has replaced or removed {changed[0]}{more}. Install it again, "
        f"last: pip install --force-reinstall --no-deps {name}=={version}, {without}"
    )
