"""Runs: what is counted, what is kept, and how they end."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyattn.contract import AttentionRequest
from polyattn.errors import BackendUnavailableError, ConfigError
from polyattn.testing import Case
from polyattn.testing.fuzz import AUTOMATIC, Drawn, Failure, Report, Verdict, draw, fuzz, running, shrinking
from polyattn.testing.fuzz.drawing import LONGEST, SHORT, scores
from polyattn.testing.fuzz.running import COSTLY, KEPT, RARE
from polyattn.testing.planted import NO_BUG, planted


def test_a_run_is_counted() -> None:
    with planted(NO_BUG) as backend:
        report = fuzz([backend, "reference"], seed=4, calls=60)
    assert report.ok
    assert report.backends == (backend, "reference")
    assert report.drawn == 60
    for name in report.backends:
        assert report.compared[name] + report.rejected[name] + report.refused[name] == report.drawn
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
    backends = fuzz(seed=0, calls=1).backends
    assert tuple(name or AUTOMATIC for name in asked) == backends
    assert backends[0] == AUTOMATIC
    assert {"torch_sdpa", "torch_native", "flex_attention", "reference"} <= set(backends)


def test_failures_are_kept_small_and_few(tmp_path: Path) -> None:
    with planted("zeros") as backend:
        seen: list[int] = []
        report = fuzz([backend], seed=0, calls=40, out=tmp_path / "deep" / "er", tell=lambda r: seen.append(r.drawn))
        assert seen == list(range(1, 41))
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
        found = fuzz([backend], seed=0, calls=40, first=True).failures[0]
        again = fuzz([backend], seed=0, seconds=0.001, number=found.number)
    assert again.drawn == 1
    assert again.failures == [found]


def test_nothing_is_left_behind_where_nothing_failed(tmp_path: Path) -> None:
    with planted(NO_BUG) as backend:
        assert fuzz([backend], seed=0, calls=10, out=tmp_path / "scripts").ok
    assert not list(tmp_path.iterdir())
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "mine.py").touch()
    assert fuzz(["reference"], seed=0, calls=2, out=tmp_path / "scripts").ok
    assert [path.name for path in (tmp_path / "scripts").iterdir()] == ["mine.py"]


def test_an_interrupt_leaves_nothing_behind_either(tmp_path: Path) -> None:
    def interrupt(report: Report) -> None:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        fuzz(["reference"], seed=0, calls=2, out=tmp_path / "scripts", tell=interrupt)
    assert not list(tmp_path.iterdir())
    assert torch.get_num_threads() == threads


CRASH = """
import os
from pathlib import Path
from polyattn.testing.fuzz import fuzz
def tell(report):
    if report.drawn == 4:
        os._exit(9)

fuzz(["reference"], seed=6, calls=5, out=Path("scripts"), tell=tell)
"""


def test_a_crash_leaves_the_call_behind(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH], cwd=tmp_path, check=False)
    assert done.returncode == 9
    assert (tmp_path / "scripts" / "running").read_text().startswith("seed 6, number 3, backend reference, ")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_seconds_that_are_none(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"seconds=.* must be a number above 0; 60 is usual"):
        fuzz(["reference"], seconds=seconds)


@pytest.mark.parametrize("calls", [0, -1, 2.5, True, "9"])
def test_calls_that_are_none(calls: Any) -> None:
    said = rf"calls={re.escape(repr(calls))} must be a whole number of at least 1; None ends by the time"
    with pytest.raises(ConfigError, match=said):
        fuzz(["reference"], calls=calls)


def test_one_call_is_not_so_many() -> None:
    with pytest.raises(ConfigError, match=r"calls=3 and number=0: a number is one call; give one of the two"):
        fuzz(["reference"], calls=3, number=0)


def test_backends_and_devices_that_are_none() -> None:
    with pytest.raises(BackendUnavailableError, match=r"no backend 'referense' is registered for cpu\. Did you mean"):
        fuzz(["referense"])
    with pytest.raises(ConfigError, match="no device of torch"):
        fuzz(["reference"], device="acme")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Under a clock of the test, calls of `slow(torch_sdpa=0.4, ...)` take so many seconds and always agree."""

    def use(**seconds: float) -> None:
        now = [0.0]

        def judged(drawn: object, backend: str, device: torch.device) -> Verdict:
            now[0] += seconds[backend]
            return Verdict("agreed")

        monkeypatch.setattr(running, "judge", judged)
        monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now[0]))

    return use


UNEQUAL = {"torch_sdpa": 0.4, "reference": 0.002, "torch_native": 0.002}


def test_a_backend_that_takes_long_leaves_the_others_their_time(slow: Callable[..., None]) -> None:
    slow(**UNEQUAL)
    report = fuzz(list(UNEQUAL), seed=0, seconds=5)
    assert report.seconds == pytest.approx(5.2, abs=0.2)
    assert report.spent["torch_sdpa"] < 0.75 * report.seconds
    assert report.compared["reference"] == report.compared["torch_native"] == report.drawn
    assert report.compared["torch_sdpa"] < report.drawn / 5


