"""Runs: what is counted, what is kept, and how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polyattn.errors import BackendUnavailableError, ConfigError
from polyattn.testing.fuzz import AUTOMATIC, Report, Verdict, fuzz, running
from polyattn.testing.fuzz.running import KEPT
from polyattn.testing.planted import NO_BUG, planted


def test_a_run_is_counted() -> None:
    with planted(NO_BUG) as backend:
        fuzz([backend], seed=4, number=1)  # a first backward pass loads what later ones find loaded
        report = fuzz([backend, "reference"], seed=4, seconds=4)
    assert report.ok
    assert report.backends == (backend, "reference")
    assert report.drawn > 10
    assert report.seconds >= 4
    for name in report.backends:
        tried = report.compared[name] + report.rejected[name] + report.refused[name]
        assert 0.3 * report.drawn < tried <= report.drawn
        assert report.rejected[name] > 0
    assert set(report.spent) == set(report.backends)
    data = json.loads(json.dumps(report.to_dict()))
    assert list(data) == [
        *("seed", "device", "seconds", "drawn", "compared", "disagreed", "raised", "refused", "rejected", "accepted"),
        *("longest", "failures", "more", "lost", "versions"),
    ]
    assert (data["seed"], data["device"], data["failures"]) == (4, "cpu", [])
    assert data["versions"]["torch"] == torch.__version__


def test_every_backend_of_the_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def ask(drawn: object, backend: str | None, device: torch.device) -> Verdict:
        asked.append(backend)
        return Verdict("agreed")

    monkeypatch.setattr(running, "judge", ask)
    backends = fuzz(seed=0, seconds=0.01).backends
    assert tuple(name or AUTOMATIC for name in asked[: len(backends)]) == backends
    assert backends[0] == AUTOMATIC
    assert {"torch_sdpa", "torch_native", "flex_attention", "reference"} <= set(backends)


def test_failures_are_kept_small_and_few(tmp_path: Path) -> None:
    with planted("zeros") as backend:
        seen: list[int] = []
        report = fuzz([backend], seed=0, seconds=6, out=tmp_path / "deep" / "er", tell=lambda r: seen.append(r.drawn))
        assert seen == list(range(1, report.drawn + 1))
    assert not report.ok
    assert 1 <= len(report.failures) <= KEPT
    assert report.more[backend] >= 1
    paths = [found.path for found in report.failures]
    assert sorted(p for p in (tmp_path / "deep" / "er").iterdir()) == sorted(p for p in paths if p is not None)
    first = report.failures[0].to_dict()
    assert first["backend"] == backend
    assert first["check"] == "out"
    assert first["script"] == str(paths[0])
    assert len({found.drawn for found in report.failures}) == len(report.failures)


def test_one_number_repeats_one_call() -> None:
    with planted("zeros") as backend:
        found = fuzz([backend], seed=0, seconds=3600, first=True).failures[0]
        again = fuzz([backend], seed=0, seconds=0.001, number=found.number)
    assert again.drawn == 1
    assert again.failures == [found]


def test_nothing_is_left_behind_where_nothing_failed(tmp_path: Path) -> None:
    with planted(NO_BUG) as backend:
        assert fuzz([backend], seed=0, seconds=0.5, out=tmp_path / "scripts").ok
    assert not list(tmp_path.iterdir())
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "mine.py").touch()
    assert fuzz(["reference"], seed=0, seconds=0.1, out=tmp_path / "scripts").ok
    assert [path.name for path in (tmp_path / "scripts").iterdir()] == ["mine.py"]


def test_an_interrupt_leaves_nothing_behind_either(tmp_path: Path) -> None:
    def interrupt(report: Report) -> None:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        fuzz(["reference"], seed=0, seconds=5, out=tmp_path / "scripts", tell=interrupt)
    assert not list(tmp_path.iterdir())
    assert torch.get_num_threads() == threads


CRASH = """
import os
from pathlib import Path
from polyattn.testing.fuzz import fuzz
def tell(report):
    if report.drawn == 4:
        os._exit(9)

fuzz(["reference"], seed=6, seconds=60, out=Path("scripts"), tell=tell)
"""


def test_a_crash_leaves_the_call_behind(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH], cwd=tmp_path, check=False)
    assert done.returncode == 9
    assert (tmp_path / "scripts" / "running").read_text().startswith("seed 6, number 3, backend reference, ")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_seconds_that_are_none(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"seconds=.* must be a number above 0; 60 is usual"):
        fuzz(["reference"], seconds=seconds)


def test_backends_and_devices_that_are_none() -> None:
    with pytest.raises(BackendUnavailableError, match=r"no backend 'referense' is registered for cpu\. Did you mean"):
        fuzz(["referense"])
    with pytest.raises(ConfigError, match="no device of torch"):
        fuzz(["reference"], device="acme")


def test_a_backend_that_takes_long_leaves_the_others_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow(drawn: object, backend: str | None, device: torch.device) -> Verdict:
        now[0] += 0.4 if backend == "torch_sdpa" else 0.002
        return Verdict("agreed")

    monkeypatch.setattr(running, "judge", slow)
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = fuzz(["torch_sdpa", "reference", "torch_native"], seed=0, seconds=5)
    assert report.spent["torch_sdpa"] < 0.75 * report.seconds
    assert report.compared["reference"] == report.compared["torch_native"] == report.drawn
    assert report.compared["torch_sdpa"] < report.drawn / 5
