"""What docs/hooks.md, configuration.md, errors.md and cli.md promise, against what the code does and not only declares.

Tables that repeat the code are written by docs/tables.py (test_tables). Headings and arguments are checked beside the
code: tests/contract (test_hook_docs), tests/selection/config (test_configuration_page), tests/dispatch
(test_errors_page), tests/cli (test_cli_page).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyattn import errors
from polyattn.cli.app import EXIT_CODES
from polyattn.contract import hookspecs
from polyattn.envvars import ENVVARS
from polyattn.registry.manager import PluginManager
from polyattn.selection.config import load_settings

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "polyattn"
SOURCES = sorted(f for pattern in ("core/src", "plugins/*/src") for d in ROOT.glob(pattern) for f in d.rglob("*.py"))
HOOKS, CONFIGURATION, ERRORS, CLI = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("hooks", "configuration", "errors", "cli")
)


def cells(page: str, pattern: str) -> list[tuple[str, ...]]:
    """The groups of every line of a page that is a row like this."""
    return re.findall(rf"^\| {pattern} \|$", page, re.M)


# Hooks ---------------------------------------------------------------------------------------------------------------

HOOK_ROWS = cells(HOOKS, r"(\d) \| `(\w+)` \| (.+?) \| (.+?)")

RECORDER = """
import sys

from polyattn.contract import hookimpl
from polyattn.contract import BackendInfo, Provider, row

CALLS = []


def note(hook, request=None):
    CALLS.append((hook, "torch" in sys.modules, None if request is None else request.causal))


@hookimpl
def polyattn_register_platforms():
    note("polyattn_register_platforms")
    return []


@hookimpl
def polyattn_register_backends():
    note("polyattn_register_backends")
    rows = (row(family="dense", dtype="float32", head_dim=8, causal=("none", "bottom_right")),)
    yield BackendInfo("recorder", "cpu", (Provider("own", rows, "recorder:Adapter"),), summary="made for a test")


@hookimpl
def polyattn_register_measurements():
    note("polyattn_register_measurements")
    return []


@hookimpl
def polyattn_register_tunables():
    note("polyattn_register_tunables")
    return []


@hookimpl
def polyattn_register_device_ops():
    note("polyattn_register_device_ops")
    return []


@hookimpl
def polyattn_report_capability(backend, request):
    note("polyattn_report_capability", request)


@hookimpl
def polyattn_load_forward(backend, provider, request):
    note("polyattn_load_forward", request)


class Adapter:
    def bind(self, request):
        from polyattn.backends.reference_backend import Reference

        return Reference().bind(request)
"""

USE = """
import json

import polyattn
import recorder

seen = {}


def step(name, *done):
    seen[name] = list(recorder.CALLS)
    recorder.CALLS.clear()


step("import")
polyattn.list_backends()
polyattn.list_backends()
step("list")
ask = polyattn.AttentionRequest(dtype="float32", head_dim=8)
assert polyattn.explain(ask, backend="recorder").backend == "recorder"
step("explain")

import torch

q = torch.randn(1, 3, 1, 8)
for _ in range(3):
    polyattn.attention(q, q, q, backend="recorder")
step("served")
for _ in range(3):
    polyattn.attention(q, q, q, causal=True, backend="recorder")
step("another request")
try:
    polyattn.attention(q.double(), q.double(), q.double(), backend="recorder")
except polyattn.UnsupportedRequestError:
    step("rows refuse")
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What is called when, in a process of its own: step -> [hook, torch was there, causal of the request]."""
    folder = tmp_path_factory.mktemp("recorder")
    (folder / "recorder.py").write_text(RECORDER)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "POLYATTN_PLUGINS": "recorder", "POLYATTN_EXTRA_PLUGINS": "recorder"}
    done = subprocess.run([sys.executable, "-c", USE], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


def test_hooks_are_called_in_the_order_of_the_page(calls: dict[str, list[Any]]) -> None:
    in_order = list(dict.fromkeys(hook for step in calls.values() for hook, *_ in step))
    assert [hook for _, hook, *_ in HOOK_ROWS] == in_order
    assert [int(number) for number, *_ in HOOK_ROWS] == list(range(1, len(in_order) + 1))


def test_hooks_are_called_when_the_page_says(calls: dict[str, list[Any]]) -> None:
    """The table is made of the specs' docstrings: what they say of how often is what is seen."""
    said = {hook: when for _, hook, when, _ in HOOK_ROWS}
    *registering, capability, forward = said
    assert all(said[hook].startswith("once per process") for hook in registering)
    assert calls["import"] == []
    assert [hook for hook, *_ in calls["list"]] == registering
    assert all("once per distinct request" in said[hook] for hook in (capability, forward))
    assert {hook for hook, *_ in calls["explain"]} == {capability}
    for step, causal in (("served", "none"), ("another request", "bottom_right")):
        assert [[hook, asked] for hook, _, asked in calls[step]] == [[capability, causal], [forward, causal]]
    assert "only when the rows accept" in said[capability]
    assert calls["rows refuse"] == []


def test_where_a_hook_may_import_records_torch_is_not_there(calls: dict[str, list[Any]]) -> None:
    allowed = {hook: what for _, hook, _, what in HOOK_ROWS}
    early = [call for step in ("list", "explain") for call in calls[step]]
    assert {hook for hook, *_ in early} == {hook for hook, what in allowed.items() if what == "records"}
    assert not [hook for hook, torch_loaded, _ in early if torch_loaded]


