"""`polyattn tune`: what is measured, what is kept, and what can be done with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyattn
from polyattn import tuning
from polyattn.bench.measure import Clock
from polyattn.bench.tuner import offline as tuner
from polyattn.cli import request_words, tune
from polyattn.contract import AttentionRequest
from polyattn.registry.manager import reset_manager
from polyattn.selection.tuned_policy import tuning_place
from polyattn.tuning.predicted import Rates

from .conftest import Run

DENSE = "dtype=fp32 heads=2 head_dim=32 causal q=64 k=64 batch=2"
PAGED = "family=paged phase=decode dtype=bf16 heads=4 kv_heads=2 head_dim=64 page_size=16 batch=3 k=100"


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "tuning.sqlite3"))
    monkeypatch.delenv("POLYATTN_TUNING", raising=False)
    monkeypatch.setenv("POLYATTN_PLUGINS", "")
    monkeypatch.setattr(tuner, "Clock", lambda device: Clock(device, 0.001))
    reset_manager()
    tuning.reload()
    yield
    monkeypatch.undo()
    reset_manager()
    tuning.reload()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--export", "tuning.sqlite3"), "--export tuning.sqlite3 would replace a tuning store; name another file"),
        (("--import", "tuning.sqlite3"), "--import tuning.sqlite3: this is a tuning store, which goes to --merge"),
        (("--merge", "e.json"), "--merge e.json: this is no tuning store; what --export wrote goes to --import"),
        (("--merge", "none.sqlite3"), "there is no store none.sqlite3"),
        (("--request", "k=64 dtype=float99"), "--request 'k=64 dtype=float99': --dtype 'float99' is not known."),
        (("--request", DENSE, "--device", "cuda"), "--device cuda: torch has no such device here: "),
        (
            ("--request", DENSE, "--device", "cpu:7"),
            "--device cpu:7: torch has no such device here: it has one cpu, named cpu",
        ),
        (("--request", DENSE, "--device", "zpu"), "--device zpu: torch has no such device here: it has cpu"),
    ],
)
def test_what_is_given_for_something_else_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert run("tune", "--request", DENSE, "--rounds", "1", "--json").code == 0
    assert run("tune", "--export", "e.json").code == 0
    before = Path("tuning.sqlite3").read_bytes()
    found = run("tune", *words)
    assert found.code == 2
    assert said in " ".join(found.err.split())
    assert Path("tuning.sqlite3").read_bytes() == before


def test_it_ends_in_order_when_a_scheduler_ends_it(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
from polyattn.cli import app
from polyattn.bench.tuner import offline as tuner

def tune_all(*args, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    yield

tuner.tune_all = tune_all
sys.exit(app.run(sys.argv[1:]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "tune", "--request", DENSE],
        timeout=1800,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (143, "")


def test_requests_in_words_are_measured_and_shown(run: Run) -> None:
    data = run("tune", "--request", DENSE, "--request", PAGED, "--rounds", "1", "--json").data
    dense, paged = data["workloads"]
    assert data["store"].endswith("tuning.sqlite3")
    assert dense["lengths"] == [[64, 64]] * 2
    assert paged["lengths"] == [[1, 100]] * 3
    assert (dense["outcome"], dense["rule"]) == ("measured", "torch_sdpa")
    assert set(dense["times"]) == {"torch_sdpa", "torch_native", "reference"}
    assert dense["times"][dense["best"]] <= tuning.SAME * min(dense["times"].values())
    assert dense["host"] == {}

    said = run("tune", "--request", DENSE)
    assert said.code == 0
    text = " ".join(said.out.split())
    assert f"known: {dense['best']}" in text
    assert "requests 1 known" in text
    shown = " ".join(run("tune", "--show").out.split())
    assert "of backends 2" in shown
    assert "paged, bfloat16" in shown
    kept = run("tune", "--show", "--json").data
    assert {row["value"]["backend"] for row in kept["measurements"]} == {dense["best"], paged["best"]}
    assert kept["quarantined"] == []


def test_what_the_host_takes_longer_for_is_shown(run: Run) -> None:
    place, request = tuning.Place("chip", "sm90"), AttentionRequest(s_relation="one")
    times, host = {"quick": 27.3, "plain": 28.8}, {"quick": 180.0, "plain": 20.0}
    tuning.record(tuning.backend_row(place, request, (2, 1, 8192), times, "a test", host=host, rule="plain"))
    shown = " ".join(run("tune", "--show").out.replace("│", " ").split())
    assert "plain 28.8 us" in shown
    said = tune._took(times, host, "quick"), tune._took(times, host, "plain")
    assert said == ("27.3 us, 180 us of the host", "28.8 us")


def test_explain_says_what_was_measured(run: Run) -> None:
    data = run("tune", "--request", DENSE, "--rounds", "1", "--json").data["workloads"][0]
    said = run("explain", "--dtype", "fp32", "--heads", "2", "--head-dim", "32", "--causal", "--json").data
    assert (said["backend"], said["source"]) == (data["best"], "tuned")
    assert "measured today" in said["why"]


def test_who_is_quarantined_is_shown_and_released(run: Run) -> None:
    request = AttentionRequest(dtype="float32")
    held = tuning.Quarantined(
        tuning_place("cpu"), "torch_sdpa", tuning.request_key(request), "crashed: SIGSEGV", "2026-01-02"
    )
    tuning.quarantine(held)
    shown = " ".join(run("tune", "--show").out.split())
    assert "torch_sdpa is quarantined" in shown
    assert "crashed: SIGSEGV" in shown
    assert run("tune", "--show", "--json").data["quarantined"][0]["backend"] == "torch_sdpa"
    assert "torch_sdpa is quarantined" in " ".join(run("explain", "--dtype", "fp32", "--heads", "1").out.split())
    assert run("tune", "--release", "torch_sdpa", "--json").data == {"released torch_sdpa": 1}
    assert run("tune", "--release", "all", "--json").data == {"released all": 0}
    assert polyattn.explain(request).backend == "torch_sdpa"


def test_who_is_quarantined_is_not_said_to_serve(run: Run) -> None:
    """As one that is fast at these lengths, and crashed at others."""
    (first,) = run("tune", "--request", DENSE, "--rounds", "1", "--json").data["workloads"]
    (row,) = tuning.store().rows()

    def hold(name: str) -> None:
        tuning.quarantine(tuning.Quarantined(row.place, name, row.key["request"], "crashed", "2026-01-02"))

    def chosen() -> str:
        return " ".join(run("tune", "--show").out.replace("│", "").split()).partition(" us")[0].split()[-2]

    assert chosen() == first["best"]
    order = list(first["times"])
    hold(order[0])
    (known,) = run("tune", "--request", DENSE, "--json").data["workloads"]
    assert (known["outcome"], known["best"], list(known["times"])) == ("known", order[1], order[1:])
    assert chosen() == order[1]
    for name in order[1:]:
        hold(name)
    assert " nobody " in " ".join(run("tune", "--show").out.split())
    (last,) = run("tune", "--request", DENSE, "--json").data["workloads"]
    assert (last["outcome"], last["times"]) == ("alone", {})


def test_a_pool_that_does_not_fit_ends_its_request_only(run: Run) -> None:
    """On a CPU the system refuses it: more bytes than addresses have bits for."""
    much = "family=paged phase=decode heads=4096 kv_heads=4096 head_dim=256 page_size=16 batch=16 k=2097152"
    told = run("tune", "--request", much, "--request", DENSE, "--rounds", "1", "--json")
    refused, measured = told.data["workloads"]
    assert (told.code, refused["outcome"], measured["outcome"]) == (0, "refused", "measured")
    assert refused["quarantined"] == []


def test_the_name_of_who_is_released_is_checked(run: Run) -> None:
    held = tuning.Quarantined(tuning_place("cpu"), "gone", tuning.request_key(AttentionRequest()), "hung", "2026-01-02")
    tuning.quarantine(held)
    refused = run("tune", "--release", "torch_spda")
    assert refused.code == 4
    text = " ".join(refused.err.split())
    assert "--release: no backend is named 'torch_spda'. Did you mean 'torch_sdpa'" in text
    assert "`polyattn tune --show` shows who is quarantined; all releases all" in text
    assert run("tune", "--release", "torch_sdpa", "--json").data == {"released torch_sdpa": 0}
    assert run("tune", "--release", "gone", "--json").data == {"released gone": 1}, "of a package that is not here"


def test_who_was_released_is_measured_again(run: Run) -> None:
    (asked,) = run("tune", "--request", DENSE, "--rounds", "1", "--json").data["workloads"]
    (row,) = tuning.store().rows()
    name, key = "torch_native", row.key["request"]
    tuning.quarantine(tuning.Quarantined(row.place, name, key, "crashed", "2026-01-02"))
    (without,) = run("tune", "--request", DENSE, "--again", "--rounds", "1", "--json").data["workloads"]
    assert set(asked["times"]) - set(without["times"]) == {name}
    assert run("tune", "--release", name).code == 0
    (again,) = run("tune", "--request", DENSE, "--rounds", "1", "--json").data["workloads"]
    assert again["outcome"] == "measured"
    assert set(again["times"]) == set(asked["times"])


def test_what_was_measured_anew_replaces_a_row_of_the_future(run: Run) -> None:
    run("tune", "--request", DENSE, "--rounds", "1")
    data = tuning.store().export()
    data["measurements"][0]["date"] = "2999-01-01T00:00:00+00:00"
    Path("future.json").write_text(json.dumps(data))
    run("tune", "--import", "future.json")
    assert tuning.store().rows()[0].date.startswith("2999")
    (again,) = run("tune", "--request", DENSE, "--again", "--rounds", "1", "--json").data["workloads"]
    (row,) = tuning.store().rows()
    assert not row.date.startswith("2999")
    assert row.value["times"] == again["times"]


def test_an_exported_table_keeps_the_rates_of_devices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the file had, and those that plugins ship of the device that was measured."""
    lite, own = {"matmul": 350, "read": 3200, "units": 48}, {"matmul": 1, "read": 40, "units": 2}
    run("tune", "--request", DENSE, "--rounds", "1")
    (row,) = tuning.store().rows()
    shipped = {row.place.device: Rates(**own), "another": Rates(**own)}
    monkeypatch.setattr(tune, "shipped_rates", lambda: shipped)
    run("tune", "--export", "table.json")
    data = json.loads(Path("table.json").read_text())
    assert data["rates"] == {row.place.device: own}
    Path("table.json").write_text(json.dumps({**data, "rates": {row.place.device: lite, "Lite": lite}}))
    run("tune", "--export", "table.json")
    again = json.loads(Path("table.json").read_text())
    assert again == {**data, "rates": {row.place.device: lite, "Lite": lite}}
    assert run("tune", "--import", "table.json").code == 0
    Path("table.json").write_text(json.dumps({**data, "rates": {"Lite": {"matmul": 0}}}))
    said = run("tune", "--export", "table.json")
    assert said.code == 2
    assert "--export table.json: the rates of Lite are" in " ".join(said.err.split())


