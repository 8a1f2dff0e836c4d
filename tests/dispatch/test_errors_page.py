"""docs/errors.md has every error, what it derives from and what it carries, and its examples hold."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import polyattn
from polyattn import errors
from polyattn.envvars import ENVVARS
from polyattn.registry.manager import PluginManager, reset_manager

TEXT = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
CLASSES = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, Exception)}


def section(name: str) -> str:
    return TEXT.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]


def test_each_error_has_a_section():
    assert sorted(re.findall(r"^## (\w+Error)$", TEXT, re.M)) == sorted(CLASSES)
    assert set(CLASSES) < set(errors.__all__)
    assert all(getattr(polyattn, name) is cls for name, cls in CLASSES.items())


def test_each_one_is_an_error_of_polyattn_and_a_builtin_one():
    """The page's table of them is written by docs/tables.py."""
    for name, kind in CLASSES.items():
        builtin = [base for base in kind.__bases__ if base.__module__ == "builtins"]
        assert issubclass(kind, polyattn.PolyattnError)
        assert len(builtin) == 1, name


@pytest.mark.parametrize("name", [n for n in CLASSES if n != "PolyattnError"])
def test_attributes_are_described(name):
    described = re.findall(r"^- `(\w+)` - `.+`: \w", section(name), re.M)
    assert described == list(vars(CLASSES[name]("message")))
    assert bool(described) != ("Attributes: none of its own." in section(name))


def test_rejected_is_a_copy_in_plain_types():
    given = {"fa": ("too old",)}
    error = errors.UnsupportedRequestError("no", given)
    assert error.rejected == {"fa": ["too old"]}
    error.rejected["fa"].append("x")
    assert given == {"fa": ("too old",)}
    assert errors.UnsupportedRequestError("no").rejected == {}


def test_the_variables_it_names_exist():
    assert set(re.findall(r"POLYATTN_[A-Z_]*[A-Z]", TEXT)) <= set(ENVVARS)


@pytest.mark.parametrize(
    "name, known, sentence",
    [
        ("tourch_sdpa", ("torch_sdpa", "reference"), " Did you mean 'torch_sdpa'?"),
        ("fa", ("fa3", "fa4"), " Did you mean 'fa4' or 'fa3'?"),
        ("x", ("reference",), ""),
        ("anything", (), ""),
        ("cuda", ("cpu", "cuda"), ""),
    ],
)
def test_near_matches_are_offered(name, known, sentence):
    assert errors.did_you_mean(name, known) == sentence


def test_the_examples_hold():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    assert len(blocks) == 1 + len(CLASSES)
    reset_manager(PluginManager({"POLYATTN_PLUGINS": ""}))
    try:
        exec(compile("\n".join(blocks), "errors.md", "exec"), {"__name__": "errors_page"})
    finally:
        reset_manager()
