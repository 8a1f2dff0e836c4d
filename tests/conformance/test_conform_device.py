"""The script that runs conformance on an accelerator, here on the CPU: shares, restarts, and the file it writes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "conform_device.py"


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
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--out", str(result)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(result.read_text())
    assert data["ok"] is True
    assert {"device", "date", "versions", "seconds", "level"} <= set(data)
    found = data["backends"]["torch_native"]
    assert found["passed"] > 0
    assert found["refused"] > 40
    assert found["dtypes"] == ["float16"]
    assert found["margins"]
    assert found["digest"]
    last = done.stdout.strip().splitlines()
    assert last[-1].startswith("ok in ")
    assert last[-2].split()[:5] == ["torch_native", str(found["passed"]), str(found["refused"]), "0", "0"]


def given(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"backends": "torch_sdpa,flex_attention", "workers": 3, "timeout": 1.0, **changes})


def test_compiled_backends_are_dealt_to_all_workers(script: ModuleType) -> None:
    shares = script.shares(given())
    assert [(s.backend, s.index, s.of) for s in shares] == [
        ("flex_attention", 0, 3),
        ("flex_attention", 1, 3),
        ("flex_attention", 2, 3),
        ("torch_sdpa", 0, 3),
        ("torch_sdpa", 1, 3),
        ("torch_sdpa", 2, 3),
    ]
    few = [s.of for s in script.shares(given(workers=15)) if s.backend == "torch_sdpa"]
    assert few == [script.PARTS] * script.PARTS


class Processes:
    """Stands in for worker processes: each entry of `plan` is what one of them does."""

    def __init__(self, *plan: dict[str, Any]) -> None:
        self.plan, self.shares = list(plan), []

    def __call__(self, given: argparse.Namespace, share: Any, out: Path) -> tuple[int, str]:
        self.shares.append((share.start, share.stop))
        does = self.plan.pop(0)
        if "trace" in does:
            out.with_suffix(".trace").write_text(json.dumps(does["trace"]))
        if "report" in does:
            out.write_text(json.dumps(does["report"]))
            return 0, ""
        return does.get("code", -11), does.get("said", "Fatal Python error")


def report(script: ModuleType, passed: int, **changes: Any) -> dict[str, Any]:
    counts = {"dense float16": {"passed": passed, "failed": len(changes.get("findings", {}))}}
    blank = script.Report("b", "cuda", "H", "quick", ("float16",), ("dense",), {}, "", "", counts=counts, total=passed)
    for name, value in changes.items():
        setattr(blank, name, value)
    return json.loads(blank.to_json())


def test_a_lost_device_is_left_behind(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The case that took the device is a finding of the first process; a second goes on after it."""
    lost = report(script, 4, findings={"case 5": ["call: an illegal memory access was encountered"]}, lost="case 5")
    processes = Processes({"report": lost}, {"report": report(script, 7)})
    monkeypatch.setattr(script, "launch", processes)
    parts = script.finish(given(), script.Share("b", 0, 1), tmp_path)
    assert processes.shares == [(0, None), (5, None)]
    whole = script.collect(parts)
    assert (whole.passed, whole.failed, whole.lost) == (11, 1, "")
    assert not whole.ok


def test_a_process_that_dies_is_a_finding(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What ran before the deadly case is run again, what comes after it too, the case itself is not."""
    died = {"trace": [5, "deadly case"], "code": -11, "said": "Segmentation fault"}
    processes = Processes(died, {"report": report(script, 5)}, {"report": report(script, 7)})
    monkeypatch.setattr(script, "launch", processes)
    parts = script.finish(given(), script.Share("b", 0, 1), tmp_path)
    assert processes.shares == [(0, None), (0, 5), (6, None)]
    whole = script.collect(parts)
    assert (whole.passed, whole.failed) == (12, 1)
    assert whole.findings == {"deadly case": ["the process died with exit code -11: Segmentation fault"]}


def test_a_process_that_never_started(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "launch", Processes({"code": 1, "said": "BackendUnavailableError: no cuda device"}))
    whole = script.collect(script.finish(given(), script.Share("torch_sdpa", 0, 1), tmp_path))
    assert not whole.ok
    assert whole.findings == {
        "torch_sdpa, share 1 of 1": ["the process died with exit code 1: BackendUnavailableError: no cuda device"]
    }


def test_restarts_have_an_end_and_what_is_left_is_said(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def always_lost(given: argparse.Namespace, share: Any, out: Path) -> tuple[int, str]:
        out.write_text(json.dumps(report(script, 0, findings={f"case {share.start}": ["call: lost"]}, lost="x")))
        return 0, ""

    monkeypatch.setattr(script, "launch", always_lost)
    whole = script.collect(script.finish(given(), script.Share("b", 0, 1), tmp_path))
    assert whole.failed == script.RESTARTS + 1
    assert any(reason.startswith("b, share 1 of 1: given up after") for reason in whole.findings)


def test_a_process_that_hangs(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hangs(*args: Any, timeout: float, **kw: Any) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    asked = given(device="cuda", dtypes="float16", level="quick", per_row=None)
    assert script.launch(asked, script.Share("b", 0, 1), tmp_path / "x.json") == (-1, "it took more than 1 s")


def test_results_become_evidence(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded = []
    monkeypatch.setattr(script, "record", lambda found: recorded.append(found) or tmp_path / f"{found.backend}.json")
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"backends": {"b": report(script, 3)}}))
    assert script.main(["--record", str(result)]) == 0
    assert [found.passed for found in recorded] == [3]
