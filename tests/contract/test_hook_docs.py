"""docs/hooks.md says what the specs say, and its examples are a plugin that works."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

from polyattn.contract import API_VERSION
from polyattn.contract.hookspecs import PolyattnSpecs
from polyattn.envvars import ENVVARS
from polyattn.registry.manager import PluginManager, reset_manager

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"
TEXT = PAGE.read_text(encoding="utf-8")
SPECS = {name: spec for name, spec in vars(PolyattnSpecs).items() if name.startswith("polyattn_")}


def arguments(name: str) -> list[str]:
    return list(inspect.signature(SPECS[name]).parameters)[1:]


def section(name: str) -> str:
    return TEXT.split(f"\n## {name}(", 1)[1].split("\n## ", 1)[0]


def test_each_hook_has_a_heading_with_its_signature_in_call_order():
    headings = re.findall(r"^## (polyattn_\w+)\((.*)\)$", TEXT, re.M)
    assert headings == [(name, ", ".join(arguments(name))) for name in SPECS]


@pytest.mark.parametrize("name", SPECS)
def test_each_argument_is_described_and_no_other(name):
    described = re.findall(r"^- `(\w+)` - `\w+`: \w", section(name), re.M)
    assert described == arguments(name)


@pytest.mark.parametrize("name", SPECS)
def test_each_hook_says_what_it_returns_and_has_an_example(name):
    assert re.search(r"^Returns ", section(name), re.M)
    assert f"@hookimpl\ndef {name}({', '.join(arguments(name))}):" in section(name)


def test_the_page_knows_this_version_of_the_contract_and_no_other_variable():
    assert f"one that this polyattn speaks (now {API_VERSION})" in TEXT
    assert set(re.findall(r"POLYATTN_[A-Z_]+", TEXT)) - {"POLYATTN_API_VERSION"} <= set(ENVVARS)


def test_every_hook_is_the_hook_that_is_called():
    manager = PluginManager({"POLYATTN_PLUGINS": ""})
    assert set(SPECS) == set(manager._specs)
    assert {name: set(arguments(name)) for name in SPECS} == manager._specs


@pytest.mark.parametrize("name", SPECS)
def test_the_docstring_of_a_spec_names_its_call(name):
    text = inspect.getdoc(SPECS[name]) or ""
    assert re.search(r"Called (once|only)", text)


def test_the_examples_work_beside_the_plugin_of_the_other_page():
    """Whoever reads this page has often followed add-a-backend.md, and has its plugin installed."""
    assert "acme" in PAGE.with_name("add-a-backend.md").read_text(encoding="utf-8")
    assert "acme" not in TEXT.lower()


def test_the_examples_are_one_plugin_that_works(tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    (tmp_path / "hooks_page.py").write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    manager = PluginManager({"POLYATTN_PLUGINS": ""}).load()
    reset_manager(manager)
    try:
        page = importlib.import_module("hooks_page")
        assert manager.plugins["orbit"].state == "ready"
        assert {b.planned for b in manager.backends.values() if b.id == "orbit@orbit"} == {True}
        assert all(hasattr(page, name) for name in SPECS)
    finally:
        sys.modules.pop("hooks_page", None)
        reset_manager()