@pytest.mark.parametrize(
    "words",
    [
        ("--import", "kept.json"),
        ("--merge", "kept.sqlite3"),
        ("--release", "torch_sdpa"),
        ("--release", "all"),
        ("--request", DENSE),
    ],
)
def test_what_cannot_be_kept_is_no_success(run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    run("tune", "--request", DENSE, "--rounds", "1")
    run("tune", "--export", "kept.json")
    Path("tuning.sqlite3").replace("kept.sqlite3")
    monkeypatch.setenv("POLYATTN_TUNING_STORE", "kept.json/tuning.sqlite3")
    monkeypatch.setattr(tuner, "measure", None)
    tuning.reload()
    refused = run("tune", *words)
    assert refused.code == 2
    assert "measurements cannot be written to kept.json/tuning.sqlite3" in " ".join(refused.err.split())
    assert refused.out == ""


def test_what_is_kept_goes_from_store_to_store(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("tune", "--request", DENSE, "--rounds", "1")
    here = Path("tuning.sqlite3").absolute()
    assert run("tune", "--export", "kept.json", "--json").data == {"exported to kept.json": 1}
    for words in (("--import", "kept.json"), ("--merge", str(here))):
        monkeypatch.setenv("POLYATTN_TUNING_STORE", f"other{words[0]}.sqlite3")
        tuning.reload()
        assert list(run("tune", *words, "--json").data.values()) == [1]
        assert run("tune", *words).out.rstrip().endswith(": 0 of 1"), "what is here is as late"
        assert run("tune", "--request", DENSE, "--json").data["workloads"][0]["outcome"] == "known"
    data = json.loads(Path("kept.json").read_text())
    data["measurements"][0]["value"]["times"]["rm -rf"] = 1.0
    Path("kept.json").write_text(json.dumps(data))
    refused = run("tune", "--import", "kept.json")
    assert refused.code == 2
    assert "no backend 'rm -rf' is registered here" in " ".join(refused.err.split())
    Path("kept.json").write_text("[" * 200_000)
    refused = run("tune", "--import", "kept.json")
    assert refused.code == 2
    assert "kept.json cannot be read as JSON" in " ".join(refused.err.split())


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "nothing to tune: give --from TRACE"),
        (("--request", "heds=3 k=4"), "no word 'heds'. Did you mean 'heads'"),
        (("--request", "heads=3"), "k is missing, the keys of a sequence"),
        (("--request", "k=8 batch=999999999"), "batch is more than 16,777,216 sequences"),
        (("--request", "k=8 grad=sinks"), "the call has no sinks; add --sinks, or leave them out"),
        (("--request", "k=8 mask=bool grad=mask"), "only a mask that is added has a gradient, and this is bool"),
        (("--request", "heads=32 k=4 heads=16"), "heads is given twice"),
        (("--from", os.devnull), f"the trace {os.devnull} cannot be read: it is a device; a regular file is needed"),
        (("--request", "heads=2 k=²"), "k='²' is not a whole number above 0"),
        (("--request", "heads=2 k=" + "9" * 5000), "is not a whole number above 0"),
        (("--request", "head_dim"), "--request: head_dim needs a value, as head_dim=128"),
        (("--request", "k= heads=4"), "--request: k needs a value, as k=4096"),
        (("--request", "k=4 method"), "--request: method needs a value, as method="),
        (("--request", "heads=x k=4"), "heads='x' is not a whole number above 0"),
        (("--request", "softcap=x k=4"), "softcap='x' is not a number"),
        (("--request", "sinks=x k=4"), "sinks='x' is not a switch; allowed: true"),
        (("--request", DENSE, "--isolate", "alway"), "--isolate 'alway'. Did you mean 'always'? Allowed: auto"),
        (("--request", DENSE, "--device", "gpu9"), "--device gpu9: torch has no such device here: it has cpu"),
        (("--request", f"{PAGED} q=7"), "decode has one query per sequence: leave q out, or phase=extend"),
        (("--request", "family=paged q=7 k=64"), "prefill has as many queries as keys: leave q out, or phase=extend"),
        (("--request", DENSE, "--seconds", "0"), "--seconds 0: give a number above 0"),
        (("--request", DENSE, "--seconds", "-1"), "--seconds -1: give a number above 0"),
        (("--request", DENSE, "--seconds", "nan"), "--seconds nan: give a number above 0"),
        (("--import", "missing.json"), "--import missing.json: there is no such file"),
        (("--import", os.curdir), "--import . cannot be read as JSON: [Errno"),
        (("--merge", "missing.sqlite3"), "there is no store missing.sqlite3"),
        (("--export", "missing/kept.json"), "--export missing/kept.json cannot be written: [Errno 2] No such file"),
        (("--request", DENSE, "--export", "kept.json"), "--request and --export exclude one another; run them one"),
        (("--from", "trace.jsonl", "--show"), "--from and --show exclude one another; run them one after another"),
        (("--show", "--release", "all"), "--show and --release exclude one another; run them one after another"),
    ],
)
def test_what_is_wrong_says_so(run: Run, words: tuple[str, ...], message: str) -> None:
    result = run("tune", *words)
    assert result.code == 2
    assert message in " ".join(result.err.split())


