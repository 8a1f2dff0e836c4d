"""docs/cli.md has every command, exit code and key. Its tables of flags are written by docs/tables.py, and its console
blocks are run by tests/docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from polyattn.cli.app import EXIT_CODES, app

from .conftest import Run

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
COMMANDS = (
    *("list", "matrix", "explain", "doctor", "config check", "conform", "new-plugin", "fuzz", "generate", "demo"),
    *("serve", "bench", "tune", "trace", "verify", "video-map", "parallel-plan"),
)


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return str(found)


def flags_of(command: str) -> set[str]:
    found = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]  # type: ignore[attr-defined]
    opts = {opt for parameter in found.params for opt in (*parameter.opts, *parameter.secondary_opts)}
    # Arguments are listed there too, by their names.
    return {opt for opt in opts if opt.startswith("-")} - {"--help", "-h"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_flags(command: str) -> None:
    """What is in the table is what docs/tables.py writes: tests/docs/test_tables.py."""
    assert f"<!-- table: flags of {command} -->" in section(f"polyattn {command}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_json(command: str) -> None:
    assert "--json" in flags_of(command)


def test_every_command_is_on_the_page() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = {
        name if not hasattr(c, "commands") else f"{name} {sub}"
        for name, c in known.items()
        for sub in getattr(c, "commands", [""])
    }
    assert names == set(COMMANDS)
    assert set(re.findall(r"^## polyattn (.+)$", PAGE, re.M)) == names


def test_the_table_of_exit_codes_is_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|$", section("Exit codes"), re.M)
    assert [int(code) for code, _ in rows] == [0, 1, 2, 3, 4, 130, 143]
    listed = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == {**{kind.__name__: code for kind, code in EXIT_CODES.items()}, "PolyattnError": 1}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_every_flag(run: Run, command: str) -> None:
    shown = run(*command.split(), "--help")
    assert shown.code == 0
    for flag in flags_of(command):
        assert flag[:20] in shown.out


def test_the_answer_on_the_page_is_the_answer(run: Run) -> None:
    text = section("polyattn explain")
    line = next(line for line in text.splitlines() if line.startswith("$ polyattn explain --assume-platform"))
    (shown,) = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    data = run(*line.removeprefix("$ polyattn ").split()).data
    expected = json.loads(shown)
    assert {key: data[key] for key in expected} == expected
    named = re.search(r"JSON has (.*?)\. The\n?second", text, re.S)
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) == set(data)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("command", ["doctor", "config check", "list", "matrix"])
def test_the_keys_on_the_page_are_the_keys(run: Run, command: str) -> None:
    words = set(re.findall(r"`(\w+)`", section(f"polyattn {command}")))
    data = run(*command.split(), "--json").data
    assert set(data[0] if isinstance(data, list) else data) <= words
