"""The shape of the code: what is small stays small, and vendors and core know each other only through the contract."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "polyattn"
PLUGINS = sorted(p.parent for p in ROOT.glob("plugins/[!_]*/pyproject.toml"))
HEART = {
    "contract": (
        "contract.py",
        "hookspecs.py",
        "records",
        "field_words.py",
        "request_text.py",
        "record_types.py",
        "call_shapes.py",
        "scalars.py",
    ),
    "registry": (
        "plugins.py",
        "plugin_sources.py",
        "foreign.py",
        "bound_check.py",
        "result_check.py",
        "distributions.py",
        "evidence.py",
        "defects.py",
    ),
    "selection": (
        "selection.py",
        "inspection.py",
        "names.py",
        "unknown_names.py",
        "rejections.py",
        "overrides.py",
        "hybrid.py",
        "policies.py",
        "request_check.py",
    ),
    "dispatch": (
        "dispatch.py",
        "varlen.py",
        "sdpa.py",
        "serving_calls.py",
        "signature.py",
        "facts.py",
        "choose.py",
        "by_length.py",
        "agreement.py",
        "compiled.py",
        "traced_errors.py",
        "traced_facts.py",
        "ops.py",
        "op_plans.py",
        "op_registration.py",
        "flops.py",
        "symbolic.py",
        "block_sparse_calls.py",
        "linear_calls.py",
        "tracing.py",
    ),
}
"""Every file of a room counts, so that no feature becomes a file beside the budget."""
BUDGET = 6180
"""It shrinks where the ways of a call become one: 4,600 is the aim."""


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


def test_contract_registry_selection_and_dispatch_stay_small() -> None:
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


VENDORS = (
    *("nvidia", "geforce", "hopper", "blackwell", "ampere", "trtllm", "flashinfer", "flashmla", "cutlass"),
    *("amd", "radeon", "instinct", "aiter", "gfx9", "gfx12", "hipblaslt", "mi300", "mi355"),
    *("ascend", "huawei", "cann", "intel", "gaudi", "ipex", "moore", "mthreads", "mate"),
    *("apple", "sageattention", "sageattn"),
)
"""Names of vendors, their chips and their libraries. What torch calls device types and builds (cuda, hip, rocm, xpu,
npu, musa, mps) is no vendor's name."""
ELSEWHERE = {
    "integrations": "hosts name the libraries they come with",
    "testing": "emulators and evidence name what they stand for",
    "platforms": "torch's device kinds are recognised by their vendors' drivers, one file for each",
    "tuning/places.py": "measurements are filed under the version of the driver",
    "cli/demo/workloads.py": "other machines that the demo assumes, with libraries on them",
}
"""Where a vendor may be named, and why."""


def excused(path: Path) -> str:
    name = path.relative_to(CORE).as_posix()
    return next((place for place in ELSEWHERE if name == place or name.startswith(place + "/")), "")


def words_of(path: Path) -> set[str]:
    """The lower-case words of a file's code: of its names and of its strings, without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found.append(node.value)
        named = (getattr(node, part, None) for part in ("id", "attr", "name", "arg", "module"))
        found += [name for name in named if isinstance(name, str)]
    return {word for text in found for word in re.split(r"[^a-z0-9]+", text.lower().replace("_", " ")) if word}


def test_core_names_no_vendor() -> None:
    found = {path: words_of(path) & set(VENDORS) for path in sources(CORE)}
    assert not {str(path): words for path, words in found.items() if words and not excused(path)}
    needed = {excused(path) for path, words in found.items() if words}
    assert {"platforms", "tuning/places.py", "cli/demo/workloads.py"} <= needed, "an excuse that is not needed any more"


def test_a_vendors_name_is_seen_in_code_and_not_in_prose(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        '"""About Intel."""\n# nvidia\nimport torch_npu\nx = "for Amd\'s chips"\ndef use_aiter_kernel(): ...\n'
    )
    assert words_of(file) & {"intel", "nvidia", "npu", "amd", "aiter"} == {"npu", "amd", "aiter"}


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
