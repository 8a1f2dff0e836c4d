"""`polyattn.serving` has its public names in one place, and costs nothing until one is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import polyattn
from polyattn import serving


@pytest.mark.parametrize("name", serving.__all__)
def test_each_name_is_there(name):
    module = import_module(f"polyattn.serving.{serving._WHERE[name]}")
    found = getattr(serving, name)
    assert found is getattr(module, name)
    assert name in module.__all__, "a public name is one of its module's"
    assert found.__doc__


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(serving.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == serving._WHERE
    assert serving.__all__ == sorted(serving._WHERE)
    assert set(serving.__all__) <= set(dir(serving))


def test_unknown_names_are_unknown():
    with pytest.raises(AttributeError, match=r"module 'polyattn.serving' has no attribute 'KvPool'"):
        _ = serving.KvPool


def test_it_is_reached_from_polyattn_and_imports_no_torch():
    assert polyattn.serving is serving
    code = "import sys, polyattn; polyattn.serving.PageAllocator(2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
