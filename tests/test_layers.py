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
HEART = {"contract": "", "registry": "platforms", "selection": "config", "dispatch": ""}
"""Rooms whose code is rationed -> a part that is not. Every file counts: no feature is a file beside the budget."""
BUDGET = 7511
"""It shrinks where the ways of a call become one: 4,600 is the aim."""
LIBRARY = 35_100
"""Lines of core without the kit, the benchmark and the command line."""
ROOMS, FILES = 18, 6
"""Most folders, and most files besides `__init__` and `__main__`, at the top of core. `moved` is one of the folders."""
TOOLKIT = {"contract", "adapters", "semantics", "methods"}
"""Rooms that backends may import from: core's own (import-linter) and those of the vendors' packages."""


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


def lines_of(room: str, without: str = "") -> dict[str, int]:
    files = sources(CORE / room)
    counted = [f for f in files if not without or CORE / room / without not in f.parents]
    return {f.relative_to(CORE).as_posix(): code_lines(f) for f in counted}


def test_contract_registry_selection_and_dispatch_stay_small() -> None:
    lines = {room: sum(lines_of(room, without).values()) for room, without in HEART.items()}
    assert all(lines.values()), "the budget counts a room that is gone"
    assert sum(lines.values()) <= BUDGET, f"{sum(lines.values())} lines of code, {BUDGET} are allowed: {lines}"


def test_the_library_stays_small() -> None:
    uses = {"testing", "bench", "cli", "moved", "__pycache__"}
    rooms = [path for path in CORE.iterdir() if path.is_dir() and path.name not in uses]
    lines = {room.name: sum(lines_of(room.name).values()) for room in rooms}
    print(lines)
    assert sum(lines.values()) <= LIBRARY, f"{sum(lines.values())} lines of code, {LIBRARY} are allowed: {lines}"


def test_the_top_of_core_is_rooms() -> None:
    rooms = {path.name for path in CORE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    files = {path.name for path in CORE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert len(rooms) <= ROOMS, sorted(rooms)
    assert len(files) <= FILES, sorted(files)


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
    "registry/platforms": "torch's device kinds are recognised by their vendors' drivers, one file for each",
    "contract/platforms.py": "plugins are named for the device kinds they serve",
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
    assert {"registry/platforms", "tuning/places.py", "cli/demo/workloads.py"} <= needed, (
        "an excuse that is not needed any more"
    )


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
def test_a_plugin_imports_the_contract_and_the_toolkit_only(folder: Path) -> None:
    found = {(f.name, room) for f in sources(folder / "src") for room in rooms_of(f)}
    assert not {one for one in found if one[1] not in TOOLKIT}


def rooms_of(path: Path) -> set[str]:
    """The rooms of core that a file imports from; "" is a public name of the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "polyattn" else [node.module]
            )
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.split(".")[0] == "polyattn" and "." in name}
    return found


def test_rooms_are_seen_however_they_are_imported(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "import polyattn.selection\nfrom polyattn import dispatch, attention\n"
        "def f():\n    from polyattn.serving.step import x\nfrom polyattn_triton import y\n"
    )
    assert rooms_of(file) == {"selection", "dispatch", "attention", "serving"}
