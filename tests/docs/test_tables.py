"""The tables of the pages in docs are what `python docs/tables.py` writes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from polyattn.envvars import ENVVARS
from polyattn.registry.manager import get_manager

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("tables")


def test_the_pages_are_what_their_command_writes(tables: ModuleType) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in tables.pages()}
    for page, text in texts.items():
        assert tables.written(text) == text, f"{page.name}: python docs/tables.py writes it"
    shown = [name for text in texts.values() for _, name, _ in tables.BLOCK.findall(text)]
    assert sorted(shown) == sorted(tables.TABLES), "every table is on a page, once"


def test_a_table_that_is_changed_by_hand_is_written_again(tables: ModuleType) -> None:
    page = "before\n<!-- table: environment variables -->\n| by | hand |\n<!-- /table: environment variables -->\nafter"
    text = tables.written(page)
    assert "by | hand" not in text
    assert text.startswith("before\n<!-- table")
    assert text.endswith("-->\nafter")
    assert all(f"| `{name}` | {meaning} |" in text for name, meaning in ENVVARS.items())
    assert tables.written(text) == text


def test_every_row_says_what_the_page_says_it_must(tables: ModuleType) -> None:
    for info in get_manager().load().backends.values():
        for one in (one for provider in info.providers if not provider.planned for one in provider.rows):
            for family, names in tables.MUST.items():
                if family in str(one.when.get("family")):
                    missing = [name for name in names if name not in {*one.when, *one.allows, *one.lowered}]
                    assert not missing, f"{info.id}: a row of {family} says nothing of {missing}"


def test_a_table_that_nobody_makes_is_named(tables: ModuleType) -> None:
    with pytest.raises(SystemExit, match="the table 'moods', which nobody makes; known: flags of list, "):
        tables.written("<!-- table: moods -->\n\n<!-- /table: moods -->")


def test_check_says_which_page_is_not_current(tables: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "tables.py"
    script.write_text((DOCS / "tables.py").read_text(encoding="utf-8"), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("<!-- table: errors -->\n\n<!-- /table: errors -->\n", encoding="utf-8")
    command = [sys.executable, str(script)]
    checked = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (1, "page.md is not what the code says: python docs/tables.py\n")
    subprocess.run(command, check=True)
    assert "[`ConfigError`](#configerror)" in page.read_text(encoding="utf-8")
    subprocess.run([*command, "--check"], check=True)


def test_a_row_has_the_names_the_default_and_the_meaning(tables: ModuleType) -> None:
    rows = tables.flags("explain").splitlines()
    assert "| `--heads` | 32; 128 for mla | Heads of the queries. |" in rows
    assert any(row.startswith("| `--verbose`, `-v` | | ") for row in rows)
    assert any(row.startswith("| `--softcap` | | ") and row.endswith("(S5). |") for row in rows)
