"""`polyattn verify`: what it writes, what it refuses to write, and what it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from polyattn.registry.evidence import Evidence
from polyattn.testing import generation

from .conftest import Run
from .test_conform import PLUGIN, WRONG

Plugin = Callable[[str, str], str]


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generation.LEVELS, "quick", 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(generation.LEVELS, "full", 2)  # type: ignore[attr-defined]


def verify(run: Run, folder: Path, *words: str, seconds: str = "0.001") -> tuple[int, str]:
    shown = run("verify", "--device", "cpu", "--backend", "acme", "--seconds", seconds, "--out", str(folder), *words)
    return shown.code, shown.out + shown.err


def test_a_report_and_evidence_to_hand_in(run: Run, plugin: Plugin, tmp_path: Path) -> None:
    plugin("acme", PLUGIN)
    folder = tmp_path / "out"
    code, said = verify(run, folder)
    assert code == 0, said
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*")) == [
        "evidence/acme@cpu.json",
        "report.json",
        "report.md",
    ]
    data = json.loads((folder / "evidence" / "acme@cpu.json").read_text())
    data["sources"] = tuple(data["sources"])
    evidence = Evidence(**data)
    assert (evidence.level, evidence.backend, evidence.xfailed) == ("hardware", "acme", 0)
    assert evidence.passed >= 10
    assert evidence.digest
    assert not (tmp_path / "evidence").exists(), "nothing is written into the plugin's own folder"
    text = (folder / "report.md").read_text()
    assert text.startswith("# Verification on ")
    assert "| `acme` | conforms | " in text
    assert "`evidence/acme@cpu.json`, for `" in text
    assert "## How fast" in text
    assert "Rows as small as they get: the times mean nothing." in text
    assert "short_prefill" in text
    (report,) = json.loads((folder / "report.json").read_text())
    assert report["ok"]
    code, said = verify(run, folder / "report.md" / "below")
    assert code == 2
    assert "Name a folder that can be made, or remove this one" in " ".join(said.split())


def test_what_failed_becomes_no_evidence(run: Run, plugin: Plugin, tmp_path: Path) -> None:
    plugin("acme", WRONG)
    folder = tmp_path / "out"
    code, said = verify(run, folder)
    assert code == 1
    assert "DOES NOT CONFORM" in said
    assert not list((folder / "evidence").iterdir())
    text = (folder / "report.md").read_text()
    assert "| `acme` | **does not conform** | " in text
    assert "none: evidence of acme@cpu is not written: " in text
    assert "FAILED dense-float32-" in text
    assert "Nothing conforms, so nothing was measured." in text


def test_a_quick_run_is_no_evidence(run: Run, plugin: Plugin, tmp_path: Path) -> None:
    plugin("acme", PLUGIN)
    code, said = verify(run, tmp_path / "out", "--quick", "--json")
    assert code == 0, said
    assert json.loads(said)["backends"] == {
        "acme": {"ok": True, "evidence": False, "why_not": "a quick run is no evidence"}
    }


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--device", "cpu", "--backend", "acne"), 2, "--backend 'acne' names no backend of cpu"),
        (("--device", "xpu"), 2, "--device xpu: torch has no such device here: no Intel GPU: "),
        (("--device", "npu:0"), 2, "--device npu:0: torch has no such device here: no Ascend NPU: "),
        (("--device", "mps"), 2, "--device mps: torch has no such device here: no Apple GPU: "),
        (("--device", "xpu"), 2, ". `polyattn doctor` says why"),
        (("--device", "foo"), 2, "--device foo: torch has no such device here: it has cpu"),
        (("--device", "cpu:x"), 2, "--device cpu:x: torch has no such device here: Invalid device string: 'cpu:x'"),
        (("--device", "cpu", "--backend", "intel_amx"), 4, "nothing can be run on cpu: intel_amx: "),
    ],
)
def test_what_cannot_be_verified(words: tuple[str, ...], code: int, reason: str, run: Run, tmp_path: Path) -> None:
    shown = run("verify", *words, "--out", str(tmp_path / "out"))
    assert shown.code == code
    assert reason in " ".join(shown.err.split())
    assert not (tmp_path / "out").exists()


def test_seconds_are_looked_at_before_anything_runs(run: Run, tmp_path: Path) -> None:
    shown = run("verify", "--device", "cpu", "--seconds", "inf", "--out", str(tmp_path / "out"))
    assert shown.code == 2
    assert "--seconds inf: give a finite number of seconds" in shown.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_what_conformed_outlives_the_benchmark(
    run: Run, plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    plugin("acme", PLUGIN)
    seen = []

    def faulty(*_: object, **__: object) -> None:
        seen.append((tmp_path / "out" / "report.md").read_text())
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("polyattn.bench.running.inputs_of", faulty)
    code, said = verify(run, tmp_path / "out", *words)
    assert code == 1
    lost = "The benchmark failed: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert (json.loads(said)["benchmark"] if words else " ".join(said.split())).count(lost) == 1
    assert "The benchmark did not come to its end." in seen[0]
    assert lost in (tmp_path / "out" / "report.md").read_text()
    assert [path.name for path in (tmp_path / "out" / "evidence").iterdir()] == ["acme@cpu.json"]


def test_a_folder_with_something_in_it_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("mine")
    shown = run("verify", "--device", "cpu", "--backend", "torch_native", "--quick", "--out", str(tmp_path))
    assert shown.code == 2
    assert "there is something in it" in " ".join(shown.err.split())
    assert (tmp_path / "report.md").read_text() == "mine"
