"""Files that a user names are read in bounded time: no pipe is waited for, no device read, no bomb written out."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from polyattn.bench import results, sheets
from polyattn.bench.measure.traces import read_trace
from polyattn.cli import main
from polyattn.dispatch.trace_requests import _Recorder
from polyattn.errors import ConfigError, PluginError
from polyattn.registry.evidence import read_evidence
from polyattn.selection.config import parse_backend_config, read_config_file
from polyattn.selection.config.reading import MOST
from polyattn.user_files import read_bytes, read_text

POSIX = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes by name are POSIX")


@pytest.fixture(params=["pipe", "device", "folder"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """`odd("x.json")`: a path of that name to what is no regular file."""

    def make(name: str) -> Path:
        path = tmp_path / name
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        return path

    return make


WHY = r"(it is a (pipe|device|folder); a regular file is needed|Is a directory)"


@POSIX
@pytest.mark.parametrize("suffix", ["json", "yaml", "toml"])
def test_a_config_file_is_a_regular_file(odd: Callable[[str], Path], suffix: str) -> None:
    path = odd(f"x.{suffix}")
    with pytest.raises(ConfigError, match=f"config file: .* cannot be read: .*{WHY}"):
        read_config_file(path)
    with pytest.raises(ConfigError, match=WHY):
        parse_backend_config(str(path))


READERS: dict[str, Callable[[Path], object]] = {
    "trace": lambda path: read_trace([path]),
    "result": results.load,
    "sheet": lambda path: sheets.read([path]),
}


@POSIX
@pytest.mark.parametrize("reader", READERS)
def test_other_files_are_regular_files(odd: Callable[[str], Path], reader: str) -> None:
    path = odd("x.yaml")
    with pytest.raises(ConfigError, match=rf"{reader}.*({WHY}|is a folder without .yaml files)"):
        READERS[reader](path)


@POSIX
@pytest.mark.parametrize(
    "words", [("tune", "--import"), ("tune", "--merge"), ("tune", "--from"), ("trace", "--out", "{}", "--", "true")]
)
def test_commands_refuse_what_is_no_regular_file(
    odd: Callable[[str], Path], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(odd("x.json"))
    given = [path if word == "{}" else word for word in words]
    assert main(given if path in given else [*given, path]) == 2
    assert "error: " in capsys.readouterr().err


@POSIX
def test_requests_are_not_recorded_to_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace")
    with pytest.raises(ConfigError, match=r"requests cannot be recorded to .*trace"):
        _Recorder(tmp_path / "trace")


def test_evidence_without_end_is_an_error_of_its_plugin(tmp_path: Path) -> None:
    file = tmp_path / "evidence" / "acme@cpu.json"
    file.parent.mkdir()
    with file.open("wb") as out:
        out.truncate(17 * 2**20)
    with pytest.raises(PluginError, match=r"acme@cpu.json is not an evidence file: it has more than 16 MiB"):
        read_evidence(str(tmp_path / "plugin.py"), "acme", "cpu")


def test_the_size_of_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    text = json.dumps({"a": "x" * (MOST - 9)})
    path.write_text(text)
    assert len(text) == MOST
    assert list(read_config_file(path)) == ["a"]
    path.write_text(text + " ")
    with pytest.raises(ConfigError, match=r"cannot be read: it has more than 0.125 MiB, the most that is read"):
        read_config_file(path)


@POSIX
def test_a_pipe_is_read_where_it_may_be_one(tmp_path: Path) -> None:
    """`--prompt-file <(...)`, as shells give it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("a\r\nb",))
    writer.start()
    assert read_text(path, 100, pipes=True) == "a\nb"
    writer.join()
    regular = tmp_path / "x"
    regular.write_bytes(b"0123456789")
    assert read_bytes(regular, 4, head=4) == b"0123"
    with pytest.raises(OSError, match="more than"):
        read_bytes(regular, 9)


MERGES = "a: &a {x1: 1, x2: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{','.join([f'*{old}'] * 10)}]}}\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)
LAUGHS = "a: &a [1, 1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize("text", [MERGES, LAUGHS], ids=["merges", "lists"])
def test_aliases_that_stand_for_more_than_memory_holds(tmp_path: Path, text: str) -> None:
    assert len(text) < 435
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"what begins in line [56] holds more than 50000 values with its aliases written"
    ):
        read_config_file(path)


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a {b: *a}\n", "a: &a {<<: *a}\n", "a: &a\n  - b: {c: *a}\n"])
def test_what_holds_itself(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"what begins in line . holds itself, by an alias; write out what is meant"):
        read_config_file(path)


def test_aliases_and_merges_that_people_write(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("base: &b {x: 1, y: [2]}\none: {<<: *b, x: 3}\ntwo: [*b, *b]\n")
    base = {"x": 1, "y": [2]}
    assert read_config_file(path) == {"base": base, "one": {"x": 3, "y": [2]}, "two": [base, base]}


@pytest.mark.parametrize(
    "name, text, wrong",
    [
        ("x.yaml", f"a: 1{':1' * 600}\n", r"the value in line 1 has 1201 characters; quote it if it is text"),
        ("x.toml", f"a{'.a' * 100} = 1\n", r"a key in line 1 has more than 100 parts between dots"),
        ("x.toml", f"[x]\n['a'{'.a' * 100}]\n", r"a key in line 2 has more than 100 parts between dots"),
        ("x.toml", f"x = {{a{' . a' * 100} = 1}}\n", r"a key in line 1 has more than 100 parts between dots"),
        ("x.toml", f"a = {'1' * 5000}\n", "limit"),
        ("x.json", '{"a": 1, "b": 2, "c": 3, "b": 4}', "the key 'b' is given twice"),
    ],
)
def test_what_readers_are_slow_with(tmp_path: Path, name: str, text: str, wrong: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=wrong):
        read_config_file(path)


def test_dots_that_are_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    numbers = ", ".join(["0.5"] * 200)
    path.write_text(f'# {". " * 200}\na = [{numbers}]\nb = "{"a." * 200}"\nc.d = 1\n')
    assert read_config_file(path) == {"a": [0.5] * 200, "b": "a." * 200, "c": {"d": 1}}
