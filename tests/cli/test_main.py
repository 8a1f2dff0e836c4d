"""What all commands share: exit codes, messages, JSON errors, and no torch."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from typer.models import OptionInfo

from polyattn import __version__, errors
from polyattn.cli import app, main
from polyattn.cli.commands import COMMANDS

from .conftest import Run

# Before 0.26 typer checks numbers with click itself, whose words are kept, and before 0.20 it guesses no commands.
CLICKS_WORDS = {
    "--head-dim 'wide' is": "Invalid value for '--head-dim': 'wide' is not a valid integer. See `poly",
    "--head-dim '1.5' is": "Invalid value for '--head-dim': '1.5' is not a valid integer. See `polyattn expl",
    "--softcap 'wide' is": "Invalid value for '--softcap': 'wide' is not a valid float. See `polyattn explain",
    "--page-size 'big' is": "Invalid value for '--page-size': 'big' is not a valid integer. See `p",
    "--rounds 0:": "Invalid value for '--rounds': 0 is not in the range x>=1. See `polyattn tune --help`",
    "--number -1:": "Invalid value for '--number': -1 is not in the range x>=0. See `polyattn fuzz --help`",
    "--seconds 0:": "Invalid value for '--seconds': 0.0 is not in the range x>=0.001. See `polyattn bench --h",
    "Did you mean 'explain'?": "See `polyattn --help`",
}
OWN_CLICK = typer.BadParameter.__module__.partition(".")[0] == "typer"

HOPPER = ("--assume-platform", "cuda:sm90")


@pytest.mark.parametrize(
    ("words", "code", "kind", "message"),
    [
        (("explain", "--nope"), 2, "UsageError", "No such option: --nope"),
        (("explain", "--head-dim", "wide"), 2, "UsageError", "--head-dim 'wide' is not a whole number. See `poly"),
        (("explain", "--head-dim=1.5"), 2, "UsageError", "--head-dim '1.5' is not a whole number. See `polyattn expl"),
        (("explain", "--softcap", "wide"), 2, "UsageError", "--softcap 'wide' is not a number. See `polyattn explain"),
        (("config", "check", "--page-size", "big"), 2, "UsageError", "--page-size 'big' is not a whole number. See `p"),
        (("tune", "--rounds", "0"), 2, "UsageError", "--rounds 0: give 1 or more. See `polyattn tune --help`"),
        (("fuzz", "--number", "-1"), 2, "UsageError", "--number -1: give 0 or more. See `polyattn fuzz --help`"),
        (("bench", "--seconds", "0"), 2, "UsageError", "--seconds 0: give 0.001 or more. See `polyattn bench --h"),
        (("frobnicate",), 2, "UsageError", "No such command 'frobnicate'. See `polyattn --help`"),
        (("explian",), 2, "UsageError", "Did you mean 'explain'? See `polyattn --help`"),
        (("explain", "--assume-platform", "gpu"), 2, "ConfigError", "--assume-platform 'gpu' is not a platform."),
        (("explain", "--assume-platform", "npu:910b"), 2, "ConfigError", "Did you mean 'npu:ascend910b'?"),
        (("matrix", "--format", "pdf"), 2, "ConfigError", "Allowed: text, markdown, json"),
        (("explain", "--family", "dens"), 2, "ConfigError", "Did you mean 'dense'"),
        (("explain", "--assume-platform", "cuda:h100"), 2, "ConfigError", "is not an architecture of cuda"),
        (("explain", "--assume-installed", "flash-atn-3"), 2, "ConfigError", "Did you mean 'flash-attn-3'"),
        (("config", "check", "--page-size", "0"), 2, "ConfigError", "whole number of tokens >= 1"),
        (("explain", "--dtype", "fp8_e4m3"), 3, "UnsupportedRequestError", "no backend can serve this call"),
        (("explain", "--attention-backend", "torch_spda"), 4, "BackendUnavailableError", "Did you mean 'torch_sdpa'"),
        (("explain", "--attention-backend", "flashinfer"), 4, "BackendUnavailableError", "has no backend on cpu"),
        (("list", "--platform", "cudaa"), 4, "BackendUnavailableError", "Did you mean 'cuda'"),
    ],
)
def test_failures_have_a_code_and_a_message_in_both_forms(
    run: Run, words: tuple[str, ...], code: int, kind: str, message: str
) -> None:
    if not OWN_CLICK:
        message = next((clicks for ours, clicks in CLICKS_WORDS.items() if message.startswith(ours)), message)
    text = run(*words)
    assert (text.code, text.out) == (code, "")
    assert message in " ".join(text.err.split())
    assert text.err.startswith("error: ")
    as_json = run(*words, "--json")
    assert (as_json.code, as_json.err) == (code, "")
    assert as_json.data["error"]["type"] == kind
    assert message in as_json.data["error"]["message"]


def test_a_usage_error_names_the_help(run: Run) -> None:
    def said(*words: str) -> str:
        return " ".join(run(*words).err.split())  # however wide the lines are

    assert "See `polyattn explain --help`" in said("explain", "--nope")
    assert "See `polyattn config check --help`" in said("config", "check", "--nope")
    assert "See `polyattn config --help`" in said("config", "chek")
    assert "requires an argument. See `polyattn explain --help`" in said("explain", "--window")
    assert "requires an argument. See `polyattn config check --help`" in said("config", "check", "--file")


def test_a_refused_request_lists_the_reasons(run: Run) -> None:
    text = run("explain", "--dtype", "fp8_e4m3").err
    assert "torch_sdpa" in text
    assert "dtype='fp8_e4m3' is not one of" in text
    rejected = run("explain", "--dtype", "fp8_e4m3", "--json").data["error"]["rejected"]
    assert rejected["torch_sdpa"] == ["dtype='fp8_e4m3' is not one of float64, float32, float16, bfloat16"]


def test_every_error_of_polyattn_has_the_documented_code() -> None:
    kinds = {getattr(errors, name) for name in errors.__all__ if name.endswith("Error")} - {errors.PolyattnError}
    assert set(app.EXIT_CODES) == kinds
    assert [app.EXIT_CODES[k] for k in (errors.ConfigError, errors.UnsupportedRequestError)] == [2, 3]


def test_an_error_without_a_code_of_its_own_is_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise errors.PolyattnError("odd")

    monkeypatch.setattr("polyattn.cli.listing.list_backends", fail)
    assert (run("list").code, run("list").err) == (1, "error: odd\n")


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polyattn.cli.listing.list_backends", interrupt)
    assert run("list").code == 130


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_without_the_extra_the_pip_line_is_the_message(run: Run, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    text = run("list")
    assert (text.code, text.out) == (4, "")
    assert text.err == f"polyattn: the command line needs {library}, not installed here: pip install 'polyattn[cli]'\n"
    as_json = run("list", "--json")
    assert as_json.code == 4
    assert "pip install 'polyattn[cli]'" in as_json.data["error"]["message"]


def test_version(run: Run) -> None:
    assert (run("--version").code, run("--version").out) == (0, f"polyattn {__version__}\n")


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(run: Run, words: tuple[str, ...]) -> None:
    shown = run(*words)
    assert shown.code == 0
    assert all(f" {name} " in shown.out for name in ("list", "matrix", "explain", "doctor", "demo", "config"))


def test_config_alone_shows_its_commands(run: Run) -> None:
    shown = run("config")
    assert (shown.code, shown.err) == (0, "")
    assert " check " in shown.out


def test_the_words_come_from_the_process_when_none_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["polyattn", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"polyattn {__version__}\n"


def python(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=1800)


def test_python_m_polyattn() -> None:
    done = python("-m", "polyattn", "explain", "--assume-platform", "cuda:h100", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["type"] == "ConfigError"


LIGHT = (
    ("list", "--all"),
    ("matrix", "--format", "markdown"),
    ("explain", *HOPPER, "--assume-installed", "flash-attn-3", "--phase", "decode"),
    ("explain",),
    ("doctor",),
    ("config", "check"),
    ("new-plugin", "acme"),
    ("trace", "--", "true"),
    ("parallel-plan", "--devices", "8", "--tokens", "75600", "--heads", "24"),
)
"""Command lines of every command that needs no torch."""


def test_the_page_names_the_commands_that_import_torch() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"Every command but (.*?) works\s+without importing PyTorch", page, re.S)
    heavy = set(re.findall(r"`([\w-]+)`", listed))
    commands = set(typer.main.get_command(app.app).commands)  # type: ignore[attr-defined]
    assert heavy == commands - {words[0] for words in LIGHT}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("words", [*LIGHT, ("demo", "--help")], ids=" ".join)
def test_no_other_command_imports_torch(words: tuple[str, ...], tmp_path: Path) -> None:
    code = f"""