@pytest.mark.parametrize("words", [("--show",), ("--export", "kept.json"), ("--request", DENSE)], ids=" ".join)
def test_a_mode_that_is_none_is_refused_whatever_is_done(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("POLYATTN_TUNING", "onlin")
    refused = run("tune", *words)
    assert (refused.code, refused.out) == (2, "")
    said = "POLYATTN_TUNING='onlin' is not known. Did you mean 'online'? Allowed: use, off, online"
    assert said in " ".join(refused.err.split())


def test_every_word_that_needs_a_value_has_an_example() -> None:
    needed = {name for name, kind in request_words._KINDS.items() if kind not in ("switch", "either")}
    assert set(request_words._EXAMPLES) == {*needed, *request_words._LENGTHS}


@pytest.mark.parametrize("words", ["phase=extend q=7 k=64", "phase=extend k=64", "phase=verify q=4 k=64", "q=64 k=64"])
def test_lengths_that_a_phase_can_have(words: str) -> None:
    assert request_words.workload_of(f"family=paged {words}", {}).longest[1] == 64


def test_a_trace_without_requests(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    said = run("tune", "--from", str(empty))
    assert said.code == 2
    assert "no request is in it; `polyattn trace` writes those" in " ".join(said.err.split())


def test_what_is_kept_is_shown_by_pages(run: Run) -> None:
    place, request = tuning_place("cpu"), AttentionRequest(dtype="float32")
    rows = [
        tuning.backend_row(place, request, (1, 64, k), {"reference": 1.0}, "a test") for k in range(1, tune.PAGE + 3)
    ]
    tuning.record(*rows)
    first, last = run("tune", "--show").out, run("tune", "--show", "--page", "2").out
    assert "page 1 of 2: polyattn tune --show --page 2 shows the next, --export writes all" in " ".join(first.split())
    assert first.count("reference 1 us") == tune.PAGE
    assert last.count("reference 1 us") == 2
    assert "of backends 102" in " ".join(last.split())
    assert "shows the next" not in last
    data = [run("tune", "--show", "--json", *words).data for words in ((), ("--page", "2"))]
    assert [(one["page"], one["pages"], len(one["measurements"])) for one in data] == [(1, 2, tune.PAGE), (2, 2, 2)]
    failed = run("tune", "--show", "--page", "3")
    assert (failed.code, "--page 3: 2 is the last page" in failed.err) == (2, True)