def test_so_many_calls_are_made_however_long_they_take(slow: Callable[..., None]) -> None:
    slow(**UNEQUAL)
    report = fuzz(list(UNEQUAL), seed=0, seconds=5, calls=60)
    assert report.drawn == 60
    assert dict(report.compared) == dict.fromkeys(UNEQUAL, 60), "nobody has a share of the time"
    assert report.seconds == pytest.approx(60 * sum(UNEQUAL.values()))


@pytest.mark.parametrize("given", [{"calls": 1}, {"number": 0}])
def test_without_a_time_a_failure_is_made_smaller_to_the_end(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int]
) -> None:
    """On a slow machine too: here each look at the clock is a minute later."""
    with planted("zeros") as backend:
        found = fuzz([backend], seed=0, calls=40, first=True).failures[0]
        large, looks = draw(0, found.number), itertools.count(0, 60)
        monkeypatch.setattr(running, "draw", lambda seed, number: large)
        monkeypatch.setattr(shrinking, "time", SimpleNamespace(monotonic=lambda: next(looks)))
        whole, hurried = (fuzz([backend], first=True, **how).failures[0] for how in (given, {}))  # type: ignore[arg-type]
    assert whole.drawn == found.drawn != large
    assert hurried.drawn == large, "its time was up at once"


def test_a_seed_and_a_count_are_one_run() -> None:
    with planted("zeros") as backend:
        one, other = (fuzz([backend, "reference"], seed=2, calls=30) for _ in range(2))
    assert not one.ok
    assert {**one.to_dict(), "seconds": 0} == {**other.to_dict(), "seconds": 0}


# --- long calls


def test_long_calls_are_drawn_up_to_3000_keys() -> None:
    cases = [draw(0, number).case for number in range(3000)]
    long = [case for case in cases if case.longest[1] > SHORT]
    assert 0.05 < len(long) / len(cases) < 0.2
    assert max(case.longest[1] for case in long) > 2500
    assert all(max(case.longest) <= LONGEST for case in long)
    assert max(scores(case) for case in cases) < 2**25, "a reference that holds few of them at a time has done soon"
    assert {case.request.family for case in long} == {"dense", "varlen", "paged", "mla"}
    windowed = [case for case in long if case.request.window[0] > 0]
    assert any(case.request.window[0] % 64 not in (0, 63) and case.request.window[0] > 64 for case in windowed)
    assert {case.logits for case in cases} == {"usual", "late", "low", "high"}
    assert any(case.far and case.request.grad for case in cases)
    assert any(case.request.grad for case in long)


def test_costly_calls_are_rare_on_a_cpu_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Drawn] = []

    def ask(drawn: Drawn, backend: str | None, device: torch.device) -> Verdict:
        asked.append(drawn)
        return Verdict("agreed" if not drawn.wrong else "rejected")

    monkeypatch.setattr(running, "judge", ask)
    fuzz(["reference"], seed=0, calls=300)
    costly = [number for number in range(3000) if scores(draw(0, number).case) > COSTLY]
    made = [number for number, drawn in enumerate(draw(0, number) for number in range(3000)) if drawn in asked]
    assert len(asked) == len(made) == 300
    assert {number for number in costly if number in made} == {n for n in costly if n % RARE == 0 and n <= max(made)}
    left_out = next(number for number in costly if number % RARE)
    fuzz(["reference"], seed=0, number=left_out)
    assert asked[-1] == draw(0, left_out)


def test_what_became_of_calls_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        0: Verdict("agreed"),
        1: Verdict("refused"),
        2: Verdict("failed", Failure("out", "wrong")),
        3: Verdict("failed", Failure("call", "raised IndexError: no")),
    }
    counted = iter(range(100))
    monkeypatch.setattr(running, "judge", lambda drawn, backend, device: said[next(counted) % 4])
    monkeypatch.setattr(running, "_smallest", lambda drawn, failure, *given: (drawn, failure))
    fine = Drawn(Case(request=AttentionRequest(), lengths=((3, 77),)))
    monkeypatch.setattr(running, "draw", lambda seed, number: fine)
    report = fuzz(["reference"], seed=0, calls=10, first=True)
    name = "reference"
    assert (report.compared[name], report.disagreed[name], report.raised[name], report.refused[name]) == (2, 1, 0, 1)
    assert report.longest[name] == 77
    monkeypatch.setattr(running, "judge", lambda drawn, backend, device: said[3])
    report = fuzz(["reference"], seed=0, calls=10, first=True)
    assert (report.compared[name], report.raised[name]) == (0, 1)
    monkeypatch.setattr(running, "draw", lambda seed, number: Drawn(fine.case, "scale nan"))
    monkeypatch.setattr(
        running, "judge", lambda drawn, backend, device: Verdict("failed", Failure("served", "answered"))
    )
    report = fuzz(["reference"], seed=0, calls=10, first=True)
    assert (report.compared[name], report.accepted[name]) == (0, 1)


def test_a_device_that_answers_no_more_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "lost", lambda device: True)
    with planted("zeros") as backend:
        report = fuzz([backend, "reference"], seed=0, calls=40)
    assert re.fullmatch(rf"number \d+ of {backend}: .*", report.lost)
    assert not report.ok
