"""The script that runs conformance on an accelerator, here on the CPU: dealing, restarts, and the file it writes."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from polyattn.contract import AttentionRequest, Requirement
from polyattn.errors import ConfigError
from polyattn.testing import Case, Finding, Outcome, Report, record
from polyattn.testing.machine import versions

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "conform_device.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conform_device", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_run(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["--device", "cpu", "--backends", "torch_native", "--dtypes", "float16", "--per-row", "1", "--workers", "1"]
    words += ["--families", "linear"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--out", str(result)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(result.read_text())
    assert data["ok"] is True
    assert {"device", "date", "versions", "seconds", "level"} <= set(data)
    found = data["backends"]["torch_native"]
    assert found["passed"] > 0
    assert found["refused"] > 5
    assert (found["dtypes"], found["families"]) == (["float16"], ["linear"])
    assert found["margins"]
    assert found["digest"]
    assert found["left"] == []
    last = done.stdout.strip().splitlines()
    assert last[-1].startswith("ok in ")
    assert last[-2].split()[:5] == ["torch_native", str(found["passed"]), str(found["refused"]), "0", "0"]


def given(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"workers": 2, "devices": 1, "timeout": 5.0, "limit": float("inf"), "out": None, "level": "quick", **changes}
    )


def case(number: int) -> Case:
    request = AttentionRequest(
        family="dense", platform="cpu", dtype="float16", heads=1, kv_heads=1, head_dim=8 * number
    )
    return Case(request=request, lengths=((1, 1),))


CASES = [case(number) for number in range(1, 13)]
IDS = [case.id for case in CASES]


class Clock:
    """The time module of a script for which nothing takes time but waiting for a process that hangs: how far it gets
    does not depend on the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Processes:
    """Stands in for worker processes. At the positions of `plan` they `die`, `hang` or `lose` the device, once; other
    cases pass, but those of `wrong`. Processes that are `never` to start say nothing at all."""

    def __init__(
        self, script: ModuleType, plan: dict[int, str], wrong: tuple[int, ...] = (), never: bool = False
    ) -> None:
        self.script, self.plan, self.wrong, self.never, self.started = script, plan, wrong, never, 0
        self.devices: list[int] = []
        self.clock = Clock()

    def __call__(self, given: argparse.Namespace, backend: str, log: Path, index: int) -> tuple[Any, Any]:
        self.started += 1
        self.devices.append(index)
        log.write_text("Traceback\nSegmentation fault\n")
        return Process(), Pipe(self, blank(self.script, backend))


class Process:
    exitcode = -11

    def join(self, seconds: float) -> None: ...

    def kill(self) -> None: ...


class Pipe:
    def __init__(self, processes: Processes, report: Any) -> None:
        self.processes, self.report, self.said, self.alive = processes, report, deque(), not processes.never

    def send(self, positions: list[int]) -> None:
        if not self.alive:
            return
        for position in positions:
            self.said.append(("begins", position))
            does = self.processes.plan.pop(position, "")
            if does in ("die", "hang"):
                self.alive = does == "hang"
                return
            found = (Finding("out", "wrong"),) if position in self.processes.wrong or does else ()
            self.report.add(Outcome(CASES[position], "failed" if found else "passed", found))
            self.report.lost = IDS[position] if does else ""
            self.said.append(("ended", (position, copy.deepcopy(self.report))))
            if does:
                return
        self.said.append(("idle", None))

    def poll(self, seconds: float) -> bool:
        if self.said or not self.alive:
            return True
        self.processes.clock.now += seconds
        return False

    def recv(self) -> Any:
        if not self.said:
            raise EOFError
        return self.said.popleft()


def blank(script: ModuleType, backend: str = "b") -> Any:
    facts = ("cuda", "H", "quick", ("float16",), ("dense",), {"torch": "2"}, "2026-11-22", "")
    return script.Report(backend, *facts, gates={"float16: zeros": True}, total=len(CASES))


def ran(script: ModuleType, folder: Path, job: Any = None, **options: Any) -> Any:
    job = job or script.Job("b", CASES, True, deque(range(len(CASES))))
    run = script.Run(given(**options), [job], folder, script.time.perf_counter(), 0.0)
    run.serve()
    return run


@pytest.fixture
def processes(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Processes]:
    def use(*args: Any, **kw: Any) -> Processes:
        made = Processes(script, *args, **kw)
        monkeypatch.setattr(script, "start", made)
        monkeypatch.setattr(script, "time", made.clock)
        return made

    return use


