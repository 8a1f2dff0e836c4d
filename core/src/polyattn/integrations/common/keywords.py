"""This module decides what becomes of a keyword that a host passes on: it is used, known to be harmless, or refused by
its name.

A host hands its attention function whatever a model or a caller adds. A keyword that is dropped there computes
something else without a word, so nothing is dropped that a host's room does not list as harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ...errors import ConfigError, InvalidInputError, UnsupportedRequestError

__all__ = ["asked_by", "harmless_words", "refuse_unknown", "refused", "shown"]


def asked_by(module: Any, backend: str | None) -> str:
    """Name who asks, for messages: the class of the layer, and the backend that its name pins."""
    return f"{type(module).__name__} on polyattn ({backend or 'automatic backend'})"


def shown(value: Any) -> str:
    """Show a value of a keyword, short enough for a message."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def harmless_words(known: frozenset[str], more: Iterable[str], semantic: frozenset[str]) -> frozenset[str]:
    """Return the keywords that are left unread: those that a host's room knows, and those that a caller adds.

    Args:
        semantic: keywords that change the result, which no caller can call harmless.

    Raises:
        InvalidInputError: `more` is one string. ConfigError: it names a keyword that changes the result.
    """
    if isinstance(more, str):
        raise InvalidInputError(f"harmless={more!r} must be a list of keyword names: [{more!r}]")
    words = known | frozenset(more)
    if spoken := sorted(words & semantic):
        raise ConfigError(f"harmless names {', '.join(spoken)}, which changes the result of attention; leave it out")
    return words


def refused(name: str, who: str, reason: str, step: str) -> UnsupportedRequestError:
    """Make the error of a keyword that changes the result and cannot be honoured. step: what to do instead."""
    return UnsupportedRequestError(f"{name} reached {who}: {reason}; {step}", {name: [reason]})


def refuse_unknown(rest: Mapping[str, Any], who: str, step: str) -> None:
    """Refuse the first of the keywords that are left once all known ones are taken out.

    Args:
        rest: keyword -> value. who: as `asked_by`. step: what to do where the keyword does change the result.

    Raises:
        UnsupportedRequestError: there is one.
    """
    for name, value in rest.items():
        raise UnsupportedRequestError(
            f"unknown keyword {name} ({shown(value)}) reached {who}: it may change the result, so it is not dropped. "
            f"If it says nothing about attention, install(harmless=[{name!r}]); else {step}",
            {name: ["unknown keyword"]},
        )
