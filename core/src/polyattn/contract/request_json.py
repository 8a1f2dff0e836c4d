"""A request as plain data for JSON, and back: compiled graphs, measurements and recorded programs keep requests so.

Only what differs from the defaults is written, so that a field added later changes no text that is there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..errors import ConfigError, did_you_mean
from .request import AttentionRequest, made
from .vocabulary import WORDS

__all__ = ["plain_request", "read_request"]

_WORDS = {name: words for name, words in WORDS.items() if name != "grad"}
_OPTIONAL: dict[str, type] = {"scale": float, "save_kv_cache": bool}
"""Fields that may be None, and what else they are."""
_LEAST = {"head_dim": 1, "heads": 1, "kv_heads": 1}
"""The smallest value of a whole number; of others it is 0."""


def plain_request(request: AttentionRequest) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    named = _defaults(type(request))  # type: ignore[arg-type]  # a class has a hash, whatever its instances have
    return {name: value for name, default in named.items() if (value := getattr(request, name)) != default}


@functools.cache
def _defaults(kind: type[AttentionRequest]) -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(kind)}


def read_request(data: Any, where: str) -> AttentionRequest:
    """What `plain_request` made, also after JSON turned its tuples into lists.

    Raises:
        ConfigError: it is no such data; `where` begins the message.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a request is an object of fields; got {data!r}")
    known = _defaults(AttentionRequest)
    fields = {}
    for name, value in data.items():
        if name not in known:
            raise ConfigError(f"{where}: a request has no field {name!r}.{did_you_mean(str(name), known)}")
        try:
            fields[name] = _tuples(value)
        except RecursionError as exc:
            raise ConfigError(
                f"{where}: {name} is lists in lists in lists; allowed: {_allowed(name, known[name])}"
            ) from exc
        if not _fits(name, fields[name], known[name]):
            raise ConfigError(f"{where}: {name}={value!r}; allowed: {_allowed(name, known[name])}")
    return made(**fields)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _fits(name: str, value: Any, default: Any) -> bool:
    if name in _WORDS:
        return any(type(value) is type(word) and value == word for word in _WORDS[name])
    wanted = _OPTIONAL.get(name, type(default))
    if value is None:
        return name in _OPTIONAL
    if wanted is int:
        return type(value) is int and value >= _LEAST.get(name, 0)
    if wanted is tuple and default:
        return type(value) is tuple and list(map(type, value)) == list(map(type, default))
    number = wanted is float and type(value) is int
    return number or (isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool))


def _allowed(name: str, default: Any) -> str:
    if name in _WORDS:
        return ", ".join(map(str, _WORDS[name]))
    return f"a whole number from {_LEAST.get(name, 0)} on" if type(default) is int else f"like {default!r}"
