"""What type checkers are told of polyattn is what runs; `nox -s typing` checks `uses.py`, right lines and wrong."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import polyattn

CORE = Path(polyattn.__file__).parent
STUB = ast.parse((CORE / "dispatch" / "typed_calls.pyi").read_text(encoding="utf-8"))
CALLS = ("attention", "varlen_attention", "paged_attention", "mla_attention", "bind")
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def declared(name: str) -> dict[str, bool]:
    """The keys of one of the stub's TypedDicts, those it inherits too -> whether they are required."""
    node = CLASSES[name]
    found: dict[str, bool] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in CLASSES:
            found |= declared(base.id)
    fields = [entry for entry in node.body if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)]
    return found | {entry.target.id: "Required" in ast.unparse(entry.annotation) for entry in fields}


def overloads(call: str) -> list[ast.FunctionDef]:
    return [node for node in STUB.body if isinstance(node, ast.FunctionDef) and node.name == call]


@pytest.mark.parametrize("call", CALLS)
def test_the_stub_has_every_argument(call):
    real = inspect.signature(getattr(polyattn, call)).parameters.values()
    positional = [p.name for p in real if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default is p.empty for p in real if p.kind is p.KEYWORD_ONLY}
    assert len(overloads(call)) == 3
    for overload in overloads(call):
        assert [a.arg for a in overload.args.args] == positional
        options = overload.args.kwarg
        assert options is not None
        said = declared(ast.unparse(options.annotation).removeprefix("Unpack[").removesuffix("]"))
        named = {a.arg for a in overload.args.kwonlyargs}
        assert not named & said.keys(), "a key and an argument of one name"
        assert named | said.keys() == keywords.keys()
        required = {name for name, needed in said.items() if needed} | (named - {"return_lse"})
        assert required == {name for name, needed in keywords.items() if needed}


@pytest.mark.parametrize("call", CALLS)
def test_what_comes_back_depends_on_return_lse(call):
    asked = []
    for overload in overloads(call):
        annotation = next(a.annotation for a in overload.args.kwonlyargs if a.arg == "return_lse")
        asked.append((ast.unparse(annotation), ast.unparse(overload.returns)))
    given = {"bind": "BoundAttention[{}]"}.get(call, "{}")
    assert asked == [
        ("Literal[False]", given.format("Tensor")),
        ("Literal[True]", given.format("tuple[Tensor, Tensor]")),
        ("bool", given.format("_Both")),
    ]


def test_a_bound_call_in_the_stub_is_the_real_one():
    call = next(node for node in CLASSES["BoundAttention"].body if isinstance(node, ast.FunctionDef))
    assert [a.arg for a in call.args.args] == list(inspect.signature(type(polyattn.bind()).__call__).parameters)


@pytest.mark.parametrize("name", ["polyattn", "polyattn.serving", "polyattn.testing", "polyattn.bench.measure"])
def test_checkers_see_the_names_that_are_resolved_late(name):
    """Of `__getattr__` they would take any name, so they do not see it, and each name is imported for them."""
    module = importlib.import_module(name)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    guards = [ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)]
    assert guards == ["TYPE_CHECKING", "not TYPE_CHECKING"]
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    seen = next(node for node in tree.body if isinstance(node, ast.If))
    names = {a.asname for node in seen.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert names == module._WHERE.keys() | {*getattr(module, "_ROOMS", ())}
    for late in module._WHERE:
        assert hasattr(module, late)
