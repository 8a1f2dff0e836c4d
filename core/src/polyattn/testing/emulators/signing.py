"""Signatures of a vendor's functions as facts: read from its published files, kept in a JSON file beside the tests."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from pathlib import Path
from typing import Any

__all__ = ["OTHER", "Signatures", "signature_of_schema"]


class _Other:
    def __repr__(self) -> str:
        return "OTHER"


OTHER = _Other()
"""A default that is no literal in the vendor's source (a dtype, usually)."""


class Signatures:
    """A file of signatures.

    Each entry has the `package`, its `version`, the `member` (file) it was read from with the `sha256` of that file,
    and `parameters` (Python text, without self, annotations where the vendor has them) or a `schema` of torch.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        self._read: dict[str, inspect.Signature] = {}

    def signature(self, key: str) -> inspect.Signature:
        """The vendor's signature of an entry, without `self`; annotations are text.

        Raises:
            KeyError: the file has no such entry.
        """
        if key not in self._read:
            if key not in self.entries:
                raise KeyError(f"{self.path} has no entry {key!r}")
            entry = self.entries[key]
            read = signature_of_text if "parameters" in entry else signature_of_schema
            self._read[key] = read(entry["parameters"] if "parameters" in entry else entry["schema"])
        return self._read[key]


def signature_of_text(parameters: str) -> inspect.Signature:
    """The signature of Python text, "q: Tensor, k, *, causal=False". Defaults that are no literals become `OTHER`."""
    function = ast.parse(f"def f({parameters}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    args, parameter = function.args, inspect.Parameter
    found = []

    def add(arg: ast.arg | None, kind: Any, default: ast.expr | None = None) -> None:
        if arg is not None:
            annotation = parameter.empty if arg.annotation is None else ast.unparse(arg.annotation)
            found.append(parameter(arg.arg, kind, default=_literal(default), annotation=annotation))

    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for n, (arg, default) in enumerate(zip(plain, defaults, strict=True)):
        only = n < len(args.posonlyargs)
        add(arg, parameter.POSITIONAL_ONLY if only else parameter.POSITIONAL_OR_KEYWORD, default)
    add(args.vararg, parameter.VAR_POSITIONAL)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        add(arg, parameter.KEYWORD_ONLY, default)
    add(args.kwarg, parameter.VAR_KEYWORD)
    return inspect.Signature(found)


def _literal(default: ast.expr | None) -> Any:
    if default is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(default)
    except ValueError:
        return OTHER


@functools.cache
def signature_of_schema(schema: Any) -> inspect.Signature:
    """The signature of an operator of torch.

    Args:
        schema: text ("npu::x(Tensor q, *, float scale=1.) -> Tensor"), or a live one (`op.default._schema`).
    """
    if isinstance(schema, str):
        import torch

        schema = torch._C.parse_schema(schema)
    parameter = inspect.Parameter
    # torch itself takes None for any tensor, and hands over an undefined one.
    words = {"Tensor": "Tensor | None"}
    return inspect.Signature(
        [
            parameter(
                argument.name,
                parameter.KEYWORD_ONLY if argument.kwarg_only else parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default_value if argument.has_default_value() else parameter.empty,
                annotation=words.get(str(argument.real_type), str(argument.real_type)),
            )
            for argument in schema.arguments
        ]
    )
