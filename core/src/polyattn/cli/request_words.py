"""This module reads a request with its lengths from words: `--request "family=paged phase=decode heads=32 k=4096"`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..bench.measure import Workload
from ..contract import relation
from ..errors import ConfigError, did_you_mean
from .questions import SERVING, ask
from .request_flags import RequestFlag, request_flags

__all__ = ["workload_of"]

_LENGTHS = ("batch", "q", "k")
_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_FLAGS: Mapping[str, RequestFlag] = {flag.name: flag for flag in request_flags()}
_KINDS: Mapping[str, str] = {
    **{name: flag.kind for name, flag in _FLAGS.items()},
    "mla": "switch",
    "causal_alignment": "word",
}
_EXAMPLES = {
    "batch": "4",
    "q": "512",
    "k": "4096",
    "causal_alignment": "top_left",
    **{name: flag.example for name, flag in _FLAGS.items() if flag.example},
}
"""A value for each word that needs one."""
_MOST = 2**24
"""The most sequences of a request: each has its lengths in a list."""


def workload_of(text: str, where: Mapping[str, Any]) -> Workload:
    """Make the workload that words describe: those of `polyattn explain`'s flags, with batch, q (S_q) and k (S_k).

    Args:
        text: `name=value` words, in any order; a flag alone means yes. where: platform fields of the request.

    Raises:
        ConfigError: a word that is not known, or a value that is none.
    """
    given: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        name = name.replace("-", "_")
        if name in given or name in lengths:
            raise ConfigError(f"--request {text!r}: {name} is given twice")
        if not value and name in _EXAMPLES:
            raise ConfigError(f"--request: {name} needs a value, as {name}={_EXAMPLES[name]}")
        if name in _LENGTHS:
            lengths[name] = _whole(name, value)
        elif name in _KINDS:
            given[name] = _value(name, value)
        else:
            raise ConfigError(
                f"--request: no word {name!r}.{did_you_mean(name, (*_KINDS, *_LENGTHS))} Known: "
                f"{', '.join((*_LENGTHS, *_KINDS))}"
            )
    try:
        request = ask(given, where)
    except ConfigError as exc:  # of a flag, as the words are
        raise ConfigError(f"--request {text!r}: {exc}") from exc
    s_k = lengths.get("k")
    if s_k is None:
        raise ConfigError(f"--request {text!r}: k is missing, the keys of a sequence; for example k=4096")
    if lengths.get("batch", 1) > _MOST:
        raise ConfigError(f"--request {text!r}: batch is more than {_MOST:,} sequences")
    s_q = lengths.get("q", 1 if request.s_relation == "one" else s_k)
    if request.family in SERVING:
        _check_lengths(text, request.phase, s_q, s_k)
    else:
        request = dataclasses.replace(request, s_relation=relation(s_q, s_k))
    return Workload(request, ((s_q, s_k),) * lengths.get("batch", 1))


def _check_lengths(text: str, phase: str, s_q: int, s_k: int) -> None:
    """Check lengths against a phase of serving, which says how many queries there are. Fewer than keys may be as many,
    where nothing is cached."""
    if phase == "decode" and s_q != 1:
        raise ConfigError(f"--request {text!r}: decode has one query per sequence: leave q out, or phase=extend")
    if phase == "prefill" and s_q != s_k:
        raise ConfigError(f"--request {text!r}: prefill has as many queries as keys: leave q out, or phase=extend")


def _value(name: str, value: str) -> Any:
    kind = _KINDS[name]
    if kind in ("switch", "either"):
        if value.lower() not in ("", *_SWITCH):
            raise ConfigError(f"--request: {name}={value!r} is not a switch; allowed: {', '.join(_SWITCH)}")
        return _SWITCH.get(value.lower(), True)
    if kind == "whole":
        return _whole(name, value)
    if kind == "number":
        try:
            return float(value)
        except ValueError as exc:
            raise ConfigError(f"--request: {name}={value!r} is not a number") from exc
    return value


def _whole(name: str, value: str) -> int:
    # `isdigit` holds for a superscript as well, and `int` refuses thousands of digits.
    if not value.isdecimal() or len(value) > 18 or not int(value):
        raise ConfigError(f"--request: {name}={value!r} is not a whole number above 0")
    return int(value)
