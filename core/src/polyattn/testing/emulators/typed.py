"""This module checks values against a vendor's annotations. Words that are not known here say nothing."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Mapping
from typing import Any

__all__ = ["mismatches"]


def mismatches(bound: inspect.Signature, given: Mapping[str, Any]) -> list[str]:
    """Return what does not fit its annotation, one sentence each.

    None fits where it is the default, as vendors write `softmax_scale: float = None`; a list fits a tuple and the
    other way round, as torch has it.
    """
    found = []
    for name, value in given.items():
        parameter = bound.parameters[name]
        annotation = parameter.annotation
        if annotation is inspect.Parameter.empty or (value is None and parameter.default is None):
            continue
        if not _fits(value, _parsed(annotation)):
            found.append(f"{name} is {annotation}, not {type(value).__name__} {_short(value)}".rstrip())
    return found


def _short(value: Any) -> str:
    text = "" if hasattr(value, "shape") else repr(value)
    return text if len(text) < 60 else ""


@functools.cache
def _parsed(annotation: str) -> ast.expr:
    return ast.parse(annotation, mode="eval").body


def _fits(value: Any, wanted: ast.expr) -> bool:
    if isinstance(wanted, ast.Constant):
        if isinstance(wanted.value, str):
            return _fits(value, _parsed(wanted.value))
        return wanted.value is not None or value is None
    if isinstance(wanted, ast.BinOp) and isinstance(wanted.op, ast.BitOr):
        return _fits(value, wanted.left) or _fits(value, wanted.right)
    if isinstance(wanted, ast.Subscript):
        return _fits_generic(value, _word(wanted.value), wanted.slice)
    return _fits_word(value, _word(wanted))


def _word(wanted: ast.expr) -> str:
    if isinstance(wanted, ast.Attribute):
        return wanted.attr
    return wanted.id if isinstance(wanted, ast.Name) else ""


def _fits_word(value: Any, word: str) -> bool:
    # torch only where an annotation speaks of it: reading signatures needs none.
    if word in ("Tensor", "dtype", "ScalarType"):
        import torch

        return isinstance(value, torch.Tensor if word == "Tensor" else torch.dtype)
    simple: dict[str, Any] = {
        "bool": bool,
        "int": int,
        "float": (int, float),
        "str": str,
        "list": (list, tuple),
        "List": (list, tuple),
        "tuple": (list, tuple),
        "Tuple": (list, tuple),
    }
    return word not in simple or isinstance(value, simple[word])


def _fits_generic(value: Any, word: str, inner: ast.expr) -> bool:
    parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    if word == "Optional":
        return value is None or _fits(value, inner)
    if word == "Union":
        return any(_fits(value, part) for part in parts)
    if word == "Literal":
        return value in [ast.literal_eval(part) for part in parts]
    if word in ("list", "List", "Sequence", "Iterable"):
        return isinstance(value, (list, tuple)) and all(_fits(item, inner) for item in value)
    if word in ("tuple", "Tuple"):
        if not isinstance(value, (list, tuple)):
            return False
        if isinstance(parts[-1], ast.Constant) and parts[-1].value is Ellipsis:
            return all(_fits(item, parts[0]) for item in value)
        return len(value) == len(parts) and all(_fits(item, part) for item, part in zip(value, parts, strict=True))
    return _fits_word(value, word)