import sys
from polyattn.cli import main
code = main({list(words)!r})
heavy = {{"torch", "numpy", "transformers"}} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else code)
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    code = "import sys; from polyattn.cli import main; sys.exit(main(['matrix', '--format', 'markdown']))"
    command = [sys.executable, "-c", code]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=1800)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr.strip()) == (1, "")  # typer before 0.26 ends the line


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    code = "import sys; from polyattn.cli import main; sys.exit(main(['matrix']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert "? vendor" in done.stdout


@pytest.mark.parametrize(
    "words", [("list",), ("doctor",), ("explain",), ("matrix",), ("config", "check")], ids=" ".join
)
def test_a_pipe_gets_100_columns(run: Run, words: tuple[str, ...]) -> None:
    shown = run(*words)
    assert shown.code == 0
    assert max(map(len, shown.out.splitlines())) <= 100


@pytest.mark.parametrize("words", [("--help",), ("explain", "--help"), ()], ids=" ".join)
def test_so_does_help(run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    assert max(map(len, run(*words).out.splitlines())) == 100
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, run(*words).out.splitlines())) == 70


def test_columns_sets_another_width(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, run("explain").out.splitlines())) == 70


def test_an_option_with_a_placeholder_of_its_own_name_spells_its_name_out() -> None:
    # Typer 0.27 takes such a placeholder for the option's declaration: --DEVICE instead of --device.
    for command, where in COMMANDS.items():
        function = getattr(importlib.import_module(f"polyattn.cli.{where.module}"), where.function)
        hints = {} if isinstance(function, typer.Typer) else get_type_hints(function, include_extras=True)
        for name, hint in hints.items():
            for option in getattr(hint, "__metadata__", ()):
                if isinstance(option, OptionInfo) and name.lower() == str(option.metavar).lower():
                    assert f"--{name}" in (option.default, *(option.param_decls or ())), (command, name)


