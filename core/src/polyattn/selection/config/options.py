"""Check options against a backend's typed schema, and find which backend they belong to."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...contract import BackendInfo, ConfigField
from ...errors import ConfigError, did_you_mean
from .words import show

__all__ = ["check_options", "resolve_options"]

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "path": (str, os.PathLike),
}
_HINTS = {
    "bool": "write true or false",
    "str": "quote it",
    "path": "quote it",
    "list[int]": "for example [4, 4]",
    "list[float]": "for example [0.5, 1.0]",
    "list[str]": 'for example ["a", "b"]',
}


def check_options(
    backend: BackendInfo | Sequence[ConfigField],
    options: Mapping[str, Any],
    where: str,
    *,
    check_files: bool = False,
) -> dict[str, Any]:
    """`options` checked against a backend's schema, with the defaults filled in, in the schema's order.

    Args:
        backend: the backend, or its schema.
        options: option -> value, as `parse_backend_config` reads them.
        where: names the source at the start of each message.
        check_files: also require that files named by `path` options exist (load time, `polyattn config check`).

    Raises:
        ConfigError: one line per problem: unknown keys (with the near match), missing required keys, types, choices,
            bounds, lengths, files; what another option's value needs.
    """
    fields = backend.config if isinstance(backend, BackendInfo) else tuple(backend)
    owner = backend.id if isinstance(backend, BackendInfo) else "the backend"
    known = {field.name: field for field in fields}
    problems: list[str] = []
    for key in options:
        if key not in known:
            allowed = f"Its options: {', '.join(known)}." if known else "It takes none."
            problems.append(f"{where}: {owner} has no option {key!r}.{did_you_mean(str(key), known)} {allowed}")
    checked: dict[str, Any] = {}
    for field in fields:
        if field.name not in options and field.default is ...:
            problems.append(f"{where}: {owner} {_needs(field)}")
        elif field.name not in options:
            shared = isinstance(field.default, (list, tuple))
            checked[field.name] = list(field.default) if shared else field.default
        else:
            try:
                checked[field.name] = _value(field, options[field.name], check_files)
            except ConfigError as problem:
                problems.append(f"{where}: {problem}")
    for field in fields:
        if not checked.get(field.name, True):
            met = next((f"{n}={show(v)}" for n, v in field.needed if n in checked and checked[n] == v), "")
            problems += [f"{where}: {owner} {_needs(field, f' where {met}')}"] if met else []
    if problems:
        raise ConfigError("\n".join(problems))
    return checked


def _needs(field: ConfigField, when: str = "") -> str:
    return f"needs the option {field.name!r} ({field.type}){when}" + (f": {field.doc}" if field.doc else "")


def _value(field: ConfigField, value: Any, check_files: bool) -> Any:
    if value is None and field.default is None:
        return None
    if not field.type.startswith("list["):
        return _scalar(field, field.name, field.type, value, check_files)
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(field.name, field.type, value)
    if field.length and len(value) != field.length:
        count = f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
        raise ConfigError(f"{field.name}={show(value)} has {count}, expected {field.length}")
    inner = field.type.removeprefix("list[").removesuffix("]")
    return [_scalar(field, f"{field.name}[{i}]", inner, item, check_files) for i, item in enumerate(value)]


def _scalar(field: ConfigField, name: str, kind: str, value: Any, check_files: bool) -> Any:
    """One value of a scalar type. A bool is never an int; an int is a float where one is wanted."""
    if not _fits(kind, value):
        raise _wrong_type(name, kind, value)
    if kind == "path":
        return _path(name, value, check_files)
    if kind == "float":
        value = _finite(name, value)
    if field.choices and value not in field.choices:
        near = did_you_mean(value, map(str, field.choices)) if isinstance(value, str) else ""
        raise ConfigError(f"{name}={show(value)} is not one of {', '.join(map(repr, field.choices))}.{near}")
    if kind in ("int", "float"):
        low, high = field.low, field.high
        if (low is not None and value < low) or (high is not None and value > high):
            raise ConfigError(f"{name}={show(value)} is out of bounds, expected {_bounds(low, high)}")
    return value


def _fits(kind: str, value: Any) -> bool:
    # `true` in a number's place is a slip, though Python calls it an int.
    return isinstance(value, _PYTHON_TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


def _path(name: str, value: str | os.PathLike[str], check_files: bool) -> str:
    path = os.path.expanduser(os.fspath(value))
    if check_files and not os.path.isfile(path):
        problem = "is a directory, expected a file" if os.path.isdir(path) else "does not exist"
        hint = "" if os.path.isabs(path) else "; relative paths start at the working directory"
        raise ConfigError(f"{name}={show(path)} {problem}{hint}")
    return path


def _finite(name: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{name}={show(value)} is not a finite number")
    return number


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f">= {low:g}" if low is not None else f"<= {high:g}"


def _wrong_type(name: str, kind: str, value: Any) -> ConfigError:
    got = "null" if value is None else type(value).__name__
    hint = f" ({_HINTS[kind]})" if kind in _HINTS else ""
    return ConfigError(f"{name}={show(value)}: got {got}, expected {kind}{hint}")


def resolve_options(
    config: Mapping[str, Any], backend: str | None, where: str, known: Collection[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Which backend each option belongs to.

    A mapping keyed by backend names applies per backend; a flat one to `backend`. No option of any schema is itself
    a mapping, so a mapping as value means "per backend" also where the names are not known yet.

    Args:
        config: what `parse_backend_config` returned.
        backend: the backend that the same layer of configuration selects, None when it selects none.
        where: names the source at the start of each message.
        known: names of backends, when they are known.

    Returns:
        Backend name -> its options.

    Raises:
        ConfigError: both forms mixed, an unknown backend name, or flat options in a layer that selects no backend.
    """
    nested = [key for key, value in config.items() if isinstance(value, Mapping) or (known and key in known)]
    flat = [key for key in config if key not in nested]
    if nested and flat:
        raise ConfigError(
            f"{where} mixes backends ({', '.join(nested)}) and plain options ({', '.join(flat)}); "
            f"move the plain options under the backend they belong to, for example {nested[0]}.{flat[0]}=..."
        )
    if flat:
        if backend is None:
            raise ConfigError(
                f"{where} gives {', '.join(flat)}, but the same layer of configuration selects no backend; set "
                f"attention_backend beside it, or nest the options under a backend's name: BACKEND.{flat[0]}=..."
            )
        return {backend: dict(config)}
    for key in nested:
        if known is not None and key not in known:
            raise ConfigError(f"{where}: {key!r} is not a backend.{did_you_mean(key, known)}")
        if not isinstance(config[key], Mapping):
            raise ConfigError(
                f"{where}: {key!r} is a backend, so its value must be a mapping of options, got {show(config[key])}"
            )
    return {key: dict(config[key]) for key in nested}
