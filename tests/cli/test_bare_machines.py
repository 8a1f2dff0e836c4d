"""The command where torch is not installed, and where its answer cannot be written: a message and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import importlib.machinery, importlib.metadata, sys

find, version, absent = importlib.machinery.PathFinder.find_spec, importlib.metadata.version, ("torch", "triton")

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in absent else find(name, path, target)

def version_of(name):
    if name in absent:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.machinery.PathFinder.find_spec = find_spec
importlib.metadata.version = version_of
"""
"""What a process runs that has no torch."""
COMMAND = "from polyattn.cli import main\nsys.exit(main(sys.argv[1:]))\n"


def program(code: str, *words: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *words]
    if shell:
        line = ["sh", "-c", f'"$@" {shell}', "sh", *line]
    return subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, "POLYATTN_CONFIG": ""})


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "words",
    [
        ("demo",),
        ("generate", "--model-path", ".", "--prompt", "x"),
        ("tune", "--request", "dtype=bf16"),
        ("verify",),
        ("fuzz", "--seconds", "1"),
        ("bench",),
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_needs_torch_says_so(words: tuple[str, ...]) -> None:
    said = program(WITHOUT + COMMAND, *words)
    assert (said.returncode, said.stdout) == (4, "")
    assert " ".join(said.stderr.split()).startswith(
        f"error: `polyattn {words[0]}` needs torch, which is not installed here: pip install 'torch>=2.11', or the "
        f"build for your device from https://"
    )
    as_json = program(WITHOUT + COMMAND, *words, "--json")
    assert as_json.returncode == 4
    error = json.loads(as_json.stdout)["error"]
    assert error["type"] == "BackendUnavailableError"
    assert "pip install 'torch>=2.11'" in error["message"]


def test_doctor_finds_that_nothing_runs() -> None:
    said = program(WITHOUT + COMMAND, "doctor", "--json")
    assert said.returncode == 4
    found = json.loads(said.stdout)
    assert found["errors"] == [next(problem for problem in found["problems"] if "needs torch" in problem)]
    text = program(WITHOUT + COMMAND, "doctor")
    assert text.returncode == 4
    assert "No problem" not in text.stdout


def test_doctor_finds_that_no_backend_runs() -> None:
    """Torch is here and too old for all."""
    old = "import polyattn.cli.doctor as d, dataclasses\nreal = d.list_backends\n"
    old += "d.list_backends = lambda: [dataclasses.replace(one, status='unavailable') for one in real()]\nimport sys\n"
    said = program(old + COMMAND, "doctor", "--json")
    assert said.returncode == 4
    assert json.loads(said.stdout)["errors"] == [
        "no backend can be used here: the table of backends says what each needs"
    ]


@pytest.mark.parametrize("name", ["attention", "varlen_attention", "paged_attention", "scaled_dot_product_attention"])
def test_a_call_without_torch_says_what_to_install(name: str) -> None:
    code = f"""
import polyattn
try:
    polyattn.{name}
except polyattn.BackendUnavailableError as error:
    print(error)
"""
    said = program(WITHOUT + code)
    assert said.stdout.startswith(f"polyattn.{name} needs torch, which is not installed here: pip install"), said.stderr


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("explain", "--json"), ("--help",)])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_no_traceback(words: tuple[str, ...]) -> None:
    said = program("import sys\n" + COMMAND, *words, shell="> /dev/full")
    assert said.returncode == 1
    assert "error: the answer cannot be written: [Errno 28] No space left on device" in said.stderr
    assert "Traceback" not in said.stderr
    assert "Exception ignored" not in said.stderr


@pytest.mark.slow(keep=2)
@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX closes it")
@pytest.mark.parametrize("shell", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(
    "words, code", [(("list", "--json"), 0), (("explain", "--phase", "x", "--json"), 2), (("doctor",), 0)]
)
def test_a_closed_stream_is_no_traceback(words: tuple[str, ...], code: int, shell: str) -> None:
    said = program("import sys\n" + COMMAND, *words, shell=shell)
    assert (said.returncode, "Traceback" in said.stderr) == (code, False)


@pytest.mark.slow(keep=2)
@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize(
    "words", [("list", "--json"), ("explain", "--phase", "x", "--json"), ("explain", "--phase", "x")]
)
def test_a_reader_that_goes_away_is_no_traceback(words: tuple[str, ...]) -> None:
    """Also while a failure is reported."""
    read, write = os.pipe()
    os.close(read)
    try:
        line = [sys.executable, "-c", "import sys\n" + COMMAND, *words]
        said = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert said.returncode == (1 if "--json" in words else 2)
    assert "Traceback" not in said.stderr
    assert "Exception ignored" not in said.stderr