def test_what_compiles_comes_first_and_is_dealt_in_small_parts(script: ModuleType, tmp_path: Path) -> None:
    few, many = (script.Job(str(n), [], n == 200, deque(range(n))) for n in (1000, 200))
    run = script.Run(given(workers=4), [few, many], tmp_path, 0.0, 0.0)
    dealt = []
    while taken := run.take():
        dealt.append((taken[0].backend, len(taken[1])))
    compiled, other = ([size for name, size in dealt if name == one] for one in ("200", "1000"))
    assert [name for name, _ in dealt] == ["200"] * len(compiled) + ["1000"] * len(other)
    assert (compiled[0], other[0]) == (16, 125)
    assert compiled[-4:] == other[-4:] == [1, 1, 1, 1], "processes end at one time"
    assert (sum(compiled), sum(other)) == (200, 1000)


def test_a_lost_device_is_left_behind(script: ModuleType, processes: Callable[..., Processes], tmp_path: Path) -> None:
    """The case that took the device is a finding of the first process; a second goes on with the others."""
    used = processes({4: "lose"})
    whole = ran(script, tmp_path, devices=2).jobs[0].report()
    assert used.devices == [1, 0], "processes go round the devices"
    assert (whole.passed, whole.failed, whole.lost, whole.complete) == (11, 1, "", True)
    assert list(whole.findings) == [IDS[4]]


@pytest.mark.parametrize(
    ("does", "said"),
    [("die", "the process died with exit code -11: Segmentation fault"), ("hang", "it took more than 5 s")],
)
def test_a_process_that_dies_is_a_finding(
    script: ModuleType, processes: Callable[..., Processes], tmp_path: Path, does: str, said: str
) -> None:
    """What ran before the deadly case is kept, what comes after it is run."""
    used = processes({5: does, 9: does})
    whole = ran(script, tmp_path).jobs[0].report()
    assert used.started == 3
    assert (whole.passed, whole.failed, whole.complete) == (10, 2, True)
    assert whole.findings == {IDS[5]: [f"process: {said}"], IDS[9]: [f"process: {said}"]}
    assert not whole.ok


def test_a_process_that_never_starts(script: ModuleType, processes: Callable[..., Processes], tmp_path: Path) -> None:
    used = processes({}, never=True)
    job = ran(script, tmp_path).jobs[0]
    assert used.started == 2, "as many as there are workers"
    (said,) = job.report().findings["b: given up"]
    assert said == (
        "no process started: the process died with exit code -11: Segmentation fault: 12 cases were not run"
    )
    assert job.left() == IDS