@pytest.mark.parametrize("hook", [hook for _, hook, *_ in HOOK_ROWS])
def test_what_a_hook_returns_is_what_its_spec_returns(hook: str) -> None:
    spec = getattr(hookspecs.PolyattnSpecs, hook)
    annotation = inspect.signature(spec).return_annotation.replace("Verdict", "Accepted | Rejected")
    records = set(re.findall(r"\w+", annotation)) - {"Iterable", "str"}
    section = HOOKS.split(f"\n## {hook}(", 1)[1].split("\n## ", 1)[0]
    (said,) = re.findall(r"^Returns (.+?)(?:\n\n|\Z)", section, re.M | re.S)
    first = said.partition(". ")[0]
    assert {word.rpartition(".")[2] for word in re.findall(r"`((?:\w+\.)*[A-Z]\w*)", first)} == records
    assert ("an iterable of" in first) == ("Iterable" in annotation)


# Environment variables -----------------------------------------------------------------------------------------------

NO_VARIABLE = {"POLYATTN_API_VERSION", "POLYATTN_MLA"}  # an attribute of a plugin's module; a name in vLLM


def constants(tree: ast.AST) -> Iterator[str]:
    """The texts in a piece of source that are no docstrings."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def strings(file: Path) -> Iterator[str]:
    return constants(ast.parse(file.read_text(encoding="utf-8")))


class Asked(dict[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __missing__(self, name: str) -> str:
        self.names.add(name)
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return default


def test_every_variable_of_polyattn_in_the_sources_is_in_the_table() -> None:
    used = {name for file in SOURCES for text in strings(file) for name in re.findall(r"POLYATTN_[A-Z_]*[A-Z]", text)}
    assert used - NO_VARIABLE <= set(ENVVARS)


def test_every_variable_on_the_page_is_read() -> None:
    asked = Asked()
    load_settings(environ=asked)
    PluginManager(asked).load()
    table = CORE / "envvars.py"
    named = {text for file in SOURCES if file != table for text in strings(file)}
    assert not set(ENVVARS) - asked.names - named


def foreign(file: Path) -> set[str]:
    """Variables that are not polyattn's own in the statements of a file that look at the environment."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    definitions = (ast.FunctionDef, ast.ClassDef)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not isinstance(n, definitions)]
    texts = {text for n in found if "environ" in ast.unparse(n) for text in constants(n)}
    return {text for text in texts if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|COLUMNS", text)} - set(ENVVARS)


def test_variables_of_others_that_are_read_are_on_a_page_and_no_more() -> None:
    read = {name for file in SOURCES for name in foreign(file)} - {"PCI_BUS_ID"}  # a value, of CUDA_DEVICE_ORDER
    assert {"CUDA_VISIBLE_DEVICES", "COLUMNS"} <= read
    on_pages = set(re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|COLUMNS)[`=]", CONFIGURATION + CLI))
    read_by_rich = {"NO_COLOR"}
    assert {name for name in on_pages if not name.startswith("POLYATTN_")} - read_by_rich == read


# Errors and exit codes -----------------------------------------------------------------------------------------------


CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
PAGE_CODES = {int(code): names for code, names in re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|$", CLI, re.M)}


def test_every_error_that_people_can_catch_is_on_the_page() -> None:
    """An exception of a module is either private to it or one of `polyattn.errors`, which all have a section."""
    nodes = [node for file in SOURCES for node in ast.parse(file.read_text(encoding="utf-8")).body]
    named = {node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}
    assert {name for name in named if re.search(r"(Error|Exception|Warning)$", name)} == set(CLASSES)


@pytest.mark.parametrize("page", ["errors", "cli", "hooks", "configuration"])
def test_every_error_that_a_page_names_exists(page: str) -> None:
    text = {"errors": ERRORS, "cli": CLI, "hooks": HOOKS, "configuration": CONFIGURATION}[page]
    named = set(re.findall(r"`(?:polyattn\.)?(\w+(?:Error|Warning))`", text)) - {"UsageError"}  # typer's
    assert not {name for name in named if name not in CLASSES and not hasattr(builtins, name)}


def test_every_error_has_an_exit_code_and_the_page_of_commands_has_the_same() -> None:
    """The table of docs/errors.md is made of these."""
    on_cli = {name: code for code, names in PAGE_CODES.items() for name in re.findall(r"`(\w+)`", names)}
    assert on_cli == {**{kind.__name__: code for kind, code in EXIT_CODES.items()}, "PolyattnError": 1}
    assert set(on_cli) == set(CLASSES), "every error has a code of its own"


def exits(file: Path) -> Iterator[int]:
    """The numbers in a command's `typer.Exit(...)`, and what the functions that end a process return."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assigned = [(n.targets[0], n.value) for n in tree.body if isinstance(n, ast.Assign)]
    named = {target.id: value for target, value in assigned if isinstance(target, ast.Name)}
    ends = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in ("run", "_run", "main")]
    found = [n.value for end in ends for n in ast.walk(end) if isinstance(n, ast.Return) and n.value is not None]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "typer.Exit"]
    for value in [*found, *(argument for call in calls for argument in call.args)]:
        value = named.get(value.id, value) if isinstance(value, ast.Name) else value
        if isinstance(value, ast.Constant) and isinstance(value.value, int):
            yield value.value


def test_every_code_that_a_command_ends_with_is_on_the_page() -> None:
    used = {code for file in sorted((CORE / "cli").rglob("*.py")) for code in exits(file)}
    assert {1, 2, 3, 4, 130} <= used
    assert used | {0} == set(PAGE_CODES)
