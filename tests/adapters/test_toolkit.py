"""The public face of `polyattn.adapters`: every name is documented, and the vendors' adapters use nothing else."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from polyattn import adapters

ROOT = Path(__file__).parents[2]
DATA = {"EPOCH", "OutAndLSE"}
"""A list of one number, and a name of a type."""


@pytest.mark.parametrize("name", sorted({*adapters.__all__} - DATA))
def test_a_name_says_what_it_takes(name: str) -> None:
    thing = getattr(adapters, name)
    text = inspect.getdoc(thing) or ""
    assert text, "a promise without words"
    if inspect.isfunction(thing):
        missing = [argument for argument in inspect.signature(thing).parameters if argument not in text]
        assert not missing, "arguments without a word"


def test_the_face_shows_what_it_has() -> None:
    """Checkers are told of the same names as are imported when they are first used."""
    (told,) = [
        node for node in ast.parse(_source()).body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    ]
    shown = [alias.asname for node in told.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(filter(None, shown)) == adapters.__all__
    assert {*adapters.__all__} <= {*dir(adapters)}


def _source() -> str:
    return Path(adapters.__file__).read_text(encoding="utf-8")


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, polyattn.adapters as a; a.low_lse_defect; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


FILES = sorted([*ROOT.glob("plugins/[!_]*/src/**/*.py"), *ROOT.glob("core/src/polyattn/backends/*.py")])


def test_vendors_import_the_face() -> None:
    """Modules behind it may change."""
    found = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if "adapters." in f"{module}." and not module.endswith("adapters"):
                found.append((file.name, module))
    assert len(FILES) > 50
    assert not found