def test_restarts_have_an_end_and_what_is_left_is_said(
    script: ModuleType, processes: Callable[..., Processes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "RESTARTS", 2)
    processes(dict.fromkeys(range(12), "lose"))
    job = ran(script, tmp_path).jobs[0]
    assert job.left() == IDS[3:]
    report = job.report()
    assert report.findings["b: given up"] == ["3 processes died: 9 cases were not run"]
    assert (report.failed, report.complete) == (3, False)


def test_a_limit_leaves_a_result_that_says_what_is_missing_and_is_gone_on_with(
    script: ModuleType, processes: Callable[..., Processes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "stale", lambda report: False)
    monkeypatch.setattr(script, "SAVED", -1.0)  # at every case: the clock stands still
    out = tmp_path / "result.json"
    processes({7: "hang"}, wrong=(2,))
    run = ran(script, tmp_path, limit=script.ENDING + 30.0, timeout=60.0, out=out)
    found = json.loads(out.read_text())["backends"]["b"]
    assert found["left"] == run.jobs[0].left() == IDS[7:], "no finding, it only came too late"
    assert (found["passed"], found["failed"], found["ok"]) == (6, 1, False)
    with pytest.raises(ConfigError, match="evidence of b@cuda is not written: 1 of 7 cases failed"):
        record(Report.from_dict(found))
    with pytest.raises(ConfigError, match=r"5 of 12 cases were not run. Run them too"):
        record(Report.from_dict({**found, "findings": {}}))

    used = processes({})
    again = script.Job("b", CASES, True, deque())
    again.resume(found)
    assert list(again.waiting) == [2, *range(7, 12)], "what failed is run again"
    whole = ran(script, tmp_path, again).jobs[0].report()
    assert used.started == 1
    assert (whole.passed, whole.failed, whole.total, whole.ok) == (12, 0, 12, True)
    assert whole.counts == {"dense float16": {"passed": 12, "failed": 0}}


def test_a_limit_that_ends_before_the_first_case_is_no_failure(
    script: ModuleType, processes: Callable[..., Processes], tmp_path: Path
) -> None:
    processes({0: "hang", 3: "hang"})
    job = ran(script, tmp_path, limit=script.ENDING + 10.0, timeout=60.0, workers=1).jobs[0]
    assert job.left() == IDS
    assert job.report().findings == {}


def test_results_of_other_cases_or_sources_are_not_gone_on_with(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {**blank(script).to_dict(), "plan": "another", "left": IDS, "sources": ["b.py"]}
    job = script.Job("b", CASES, True, deque())
    with pytest.raises(ConfigError, match=r"it is of other cases .*Run without --resume"):
        job.resume(found)
    monkeypatch.setattr(script, "stale", lambda report: True)
    with pytest.raises(ConfigError, match=r"b.py are not what ran on 2026-11-22. Run without --resume"):
        job.resume({**found, "plan": job.plan})


def test_a_result_is_gone_on_with_on_its_own_architecture_and_software(script: ModuleType) -> None:
    needs = Requirement("pytest")
    target = argparse.Namespace(
        device=torch.device("cpu"), providers=[argparse.Namespace(requires=[needs])], facts={"arch": "sm90"}
    )
    own = {**blank(script).to_dict(), "versions": {**versions(target.device), "pytest": pytest.__version__}}
    script._same_machine({**own, "arch": "sm90"}, target)
    with pytest.raises(ConfigError, match=r"the result of b cannot be gone on with: it is of .*'sm100'.* and here is"):
        script._same_machine({**own, "arch": "sm100"}, target)
    with pytest.raises(ConfigError, match="cannot be gone on with"):
        script._same_machine({**own, "arch": "sm90", "versions": {**own["versions"], "pytest": "1.0"}}, target)


def test_a_result_names_each_device_that_it_is_of(script: ModuleType) -> None:
    job = script.Job("b", CASES, True, deque())
    job.broken(3, "the process died")
    for number, device in enumerate(("H", "H", "H 80GB", "H")):
        job.parts[number] = dataclasses.replace(blank(script), device=device)
    assert job.report().device == "H and H 80GB"
    again = script.Job("b", CASES, True, deque())
    again.parts = {0: job.report(), 1: dataclasses.replace(blank(script), device="H 80GB")}
    assert again.report().device == "H and H 80GB"


def test_what_is_printed_ends_with_every_failed_case(
    script: ModuleType,
    processes: Callable[..., Processes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """More of them than a report shows, without a file: a run on a lent machine leaves no more than its output."""
    requests = [dataclasses.replace(CASES[0].request, head_dim=8 * number) for number in range(1, 31)]
    many = [dataclasses.replace(CASES[0], request=request) for request in requests]
    monkeypatch.setattr(sys.modules[__name__], "CASES", many)
    monkeypatch.setattr(sys.modules[__name__], "IDS", [case.id for case in many])
    wrong = tuple(range(2, 30))
    processes({1: "die"}, wrong=wrong)
    monkeypatch.setattr(script, "jobs", lambda given: [script.Job("b", many, True, deque(range(30)))])
    assert script.main(["--workers", "1", "--backends", "b"]) == 1
    said = capsys.readouterr().out.splitlines()
    (verdict,) = [line for line in said if line.startswith("FAILED in ")]
    last = said[said.index(verdict) + 1 :]
    died = f"FAILED b {many[1].id}: process: the process died with exit code -11: Segmentation fault"
    assert sorted(last) == sorted([died, *(f"FAILED b {many[at].id}: out: wrong" for at in wrong)])


def test_to_resume_needs_a_result(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse(["--resume"])
    assert "--resume goes on with the result in --out: name that file too" in capsys.readouterr().err


def test_results_become_evidence(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded = []
    monkeypatch.setattr(script, "record", lambda found: recorded.append(found) or tmp_path / f"{found.backend}.json")
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"backends": {"b": blank(script).to_dict()}}))
    assert script.main(["--record", str(result)]) == 0
    assert [(found.backend, found.total) for found in recorded] == [("b", 12)]