def test_the_list_says_of_a_command_what_the_command_says_of_itself() -> None:
    for name, command in typer.main.get_command(app.app).commands.items():  # type: ignore[attr-defined]
        assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name].summary
        assert command.name == name


@pytest.mark.parametrize("words", [("--version",), ("--help",), ()], ids=["version", "help", "none"])
def test_no_command_is_imported_to_list_them(words: tuple[str, ...]) -> None:
    code = (
        f"import sys; from polyattn.cli import main; code = main({[*words]!r}); "
        "print('|', *(name for name in sys.modules if name.startswith(('polyattn.', 'torch', 'rich.progress'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, _, modules = done.stdout.rpartition("|")
    assert ("polyattn 0." in said) if words == ("--version",) else ("Draw random calls" in said)
    mine = {f"polyattn.cli.{where.module}" for where in COMMANDS.values()}
    heavy = {"torch", "rich.progress", "polyattn.selection.select", "polyattn.registry.manager", "polyattn.contract"}
    assert not (mine | heavy) & set(modules.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_flags(run: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    """What a shell runs while a line is typed; bash hands the words over in another way."""

    def completions(*words: str) -> str:
        monkeypatch.setenv("_POLYATTN_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(words))
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        shown = run()
        assert (shown.code, shown.err) == (0, "")
        return shown.out

    assert "explain" in completions("polyattn", "exp")
    assert "doctor" not in completions("polyattn", "exp")
    assert "--platform" in completions("polyattn", "list", "--pl")


def test_the_page_says_how_completion_is_installed(run: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    for flag in ("--install-completion", "--show-completion"):
        assert flag in run("--help").out
        assert f"`polyattn {flag}`" in page


def test_a_script_that_no_shell_has_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_POLYATTN_COMPLETE", "complete_nosuch")
    shown = run()
    assert shown.code == 1
    assert "nosuch not supported" in shown.err
