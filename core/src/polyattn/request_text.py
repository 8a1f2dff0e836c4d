"""A request as plain data for JSON, and back: compiled graphs, measurements and recorded programs keep requests so.

Only what differs from the defaults is written, so that a field added later changes no text that is there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .errors import ConfigError, did_you_mean
from .field_words import WORDS
from .records import AttentionRequest

__all__ = ["plain_request", "read_request"]

_WORDS = {name: words for name, words in WORDS.items() if name != "grad"}
_OPTIONAL: dict[str, type] = {"scale": float, "save_kv_cache": bool}
"""Fields that may be None, and what else they are."""


def plain_request(request: AttentionRequest) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    given = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    return {f.name: given[f.name] for f in dataclasses.fields(request) if given[f.name] != f.default}


def read_request(data: Any, where: str) -> AttentionRequest:
    """What `plain_request` made, also after JSON turned its tuples into lists.

    Raises:
        ConfigError: it is no such data; `where` begins the message.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a request is an object of fields; got {data!r}")
    known = {f.name: f.default for f in dataclasses.fields(AttentionRequest)}
    fields = {}
    for name, value in data.items():
        if name not in known:
            raise ConfigError(f"{where}: a request has no field {name!r}.{did_you_mean(str(name), known)}")
        fields[name] = _tuples(value)
        if not _fits(name, fields[name], known[name]):
            allowed = ", ".join(map(str, _WORDS[name])) if name in _WORDS else f"like {known[name]!r}"
            raise ConfigError(f"{where}: {name}={value!r}; allowed: {allowed}")
    return AttentionRequest(**fields)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _fits(name: str, value: Any, default: Any) -> bool:
    if name in _WORDS:
        return any(type(value) is type(word) and value == word for word in _WORDS[name])
    wanted = _OPTIONAL.get(name, type(default))
    if value is None:
        return name in _OPTIONAL
    number = isinstance(value, int) and not isinstance(value, bool)
    return (wanted is float and number) or (isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool))
