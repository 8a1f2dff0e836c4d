"""Functions of vendor libraries: imported when a request is bound, held to what the installed version has."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from polyattn import distributions
from polyattn.errors import BackendUnavailableError
from polyattn.records import Requirement

__all__ = ["load"]


def load(requirement: Requirement, target: str, needs: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """A function or class of a vendor's library.

    Args:
        requirement: the distribution it comes from. target: "module:attribute".
        needs: keywords that the call will be given, and what for: an older version may lack them.

    Raises:
        BackendUnavailableError: it cannot be imported here, or it lacks an attribute or a keyword.
    """
    dotted, _, attribute = target.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(dotted), attribute)
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
    """What a function may be given by name. An operator of `torch.library.custom_op` shows it in its schema alone."""
    operator = getattr(function, "_opoverload", None)
    if operator is not None:
        return frozenset(argument.name for argument in operator._schema.arguments)
    return frozenset(inspect.signature(function).parameters)


def _named(requirement: Requirement) -> str:
    for name in (requirement.distribution, *requirement.also):
        if version := distributions.distribution_version(name):
            return f"{name} {version}"
    return requirement.distribution


def _repair(requirement: Requirement) -> str:
    return f"Install one that does: {requirement.hint}"
