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

from . import distributions
from .errors import BackendUnavailableError
from .records import Requirement

__all__ = ["keywords", "load"]


def load(requirement: Requirement, target: str, needs: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """A function or class of a library.

    Args:
        requirement: the distribution it comes from. target: "module:attribute"; the attribute may be dotted, as in
            "torch:ops.acme.attend" (an operator that importing the library registers: load something of it first).
        needs: keywords that the call will be given, and what for: an older version may lack them.

    Raises:
        BackendUnavailableError: it cannot be imported here, or it lacks an attribute or a keyword.
    """
    dotted, _, attribute = target.partition(":")
    try:
        found: Callable[..., Any] = operator.attrgetter(attribute)(importlib.import_module(dotted))
    except Exception as exc:  # on a machine they were not built for, libraries raise OSError, RuntimeError, ...
        raise BackendUnavailableError(
            f"{_named(requirement)} has no usable {target}: {type(exc).__name__}: {exc}. {_repair(requirement)}"
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
    """What a loaded function may be given by name. An operator of torch shows it in its schemas alone."""
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
    for name in (requirement.distribution, *requirement.also):
        if version := distributions.distribution_version(name):
            return f"{name} {version}"
    return requirement.distribution


def _repair(requirement: Requirement) -> str:
    return f"Install one that does: {requirement.hint}"
