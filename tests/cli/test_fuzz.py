"""`polyattn fuzz`."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyattn.testing.fuzz import running
from polyattn.testing.planted import planted

from .conftest import Run


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_failure(run: Run, somewhere: Path) -> None:
    shown = run("fuzz", "--calls", "20", "--backend", "reference", "--seed", "7")
    assert shown.code == 0
    assert re.search(r"^Fuzz +20 calls in \d+ s on cpu", shown.out, re.M)
    assert shown.out.splitlines()[0] == "seed 7"
    assert re.search(r"^reference +[1-9]\d* +0 +0 +0 +\d+ +0 +[\d,]+ *$", shown.out, re.M)
    assert shown.out.rstrip().endswith("No failure.")
    assert not list(somewhere.iterdir())


def test_a_seed_is_found_and_said_first(run: Run) -> None:
    seeds = {run("fuzz", "--calls", "1", "--backend", "reference").out.splitlines()[0] for _ in range(3)}
    assert len(seeds) > 1
    assert all(re.fullmatch(r"seed \d+", seed) for seed in seeds)


def test_without_a_number_of_calls_the_time_ends_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    shown = run("fuzz", "--seconds", "30", "--backend", "reference", "--seed", "7", "--json")
    assert shown.code == 0
    assert 30 <= shown.data["seconds"] <= 35
    assert 0 < shown.data["drawn"] < 30


def test_a_failure_is_written_and_ends_with_1(run: Run, somewhere: Path) -> None:
    with planted("double_sink") as backend:
        shown = run("fuzz", "--calls", "40", "--seed", "1", "--backend", backend, "--backend", "reference")
    assert shown.code == 1
    scripts = sorted((somewhere / "polyattn-fuzz").iterdir())
    assert scripts
    for script in scripts:
        assert str(script.relative_to(somewhere)) in shown.out
    assert re.search(rf"^{backend}  (out|grad \w+): ", shown.out, re.M)
    assert "No failure" not in shown.out


def test_json(run: Run, somewhere: Path) -> None:
    with planted("zeros") as backend:
        shown = run("fuzz", "--calls", "10", "--seed", "1", "--backend", backend, "--out", "here", "--json")
    assert shown.code == 1
    assert list(shown.data)[:2] == ["seed", "device"]
    assert shown.data["seed"] == 1
    assert shown.data["compared"][backend] > 0
    first = shown.data["failures"][0]
    assert Path(first["script"]).parent == Path("here")
    assert Path(first["script"]).is_file()
    again = run("fuzz", "--seed", "1", "--number", str(first["number"]), "--backend", "reference", "--json")
    assert again.code == 0
    assert again.data["drawn"] == 1


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--backend", "referense"], 4, "no backend 'referense' is registered"),
        (["--seconds", "0"], 2, "--seconds 0: give a number above 0"),
        (["--seconds", "-1"], 2, "--seconds -1: give a number above 0"),
        (["--seconds", "inf"], 2, "--seconds inf: give a finite number of seconds"),
        (["--seconds", "soon"], 2, "--seconds 'soon' is not a number"),
        (["--device", "acme"], 2, "--device acme: torch has no such device here: it has cpu"),
        (["--device", "meta"], 2, "--device meta: torch has no such device here: it has cpu"),
        (["--number", "-1"], 2, "--number -1: give 0 or more"),
        (["--calls", "0"], 2, "--calls 0: give 1 or more"),
        (["--calls", "2", "--number", "1"], 2, "--calls 2 and --number 1: a number is one call; give one of the two"),
        (["--out", __file__], 2, "is a file; give a folder"),
    ],
)
def test_wrong_usage(run: Run, words: list[str], code: int, said: str) -> None:
    shown = run("fuzz", *words)
    assert shown.code == code
    assert said in " ".join(shown.err.split())
    if {"--seconds", "--device", "--calls"} & set(words):
        assert shown.out == "", "before the seed is said"


def test_a_folder_that_cannot_be_made_is_said(run: Run, somewhere: Path) -> None:
    Path("file").touch()
    shown = run("fuzz", "--calls", "1", "--out", "file/below")
    assert shown.code == 2
    assert "--out file/below cannot be written ([Errno 20] Not a directory" in " ".join(shown.err.split())
