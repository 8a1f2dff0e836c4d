"""`key=value,key=value`: numbers, booleans, null, lists, quoted strings and nested keys."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from ...errors import ConfigError
from .words import FORMS, show

__all__ = ["parse_pairs"]

_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_KEY = re.compile(rf"{_NAME}(?:[/@]{_NAME})*(?:\.{_NAME})*")
"""A name, of a backend also name/kind@platform, then what is nested in it."""
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MAX_LIST_DEPTH = 16


def parse_pairs(text: str, where: str) -> dict[str, Any]:
    """The options in `text`; `a.b=1` nests.

    Values: `true`, `false` (any case), `null`, integers, floats, lists `[1, 2]` (their commas do not split), strings in
    single quotes (literal) or double quotes (JSON escapes), and any other text up to the next comma.

    Raises:
        ConfigError: with the character at which the text stops making sense.
    """
    return _Pairs(text, where).parse()


class _Pairs:
    """Reader of `key=value,key=value`. Positions in messages count characters from 1."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text, where, 0

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        position = (self.at if at is None else at) + 1
        raise ConfigError(f"{self.where}: {message} (character {position} of {show(self.text)})")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def space(self) -> None:
        while self.peek().isspace():
            self.at += 1

    def parse(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while True:
            start = self.at
            path = self.key()
            self.put(out, path, self.value(inside_list=False), start)
            if self.at >= len(self.text):
                return out
            self.at += 1

    def key(self) -> list[str]:
        self.space()
        start = self.at
        piece = self.text[start:].split(",", 1)[0].strip()
        if not piece:
            self.fail("an entry is empty; entries look like key=value, with one comma between two")
        if "=" not in piece:
            self.fail(f"{piece!r} is not key=value; give {FORMS}")
        name = piece.split("=", 1)[0].strip()
        if not _KEY.fullmatch(name):
            self.fail(f"the key {name!r} is not a name; keys are letters, digits, '_' and '-', with '.' to nest")
        self.at = self.text.index("=", start) + 1
        return name.split(".")

    def put(self, out: dict[str, Any], path: list[str], value: Any, at: int) -> None:
        name = ".".join(path)
        for part in path[:-1]:
            out = out.setdefault(part, {})
            if not isinstance(out, dict):
                self.fail(f"{name!r} nests into {part!r}, which already has a value", at)
        if path[-1] in out:
            self.fail(f"the key {name!r} is given twice", at)
        out[path[-1]] = value

    def value(self, *, inside_list: bool, depth: int = 0) -> Any:
        """One value; leaves `at` on the ',' (or ']' of a list) behind it, or at the end."""
        self.space()
        first = self.peek()
        stop = ",]" if inside_list else ","
        if first in ("", *stop):
            what = "a list entry" if inside_list else "the value"
            self.fail(f'{what} is empty; write "" for an empty string, null for no value, [] for an empty list')
        if first == "{":
            self.fail("a value cannot begin with '{'; nest with a.b=1, or give the whole configuration as JSON")
        if first in "\"'[":
            found = self.sequence(depth) if first == "[" else self.quoted(first)
            self.space()
            if self.peek() not in ("", *stop):
                rest = self.text[self.at :].split(",", 1)[0]
                self.fail(f"unexpected {rest!r} after {show(found)}; a comma ends a value")
            return found
        start = self.at
        while self.peek() not in ("", *stop):
            self.at += 1
        return self.scalar(self.text[start : self.at].strip(), start)

    def sequence(self, depth: int) -> list[Any]:
        start = self.at
        if depth >= _MAX_LIST_DEPTH:
            self.fail(f"lists are nested more than {_MAX_LIST_DEPTH} deep")
        self.at += 1
        self.space()
        items: list[Any] = []
        if self.peek() == "]":
            self.at += 1
            return items
        while True:
            items.append(self.value(inside_list=True, depth=depth + 1))
            end = self.peek()
            self.at += 1
            if end == "]":
                return items
            if not end:
                self.fail("a list is not closed; ']' is missing", start)

    def quoted(self, quote: str) -> str:
        """Double quotes follow JSON's escapes; single quotes take everything literally (Windows paths)."""
        start = self.at
        if quote == "'":
            end = self.text.find("'", start + 1)
            if end < 0:
                self.fail("a quoted string is not closed; ' is missing", start)
            self.at = end + 1
            return self.text[start + 1 : end]
        try:
            found, self.at = json.JSONDecoder().raw_decode(self.text, start)
        except json.JSONDecodeError as cause:
            self.fail(f"a quoted string is wrong: {cause.msg}; single quotes need no escapes", cause.pos)
        return str(found)

    def scalar(self, word: str, at: int) -> bool | int | float | str | None:
        if word.lower() in ("true", "false"):
            return word.lower() == "true"
        if word in ("null", "None"):
            return None
        if not _FLOAT.fullmatch(word):
            return word
        try:
            number = int(word) if _INT.fullmatch(word) else float(word)
        except ValueError:
            number = math.inf
        if math.isinf(number):
            self.fail(f"{show(word)} is too large a number; quote it if it is text", at)
        return number
