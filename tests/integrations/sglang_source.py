"""SGLang's source, read and not imported: signatures of its functions."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest


def real(module: str) -> ast.Module:
    """A module of the installed SGLang."""
    try:
        files = importlib.metadata.files("sglang") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("sglang is not installed: nox -s engines installs it without what needs a GPU")
    (path,) = (Path(str(f.locate())) for f in files if str(f) == module)
    return ast.parse(path.read_text(encoding="utf-8"))


def parameters(tree: ast.Module, name: str) -> list[str]:
    """The parameters of a function, or of a method as Class.method, without *args and **kwargs."""
    body: list[ast.stmt] = tree.body
    *owners, own = name.split(".")
    for owner in owners:
        (kind,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
        body = kind.body
    (function,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == own)
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def fields(tree: ast.Module, name: str) -> set[str]:
    """What a class declares: its fields and its methods."""
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return found | {n.name for n in kind.body if isinstance(n, ast.FunctionDef)}
