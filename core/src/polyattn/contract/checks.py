"""Are the values of a record of the types it declares? Asked when a plugin registers it, not in each selection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..errors import PluginError
from .backend import Alias, Fallback, Requirement
from .capability import Constraint, OneOf, Range, SubsetOf, _known
from .request import AttentionRequest
from .vocabulary import WORDS, nearest

__all__ = ["check_types", "file_of", "typed"]

T = TypeVar("T")

_BUCKETS = ("q_bucket", "k_bucket", "batch_bucket")
"""What a backend says of a request holds for all lengths: it is asked once for all of them."""


def typed(record: Any, kind: type[T], plugin: str) -> T:
    """`record`, when it is one of `kind` and well formed.

    Raises:
        PluginError: it is another thing, or as `check_types`.
    """
    if not isinstance(record, kind):
        raise PluginError(f"plugin {plugin!r} registered {record!r}, a {kind.__name__} is needed")
    check_types(record, str(getattr(record, "id", "")) or f"plugin {plugin!r}")
    return record


def file_of(text: Any, plugin: str) -> str:
    """`text`, when it reads like a file of a package.

    Raises:
        PluginError: it does not.
    """
    package, _, path = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not (package and path):
        raise PluginError(f"plugin {plugin!r} registered {text!r}; a file of a package reads 'package:path'")
    return str(text)


def check_types(record: Any, where: str) -> None:
    """Check a record and all records in it. Lists pass for tuples.

    Raises:
        PluginError: a value is of another type than its field, or a condition is on no field of a request, or on what
            no request has.
    """
    kind: Any = type(record)
    for name, hint in _hints(kind).items():
        _check(getattr(record, name), hint, f"{where}: {kind.__name__}.{name}", where)
    if isinstance(record, Requirement):
        _check_requirement(record, where)
    elif isinstance(record, Alias):
        _check_values("family", OneOf(tuple(record.families)), f"{where}: Alias.families")
    elif isinstance(record, Fallback) and record.family:
        _check_values("family", OneOf((record.family,)), f"{where}: Fallback.family")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(value: Any, hint: Any, what: str, where: str) -> None:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Any or (kind is UnionType and value is None):
        return
    if kind is UnionType:
        _check(value, parts[0], what, where)
    elif kind is tuple:
        _need(isinstance(value, (tuple, list)), value, "a tuple", what)
        for place, one in enumerate(value):
            _check(one, parts[0], f"{what}[{place}]", where)
    elif kind is Mapping:
        _need(isinstance(value, Mapping), value, "a mapping", what)
        for name, one in value.items():
            _check(one, parts[1], f"{what}[{_known(name) if parts[1] is Constraint else name!r}]", where)
            if parts[1] is Constraint:
                _check_values(name, one, what)
    elif kind is Constraint:
        _need(hasattr(value, "reason") and hasattr(value, "describe"), value, "a constraint such as OneOf", what)
    elif kind is Literal:
        _need(value in parts, value, f"one of {', '.join(map(repr, parts))}", what)
    else:
        _need(isinstance(value, (int, float) if kind is float else kind), value, f"of type {kind.__name__}", what)
        if dataclasses.is_dataclass(kind) and kind is not AttentionRequest:
            check_types(value, where)


def _need(good: bool, value: Any, wanted: str, what: str) -> None:
    if not good:
        raise PluginError(f"{what}={value!r:.200} must be {wanted}")


def _check_values(name: str, constraint: Constraint, what: str) -> None:
    """A condition that no request can meet: its row would be tried by nobody, and so never be found wrong.

    Words may be added to the contract; whoever uses one needs the polyattn that has it, as for a new field.
    """
    if isinstance(constraint, Range):
        low, high = constraint.low, constraint.high
        if low is not None and high is not None and low > high:
            raise PluginError(f"{what} says {name}={constraint}, and no number is from {low} to {high}: swap them")
    if name in _BUCKETS:
        raise PluginError(f"{what} says {name}={constraint}; lengths decide nothing but which measurement is used")
    if name in WORDS and isinstance(constraint, (OneOf, SubsetOf)):
        for word in constraint.values:
            if word not in WORDS[name]:
                allowed = ", ".join(repr(known) for known in WORDS[name])
                raise PluginError(
                    f"{what} says {name}={word!r}, which no request has.{nearest(name, word)} Allowed: {allowed}; a "
                    f"word of a later polyattn needs that version"
                )


def _check_requirement(need: Requirement, where: str) -> None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    _need(
        bool(need.distribution.strip()),
        need.distribution,
        "a distribution's name",
        f"{where}: Requirement.distribution",
    )
    try:
        SpecifierSet(need.versions)
    except InvalidSpecifier as exc:
        raise PluginError(f"{where}: Requirement.versions={need.versions!r} must read like '>=2,<3'") from exc
