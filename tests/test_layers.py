"""The shape of the code: what is small stays small, and vendors and core know each other only through the contract."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "polyattn"
PLUGINS = sorted(p.parent for p in ROOT.glob("plugins/[!_]*/pyproject.toml"))
HEART = {
    "contract": ("contract.py", "hookspecs.py", "records"),
    "selection": ("selection.py", "overrides.py"),
    "dispatch": ("dispatch.py", "varlen.py", "signature.py", "compiled.py", "choose.py"),
    "plugins": ("plugins.py",),
}
BUDGET = 2500


def sources(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every absolute module name that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def code_lines(path: Path) -> int:
    """Lines of code: neither blank, nor only a comment, nor part of a docstring (those must not be rationed)."""
    text = path.read_text(encoding="utf-8")
    words = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    prose = [w for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)]
    skipped = {line for w in prose for line in range(w.lineno, (w.end_lineno or w.lineno) + 1)}
    marks = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in marks]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - skipped)


def test_contract_selection_dispatch_and_plugins_stay_small() -> None:
    rooms = [CORE / name for names in HEART.values() for name in names]
    missing = [room for room in rooms if not room.exists()]
    assert not missing, "the budget counts files that are gone"
    lines = {str(f.relative_to(CORE)): code_lines(f) for room in rooms for f in sources(room)}
    assert sum(lines.values()) <= BUDGET, f"{sum(lines.values())} lines of code, {BUDGET} are allowed: {lines}"


def test_code_lines_counts_code_only(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        '"""Doc\n\nstring."""\n\n# comment\nx = (\n    1,  # one\n)\ny = """a\nb"""\n\ndef f():\n    """Doc."""\n'
    )
    assert code_lines(file) == 6


def test_core_imports_no_vendor_package() -> None:
    vendors = {f"polyattn_{p.name}" for p in PLUGINS}
    found = {(f.name, name) for f in sources(CORE) for name in imported(f) if name.split(".")[0] in vendors}
    assert not found


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda p: p.name)
def test_a_plugin_imports_no_other_plugin(folder: Path) -> None:
    others = {f"polyattn_{p.name}" for p in PLUGINS} - {f"polyattn_{folder.name}"}
    found = {(f.name, name) for f in sources(folder / "src") for name in imported(f) if name.split(".")[0] in others}
    assert not found


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda p: p.name)
def test_a_plugin_talks_to_core_through_its_contract(folder: Path) -> None:
    inner = {"polyattn.plugins", "polyattn.selection", "polyattn.overrides", "polyattn.dispatch", "polyattn.cli"}
    found = {(f.name, name) for f in sources(folder / "src") for name in imported(f) if name in inner}
    assert not found
