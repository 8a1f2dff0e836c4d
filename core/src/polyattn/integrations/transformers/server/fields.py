"""This module decides which fields of a request are served. A field that is not, or has a value that is not, is refused
by its name: what a server ignores, its client takes for done."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from ....errors import InvalidInputError, did_you_mean

__all__ = ["CHAT", "CHAT_WITH_IMAGES", "COMPLETIONS", "RefusedField", "checked"]


class RefusedField(InvalidInputError):  # noqa: N818 - of the server alone: people catch InvalidInputError
    """A request is refused for one of its fields.

    Attributes:
        field: its path, such as messages[0].content; empty where it is the body itself. status: of the answer. code:
            OpenAI's word for the fault, or None.
    """

    def __init__(self, message: str, field: str = "", *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.status, self.code = field, status, code


Check = Callable[[str, Any], None]
"""Given the path of a field and its value, which is not null; raises RefusedField."""


def _wrong(field: str, value: Any, allowed: str) -> RefusedField:
    shown = json.dumps(value, default=str)
    return RefusedField(f"{field}={shown if len(shown) <= 60 else shown[:57] + '...'}: {allowed}", field)


def _text(field: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _wrong(field, value, "a string is needed")


def _flag(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _wrong(field, value, "true or false is needed")


def _mapping(field: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(field, value, "an object is needed")


def _whole(least: int, most: float = math.inf) -> Check:
    to = "" if most == math.inf else f" to {most}"

    def check(field: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _wrong(field, value, f"a whole number from {least}{to} is needed")

    return check


def _number(least: float, most: float, *, above: bool = False) -> Check:
    def check(field: str, value: Any) -> None:
        fine = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
        if not fine or (above and value == least):
            raise _wrong(field, value, f"a number {'above' if above else 'from'} {least:g} to {most:g} is needed")

    return check


def _only(*served: Any) -> Check:
    """Of a field that says nothing while it has one of these values, and is not served with any other."""

    def check(field: str, value: Any) -> None:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in served):
            words = " or ".join(json.dumps(one) for one in served)
            raise _wrong(field, value, f"this server does not serve it; leave it out, or give {words}")

    return check


def _stop(field: str, value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not 0 < len(stops) <= 4 or not all(isinstance(s, str) and s for s in stops):
        raise _wrong(field, value, "a string is needed, or a list of 1 to 4, none of them empty")


def _stream_options(field: str, value: Any) -> None:
    _mapping(field, value)
    _known(value, {"include_usage": _flag, "include_obfuscation": _only(False)}, f"{field}.")


def _messages(field: str, value: Any, *, images: bool = False) -> None:
    if not isinstance(value, list) or not value:
        raise _wrong(field, value, "a list of messages is needed, at least one")
    for at, message in enumerate(value):
        here = f"{field}[{at}]"
        _mapping(here, message)
        roles = ("system", "developer", "user", "assistant", "tool")
        if message.get("role") not in roles:
            raise _wrong(f"{here}.role", message.get("role"), f"one of {', '.join(roles)} is needed")
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list):
            for number, part in enumerate(content):
                _part(f"{here}.content[{number}]", part, images)
        elif not isinstance(content, str) and not (content is None and calls):
            raise _wrong(f"{here}.content", content, "a string or a list of parts is needed")
        if calls is not None:
            _calls(f"{here}.tool_calls", calls)


def _part(field: str, part: Any, images: bool) -> None:
    _mapping(field, part)
    if images and part.get("type") == "image_url":
        _mapping(f"{field}.image_url", part.get("image_url"))
        _known(part["image_url"], {"url": _data, "detail": _only("auto")}, f"{field}.image_url.")
        _data(f"{field}.image_url.url", part["image_url"].get("url"))
        return
    if part.get("type") != "text":
        allowed = "'text' or 'image_url'" if images else "'text'"
        reads = "text and images" if images else "text"
        raise _wrong(f"{field}.type", part.get("type"), f"this model reads {reads} only; give parts of type {allowed}")
    _text(f"{field}.text", part.get("text"))


def _data(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value.startswith("data:image/") or ";base64," not in value[:100]:
        raise _wrong(field, value, "this server fetches nothing; give the image itself, as data:image/png;base64,...")


def _calls(field: str, calls: Any) -> None:
    for at, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        try:
            fine = isinstance(function, Mapping) and isinstance(json.loads(function["arguments"]), dict)
        except (KeyError, TypeError, ValueError):
            fine = False
        if not fine:
            raise _wrong(
                f"{field}[{at}]", call, "a call of a function is needed, its arguments a JSON object in a string"
            )


def _tools(field: str, value: Any) -> None:
    if not isinstance(value, list):
        raise _wrong(field, value, "a list of tools is needed")
    for at, tool in enumerate(value):
        if (
            not isinstance(tool, Mapping)
            or tool.get("type") != "function"
            or not isinstance(tool.get("function"), Mapping)
        ):
            raise _wrong(f"{field}[{at}]", tool, "a tool of type 'function' is needed, with its 'function'")


_COMMON: Mapping[str, Check] = {
    "model": _text,
    "stream": _flag,
    "stream_options": _stream_options,
    "max_tokens": _whole(1),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above=True),
    "top_k": _whole(-1),
    "seed": _whole(-(2**63), 2**63 - 1),
    "stop": _stop,
    "ignore_eos": _flag,
    # These say nothing about the text.
    "user": _text,
    "metadata": _mapping,
    "store": _only(False),
    "service_tier": _only("auto", "default"),
    "n": _only(1),
    "presence_penalty": _only(0),
    "frequency_penalty": _only(0),
    "logit_bias": _only({}),
}
CHAT: Mapping[str, Check] = {
    **_COMMON,
    "messages": _messages,
    "max_completion_tokens": _whole(1),
    "tools": _tools,
    "tool_choice": _only("auto"),
    "parallel_tool_calls": _only(True),
    "chat_template_kwargs": _mapping,
    "logprobs": _only(False),
    "top_logprobs": _only(0),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
    "safety_identifier": _text,
    "prompt_cache_key": _text,
}
"""Fields of /v1/chat/completions. `top_k`, `ignore_eos` and `chat_template_kwargs` are fields of other servers."""
CHAT_WITH_IMAGES: Mapping[str, Check] = {**CHAT, "messages": functools.partial(_messages, images=True)}
"""The same of a model that reads images."""
COMPLETIONS: Mapping[str, Check] = {**_COMMON, "prompt": _text, "best_of": _only(1), "echo": _only(False)}
"""Fields of /v1/completions."""


def checked(body: Any, served: Mapping[str, Check], needed: str) -> dict[str, Any]:
    """Return the fields of a body that say something.

    Args:
        body: as JSON has it; null means that a field is not given. served: `CHAT` or `COMPLETIONS`. needed: the field
            that no request is without.

    Raises:
        RefusedField: a field is not served, its value is not, or `needed` is missing.
    """
    if not isinstance(body, dict):
        raise RefusedField("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    _known(given, served, "")
    if needed not in given:
        raise RefusedField(f"{needed} is missing; every request needs it", needed, code="missing_required_parameter")
    return given


def _known(given: Mapping[str, Any], served: Mapping[str, Check], before: str) -> None:
    for name, value in given.items():
        if name not in served:
            raise RefusedField(
                f"{before}{name} is not served here, and is not ignored; leave it out.{did_you_mean(name, served)}",
                f"{before}{name}",
                code="unknown_parameter",
            )
        served[name](f"{before}{name}", value)
