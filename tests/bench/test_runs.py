"""Runs on the CPU, tiny: what is measured, what is kept, what is refused, and how it is shown."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import errno
import json
import math
import subprocess
import sys

import pytest
import torch

from polyattn import tuning
from polyattn.bench import Peer, entries, pages, plots, results, running
from polyattn.bench import measure as measuring
from polyattn.bench.cli_options import BenchOptions
from polyattn.bench.entries import Seen, entries_of
from polyattn.bench.measure import Clock
from polyattn.bench.rows import Row, Work
from polyattn.bench.running import DeviceLost, Plan, ceiling, run
from polyattn.bench.sheets import read
from polyattn.bench.workloads import workload
from polyattn.errors import BackendUnavailableError, ConfigError
from polyattn.registry.manager import get_manager
from polyattn.selection import inspection, overrides
from polyattn.selection.select import Selection
from polyattn.testing.machine import code_digest

CPU = torch.device("cpu")

SHEET = """
title: Made for tests
families:
  prefill:
    kind: dense
    of: {model: Tiny, source: here, heads: 4, kv_heads: 2, head_dim: 32, causal: true, batch: 1}
    rows:
      - {q_len: 48}
      - {q_len: 64}
  step:
    kind: paged
    of: {model: Tiny, source: here, heads: 4, kv_heads: 2, head_dim: 32, q_len: 1, page_size: 16, batch: 2}
    rows:
      - {kv_len: 40}
bars:
  - {name: over the peer, of: [prefill], than: right, geomean: 0.000001}
"""

PEERS = """
import torch
from polyattn.bench import Peer
from polyattn.errors import UnsupportedRequestError


def right(inputs):
    def call(number):
        given = inputs.tensors[number]
        q, k, v = (given[n].transpose(1, 2).float() for n in ("query", "key", "value"))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).to(given["query"].dtype)

    if inputs.workload.request.family != "dense":
        raise UnsupportedRequestError("dense rows only")
    return call


def wrong(inputs):
    return lambda number: torch.zeros_like(inputs.tensors[number]["query"])


def broken(inputs):
    raise KeyError("of the library")


def absent(inputs):
    import no_such_library


PEERS = {name: Peer(f"{__name__}:{name}", name) for name in ("right", "wrong", "broken", "absent")}
PEERS["slow"] = Peer(f"{__name__}:right", "compiled first", compiles=True)
"""


def written(folder):
    """(the sheet, the folder of peers)."""
    (folder / "sheet.yaml").write_text(SHEET)
    (folder / "libraries").mkdir()
    (folder / "libraries" / "__init__.py").write_text(PEERS)
    return folder / "sheet.yaml", folder / "libraries"


def asking(sheet, libraries):
    return BenchOptions(
        (str(sheet),), candidates=("torch_*",), peers=(str(libraries),), device="cpu", quick=True, seconds=0.001
    )


@pytest.fixture
def places(tmp_path):
    return written(tmp_path)


@pytest.fixture
def asked(places):
    return asking(*places)


def begun(asked):
    """(plan, sheet, empty result)."""
    plan, sheet = asked.plan()
    return plan, sheet, results.begin(sheet, plan.device, plan.peers, asked.words(), asked.settings(), quick=plan.quick)


@pytest.fixture(scope="module", autouse=True)
def own_store(tmp_path_factory):
    """What was tuned on this machine before is none of these tests' business."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYATTN_TUNING_STORE", str(tmp_path_factory.mktemp("store") / "tuning.sqlite3"))
        patch.delenv("POLYATTN_TUNING", raising=False)
        tuning.reload()
        yield
    tuning.reload()


@pytest.fixture
def configured():
    """`configured("torch_sdpa")`: that backend is what the environment asks for."""
    with pytest.MonkeyPatch.context() as patch:

        def configure(name):
            patch.setenv("POLYATTN_ATTENTION_BACKEND", name)
            overrides.configure()

        yield configure
    overrides.configure()


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A run of the whole sheet."""
    plan, sheet, result = begun(asking(*written(tmp_path_factory.mktemp("once"))))
    list(run(plan, result, lambda row: None))
    return results.summed(result, sheet, plan.rows)


@pytest.fixture
def done(once):
    return copy.deepcopy(once)


@pytest.fixture(autouse=True)
def no_peers_are_left_behind():
    yield
    sys.modules.pop("polyattn_bench_libraries", None)


def test_every_candidate_and_peer_is_checked_before_it_is_timed(done):
    rows = {row["family"]: row for row in done["rows"]}
    entries = rows["prefill"]["entries"]
    for name in ("polyattn/torch_sdpa", "polyattn/torch_native", "right"):
        assert entries[name]["us"] > 0, name
        assert 0 < entries[name]["margin"] <= 1
        assert entries[name]["rate"] == pytest.approx(
            rows["prefill"]["operations"] / entries[name]["us"] / 1e6, rel=1e-3
        )
    assert entries["polyattn/torch_sdpa"]["served_by"].startswith("torch_sdpa@cpu")
    assert "us" not in entries["wrong"]
    assert entries["wrong"]["kind"] == "wrong"
    assert (entries["broken"]["kind"], entries["broken"]["failed"]) == ("failed", "KeyError: 'of the library'")
    assert entries["absent"]["failed"] == "not here: No module named 'no_such_library'"
    assert entries["slow"] == {"kind": "refused", "failed": "not compiled in a quick run", "peer": True}
    assert rows["step"]["entries"]["right"]["failed"] == "dense rows only"
    assert rows["step"]["unit"] == "GB/s"
    assert {name for name, entry in entries.items() if entry.get("peer")} == set(done["libraries"])


def test_a_result_says_where_it_is_from(done, places):
    assert done["command"].startswith("polyattn bench ")
    assert "--candidates 'torch_*'" in done["command"]
    assert done["sheets"] == dict(read([places[0]]).digests)
    assert done["versions"]["torch"] == torch.__version__
    assert done["rows"][0]["choice"] == dict.fromkeys(("tuned", "shipped", "unseen", "rules"), "polyattn/torch_sdpa")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    assert {row["date"] for row in done["rows"]} <= {done["date"], today}
    assert {row["code"] for row in done["rows"]} == {code_digest()}
    assert len(code_digest()) == 12
    assert json.loads(json.dumps(done)) == done


def test_a_killed_run_goes_on(asked, tmp_path):
    plan, sheet, result = begun(asked)
    out = tmp_path / "result.json"
    results.save(results.summed(next(run(plan, result, lambda row: None)), sheet, plan.rows), out)
    (first,) = results.load(out)["rows"]
    so_far = results.summed({**results.load(out), "quick": False}, sheet, plan.rows)
    assert so_far["verdicts"][0]["verdict"] == "incomplete"
    plan, sheet, again = begun(dataclasses.replace(asked, limit=7200.0))
    again = results.resumed(again, out)
    told = []
    list(run(plan, again, lambda row: told.append(row["name"])))
    assert len(told) == 2
    assert again["rows"][0] == first, "what was measured is kept as it is"
    assert again["command"].count("polyattn bench") == 2


@pytest.mark.slow
def test_rows_are_measured_once_more_where_that_is_asked_for(asked, done, tmp_path):
    out = tmp_path / "result.json"
    results.save({**done, "parts": [{"rows": 3, "anchors": {}}]}, out)
    plan, sheet, now = begun(dataclasses.replace(asked, rows=(done["rows"][0]["family"],), again=True))
    result = results.resumed(now, out)
    told = []
    list(run(plan, result, lambda row: told.append(row["name"])))
    assert told == [row.name for row in plan.rows], "each of them once"
    every = [row for family in sheet.families for row in family.rows]
    result = results.summed(result, sheet, every)
    assert [row["name"] for row in result["rows"]] == [row["name"] for row in done["rows"]], "in the order of the sheet"
    assert result["rows"][-1] == done["rows"][-1], "what was not asked for is kept"
    assert result["rows"][0]["entries"]["right"] != done["rows"][0]["entries"]["right"]
    assert [row.get("replaced") for row in result["rows"]] == [1] * len(plan.rows) + [None]
    assert result["parts"] == [{"rows": 3, "anchors": {}}]
    assert "--again" in result["command"]


def test_rows_that_changed_in_the_sheet_are_measured_again(asked, places, done):
    sheet = places[0]
    plan, _, result = begun(asked)
    result["rows"] = done["rows"]
    assert not list(run(plan, result, lambda row: None)), "nothing is left to do"
    sheet.write_text(SHEET.replace("q_len: 64", "q_len: 65"))
    plan, _, _ = begun(asked)
    told = []
    list(run(plan, result, lambda row: told.append(row["name"])))
    assert told == ["d32 H4 kv2 B1 S65"]
    changed = read([sheet])
    result = results.summed(result, changed, [row for family in changed.families for row in family.rows])
    assert [row["name"] for row in result["rows"] if row.get("gone")] == ["d32 H4 kv2 B1 S64"]
    assert result["rows"][-1]["name"] == "d32 H4 kv2 B1 S64", "behind those that the sheet has"
    assert "| d32 H4 kv2 B1 S64 (its sheet has it no more) |" in pages.markdown(result)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("versions", {"polyattn": "0.0.1"}, "versions of .* differs from what is here .polyattn: 0.0.1 there, "),
        ("device", "another", "device of .* differs from what is here .another there, "),
        ("quick", False, "quick of .* differs"),
        (
            "settings",
            {"seconds": 0.1},
            "settings of .* differs from what is here .seconds: 0.1 there, 0.001 here, tune",
        ),
    ],
)
def test_rows_measured_elsewhere_are_not_put_into_one_file(asked, done, tmp_path, name, value, said):
    out = tmp_path / "result.json"
    results.save({**done, name: value}, out)
    _, _, now = begun(asked)
    with pytest.raises(ConfigError, match=said):
        results.resumed(now, out)


def test_times_of_another_statistic_are_not_put_into_one_file(asked, done, tmp_path):
    """Results from before said nothing of it: the median of the rounds counted."""
    assert done["settings"]["of_rounds"] == "interquartile mean"
    out = tmp_path / "result.json"
    settings = {name: value for name, value in done["settings"].items() if name != "of_rounds"}
    results.save({**done, "settings": settings}, out)
    _, _, now = begun(asked)
    with pytest.raises(ConfigError, match=r"settings of .* differs .*of_rounds: .* there, interquartile mean here"):
        results.resumed(now, out)


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = tmp_path / "result.json"
    for text, said in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"us": NaN}', "NaN is no number"),
        ("[]", "is no result"),
        ('{"benchmark": "dispatch"}', "is no result"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            results.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        results.load(tmp_path / "none.json")


def test_a_result_must_be_whole(done, tmp_path):
    """What is made here is what is asked for, and what is missing is named."""
    assert {"benchmark", "format", *results.HEAD} == set(done)
    assert set(results.ROW) <= set(done["rows"][0])
    path = tmp_path / "result.json"
    rows = done["rows"]
    timed = next(name for name, entry in rows[0]["entries"].items() if "us" in entry)

    def row(**changed):
        entries = {**rows[0]["entries"], timed: {**rows[0]["entries"][timed], **changed.pop("entry", {})}}
        return {**done, "rows": [{**rows[0], "entries": entries, **changed}]}

    def verdict(**changed):
        said = {"bar": "b", "asked": "a", "verdict": "missed", "rows": 1, "missing": [], "least": 0.5}
        return {**done, "verdicts": [{**said, **changed}]}

    path.write_text(json.dumps(verdict(below={"limit": 1, "rows": {"a": 0.5}})))
    results.load(path)
    for given, said in (
        (row(entry={"us": "x"}), f"us of {timed} of row 0 is 'x', which is no float. Name another file"),
        (row(entry={"rate": True}), f"rate of {timed} of row 0 is 'True', which is no float"),
        (row(anchors={"copy": []}), r"copy of anchors of row 0 is '\[\]', which is no float"),
        (row(choice={"tuned": 3}), "tuned of choice of row 0 is '3', which is no str"),
        (row(entries=[]), r"entries of row 0 is '\[\]', which is no dict"),
        (row(entry={"peak_bytes": "x"}), f"peak_bytes of {timed} of row 0 is 'x', which is no int"),
        (row(entry={"failed": ["x"]}), f"failed of {timed} of row 0 is "),
        (row(apart="x"), "apart of row 0 is 'x', which is no float"),
        (row(note=3), "note of row 0 is '3', which is no str"),
        (row(code=[]), r"code of row 0 is '\[\]', which is no str"),
        (row(replaced="x"), "replaced of row 0 is 'x', which is no int"),
        ({**done, "parts": {}}, "parts is '{}', which is no list"),
        ({**done, "parts": [3]}, "is not whole: anchors of part 0 is missing"),
        ({**done, "parts": [{"anchors": 3}]}, "anchors of part 0 is '3', which is no dict"),
        ({**done, "parts": [{"anchors": {"read": "x"}}]}, "read of anchors of part 0 is 'x', which is no float"),
        ({**done, "verdicts": {}}, "verdicts is '{}', which is no list"),
        ({**done, "verdicts": [3]}, "is not whole: bar, asked, verdict, rows, missing of verdict 0 is missing"),
        (verdict(rows="x"), "rows of verdict 0 is 'x', which is no int"),
        (verdict(missing=3), "missing of verdict 0 is '3', which is no list"),
        (verdict(bar=[]), r"bar of verdict 0 is '\[\]', which is no str"),
        (verdict(geomean="x"), "geomean of verdict 0 is 'x', which is no float"),
        (verdict(below=3), "below of verdict 0 is '3', which is no dict"),
        (verdict(below={"limit": 1}), "is not whole: rows of below of verdict 0 is missing"),
        (verdict(below={"limit": "x", "rows": {}}), "limit of below of verdict 0 is 'x', which is no float"),
        (verdict(below={"limit": 1, "rows": {"a": "x"}}), "a of rows of below of verdict 0 is 'x', which is no float"),
        ({"benchmark": pages.BENCHMARK, "format": results.FORMAT}, "is not whole: command, date, device, versions, "),
        ({**done, "rows": {}}, "rows is no list: name another file"),
        ({**done, "rows": [rows[0], 3]}, "is not whole: date, sheet, family, .*, choice of row 1 is missing"),
        (
            {**done, "rows": [{name: value for name, value in rows[0].items() if name not in ("moved", "entries")}]},
            "is not whole: moved, entries of row 0 is missing. Name another file, or measure again",
        ),
    ):
        path.write_text(json.dumps(given))
        with pytest.raises(ConfigError, match=said):
            results.load(path)


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        results.save({"rows": object()}, path)
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


# ---------------------------------------------------------------------------------------------------- the device

RATES = {"matmul": 700.0, "copy": 4200.0, "read": 4600.0}


class Looks:
    """`Anchors` whose looks find what is given."""

    def __init__(self, clock, factors):
        self.clock, self.factors = clock, iter(factors)

    def __call__(self):
        factor = next(self.factors)
        return {name: rate * factor for name, rate in RATES.items()}


def looks(monkeypatch, *factors):
    """What looks at the device find, one after another."""
    monkeypatch.setattr(running, "Anchors", lambda clock: Looks(clock, factors))


def test_a_row_over_which_the_device_changed_is_measured_again(asked, monkeypatch):
    plan, sheet, result = begun(asked)
    plan = dataclasses.replace(plan, rows=plan.rows[:2], quick=False, peers={})
    result["quick"] = False
    # The first row once more, the second once more and, when all are done, twice again.
    looks(monkeypatch, 1.0, 0.96, 1.0, 1.0, 1.0, 0.96, 0.96, 1.0, 1.0, 0.96, 1.0, 0.96)
    told = []
    list(run(plan, result, lambda row: told.append((row["name"], row["attempt"]))))
    first, second = result["rows"]
    assert told == [(first["name"], 2), (second["name"], 2), (second["name"], 2)]
    assert (first["accepted"], first["attempt"], first["moved"]) == (True, 2, 0.0)
    assert (second["accepted"], second["attempt"], second["moved"]) == (False, 2, 0.04)
    assert second["anchors"]["matmul"] == pytest.approx(686)
    assert results.summed(result, sheet, plan.rows)["verdicts"][0]["verdict"] == "incomplete"
    assert results.kept(result, plan.rows[1]) is None, "a rejected row is measured again by --resume"
    assert "(rejected: the device changed by 4%)" in pages.markdown(results.summed(result, sheet, plan.rows))
    looks(monkeypatch, 1.0, 1.0)
    list(run(plan, result, lambda row: None))
    assert [row["accepted"] for row in result["rows"]] == [True, True]


def test_the_device_is_looked_at_between_the_checks_and_the_times_and_before_memory_is_given_back(asked, monkeypatch):
    plan, _, result = begun(dataclasses.replace(asked, rows=("*S48",)))
    steps = []
    looks(monkeypatch, 1.0, 1.0)
    real = Looks.__call__
    monkeypatch.setattr(Looks, "__call__", lambda self: [steps.append("look"), real(self)][1])
    examined, timed = measuring.running._examined, measuring.running.interleaved
    monkeypatch.setattr(measuring.running, "_examined", lambda *a, **k: [steps.append("check"), examined(*a, **k)][1])
    monkeypatch.setattr(measuring.running, "interleaved", lambda *a, **k: [steps.append("time"), timed(*a, **k)][1])
    monkeypatch.setattr(running, "_free", lambda device: steps.append("free"))
    list(run(plan, result, lambda row: None))
    assert steps[: steps.index("look")] == ["check"] * steps.count("check")
    assert steps[steps.index("look") :] == ["look", "time", "look", "free"]


def test_the_ceiling_is_what_takes_longer():
    assert ceiling(Work(7e14, 4.6e9, "TFLOP/s"), RATES) == ("matmul", pytest.approx(1.0))
    assert ceiling(Work(7e11, 4.6e12, "GB/s"), RATES) == ("read", pytest.approx(1.0))


def test_no_row_is_begun_after_the_limit(asked):
    plan, _, result = begun(dataclasses.replace(asked, limit=0.0))
    assert not list(run(plan, result, lambda row: None))


def test_an_entry_that_takes_the_device_with_it_is_left_out_from_then_on(asked, monkeypatch):
    plan, _, result = begun(asked)
    plan = dataclasses.replace(plan, rows=plan.rows[:1])

    def lost(*args, **kwargs):
        raise RuntimeError("device-side assert")

    with monkeypatch.context() as patch:
        real = running.measure

        def measure(inputs, entries, **how):
            real(inputs, entries[:2], **how)
            patch.setattr(Clock, "synchronise", lost)
            lost()

        patch.setattr(running, "measure", measure)
        with pytest.raises(DeviceLost, match=r"the device was lost at prefill/.*/polyattn/torch_native: Runtime"):
            list(run(plan, result, lambda row: None))
    (place,) = result["lost"]
    list(run(plan, result, lambda row: None))
    entry = result["rows"][0]["entries"][place.partition(f"{plan.rows[0].id}/")[2]]
    assert (entry["kind"], entry["failed"]) == ("lost", "RuntimeError: device-side assert")


def test_a_run_time_error_that_leaves_the_device_whole_is_raised(asked, monkeypatch):
    plan, _, result = begun(asked)
    monkeypatch.setattr(running, "measure", lambda *args, **how: (_ for _ in ()).throw(RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        list(run(plan, result, lambda row: None))
    assert result["lost"] == {}


SPARSE = Row(
    family="f", kind="block_sparse", heads=2, kv_heads=2, head_dim=32, batch=1, q_len=128, block=16, density=0.5
)
NOBODY = dataclasses.replace(SPARSE, dtype="fp8_e4m3")
FEW = Row(family="f", kind="dense", heads=2, kv_heads=2, head_dim=32, batch=1, q_len=8)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "row, patterns, note",
    [
        (NOBODY, ["*"], "no backend can serve this call: block_sparse prefill, cpu, "),
        (NOBODY, ["torch_sdpa"], "no backend can serve this call: block_sparse prefill, cpu, "),
        (
            dataclasses.replace(FEW, softcap=1e-300),
            ["*"],
            "only a last resort would be chosen for it: name one that takes it with --candidates (reference",
        ),
        (FEW, ["fa", "flex*"], "--candidates fa flex* names none of those that may be chosen for it: torch_sdpa, "),
    ],
    ids=["nobody", "nobody, and not who is named", "a last resort", "nobody who is named"],
)
def test_a_row_without_entries_has_its_reason(row, patterns, note):
    plan = Plan([row], {}, patterns, torch.device("cpu"), 0.001, 60, False)
    result = {"rows": [], "lost": {}}
    told = []
    list(run(plan, result, told.append))
    (found,) = told
    assert (found["entries"], found["accepted"]) == ({}, True)
    assert found["note"].startswith(note)
    assert "\n" not in found["note"]
    list(run(plan, result, told.append))
    assert len(told) == 1, "it is done"
    list(run(dataclasses.replace(plan, again=True), result, told.append))
    assert len(told) == 2


def test_a_last_resort_is_timed_where_it_is_named(asked):
    plan, _, result = begun(dataclasses.replace(asked, rows=("*S48",), candidates=("reference",), peers=()))
    plan = dataclasses.replace(plan, rows=[dataclasses.replace(plan.rows[0], softcap=1e-300)])
    list(run(plan, result, lambda row: None))
    (row,) = result["rows"]
    assert row["entries"]["polyattn/reference"]["us"] > 0
    assert "note" not in row


ROOMY = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory"), "no room for its inputs: OutOfMemoryError: CUDA"),
    "a CPU's": (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        "no room for its inputs: RuntimeError: ",
    ),
    "a pool's": (OSError(errno.ENOMEM, "Cannot allocate memory"), "no room for its inputs: OSError: "),
    "Python's": (MemoryError(), "no room for its inputs: MemoryError"),
    "no size": (
        RuntimeError("Storage size calculation overflowed with sizes=[9]"),
        "its inputs cannot be made: RuntimeError: Storage",
    ),
    "no number": (OverflowError("Python int too large"), "its inputs cannot be made: OverflowError: Python"),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("error, note", ROOMY.values(), ids=ROOMY.keys())
@pytest.mark.parametrize("tune", [False, True])
def test_inputs_that_do_not_fit_end_their_row_only(asked, monkeypatch, error, note, tune):
    plan, _, result = begun(dataclasses.replace(asked, peers=(), tune=tune))
    real = running.inputs_of

    def make(row, *args):
        if row == plan.sized(plan.rows[1]):
            raise error
        return real(row, *args)

    def tune_one(asked, *args, **how):
        if asked.longest == (plan.sized(plan.rows[1]).q_len,) * 2:
            raise error

    monkeypatch.setattr(running, "inputs_of", make)
    monkeypatch.setattr(running, "tune_one", tune_one)
    monkeypatch.setattr(Plan, "sized", lambda self, row: row)
    list(run(plan, result, lambda row: None))
    first, second, third = result["rows"]
    assert first["entries"]
    assert second["entries"] == {}
    assert second["note"].startswith(note)
    assert ("; not tuned: " + note in second["note"]) == tune
    assert third["entries"], "the run goes on"


def test_a_pool_that_does_not_fit_ends_its_row_only():
    row = Row(
        family="f", kind="paged", heads=2, kv_heads=2, head_dim=2**20, batch=1, q_len=1, kv_len=64, page_size=2**30
    )
    plan = Plan([row, FEW], {}, ["*"], torch.device("cpu"), 0.001, 60, True)
    result = {"rows": [], "lost": {}}
    list(run(plan, result, lambda row: None))
    first, second = result["rows"]
    assert first["note"].startswith("no room for its inputs: InvalidInputError: a KV pool of ")
    assert second["entries"]


@pytest.mark.parametrize("error", [RuntimeError("a defect"), OSError(errno.EACCES, "Permission denied"), KeyError("x")])
@pytest.mark.parametrize("where", ["inputs_of", "tune_one"])
def test_what_is_wrong_with_more_than_a_row_ends_the_run(asked, monkeypatch, error, where):
    plan, _, result = begun(dataclasses.replace(asked, tune=where == "tune_one"))
    monkeypatch.setattr(running, where, lambda *args, **how: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        list(run(plan, result, lambda row: None))


# ---------------------------------------------------------------------------------------------------- asking


def test_the_command_asks_for_the_same_again(asked):
    words = asked.words()
    assert words[:1] == ["bench"]
    assert words.count("--candidates") == 1
    assert "--limit" not in words
    assert BenchOptions.of(json.loads(json.dumps(asked.plain()))) == asked


def test_a_cpu_needs_quick_and_devices_are_known(asked):
    with pytest.raises(ConfigError, match="take hours on a CPU: --quick makes them tiny"):
        dataclasses.replace(asked, quick=False).plan()
    for device in ("warp", "meta"):
        with pytest.raises(ConfigError, match=f"--device {device}: torch has no such device here: "):
            dataclasses.replace(asked, device=device).plan()


def test_the_kernels_of_one_library_are_a_candidate_of_their_own(asked):
    assert dataclasses.replace(asked, candidates=("fa/fa4", "torch_*")).plan()[0].candidates == ("fa/fa4", "torch_*")
    with pytest.raises(ConfigError, match=r"--candidates 'fa/fa5' names none\. Did you mean 'fa/fa4'"):
        dataclasses.replace(asked, candidates=("fa/fa5",)).plan()


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"candidates": ("torch_sdpa", "torch_sdpaa")},
            r"--candidates 'torch_sdpaa' names none\. Did you mean 'torch_sdpa' or .*\? There are: ",
        ),
        (
            {"peers": (), "peer": ("sdpa",)},
            r"--peer sdpa: which peers there are, --peers says: .*, or leave --peer out",
        ),
        ({"peer": ("rigth",)}, r"--peer 'rigth' names none\. Did you mean 'right'\?"),
        ({"seconds": math.nan}, "--seconds nan: give a finite number of seconds"),
        ({"limit": math.inf}, "--limit inf: give a finite number of seconds"),
    ],
)
def test_words_that_name_nobody_are_refused(asked, change, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(asked, **change).plan()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"kv_dtype": "int8"}, "no format of latent rows in int8 is defined; take one of fp8_e4m3, fp8_e5m2"),
        ({"kv_heads": 2}, "a latent layer has one row for all heads"),
        ({"v_head_dim": 128}, "the value is the first part of a row: 1 to 64"),
        ({"softcap": 30.0}, "latent attention .family mla. has none"),
    ],
)
def test_what_no_layer_has_is_refused_before_anything_is_measured(asked, tmp_path, change, said):
    row = {"heads": 4, "kv_heads": 1, "head_dim": 64, "v_head_dim": 32, "batch": 1, "q_len": 1, "kv_len": 40}
    sheet = tmp_path / "latent.yaml"
    families = {"latent": {"kind": "latent", "rows": [{**row, "page_size": 16, **change}]}}
    sheet.write_text(json.dumps({"title": "Latent", "families": families}))
    with pytest.raises(ConfigError, match=rf"sheet latent: row latent/d64.*: .*{said}"):
        dataclasses.replace(asked, sheets=(str(sheet),)).plan()


def test_bars_that_name_nobody_here_are_said(asked, places):
    """Which of them are slips only people know: a peer's folder may be left out, a plugin not installed."""
    sheet, _ = places
    bars = """
  - {name: a, of: [prefill], than: rihgt, each: 1.0}
  - {name: b, of: [prefill], who: polyattn/torch_spda, than: best_peer, each: 1.0}
  - {name: c, of: [prefill], than: polyattn/nobody, each: 1.0}
  - {name: d, of: [prefill], than: step, match: [batch], each: 1.0}
  - {name: e, of: [step], than: rules, each: 1.0}
  - {name: f, of: [step], than: one_another, spread: 1.0}
  - {name: h, of: [prefill], than: r*, each: 1.0}
"""
    sheet.write_text(SHEET.rstrip() + bars)
    told = asked.unknown_targets(asked.plan()[1])
    a, b, c = told
    assert a == "bar a: than 'rihgt' is no peer that --peers lists. Did you mean 'right'? It stays incomplete"
    assert b.startswith("bar b: who 'polyattn/torch_spda' is no backend that is installed here. Did you mean 'torch_s")
    assert c == "bar c: than 'polyattn/nobody' is no backend that is installed here. It stays incomplete"
    one = dataclasses.replace(asked, peer=("wrong",))
    assert one.unknown_targets(one.plan()[1]) == told, "a peer that is not selected is one all the same"
    none = dataclasses.replace(asked, peers=())
    assert none.unknown_targets(none.plan()[1]) == told[1:], "without --peers any name may be a peer's"
    (sheet.parent / "all.yaml").write_text("{title: All, bars: [{name: g, of: [nobody], than: right, each: 1.0}]}")
    (sheet.parent / "more.yaml").write_text("title: Left out")
    both = dataclasses.replace(asked, sheets=(str(sheet), str(sheet.parent / "all.yaml")))
    assert both.unknown_targets(both.plan()[1])[-1] == "bar g: these sheets have no family nobody; it gets no verdict"


def test_compiling_ahead_calls_what_compiles(asked, tmp_path):
    from polyattn.bench.precompile import shares

    plan, _ = asked.plan()
    found = [(row.name, one.name) for number in range(3) for row, one in shares(plan, number, 3)]
    assert sorted(found) == sorted((row.tiny().name, "slow") for row in plan.rows), "each once, whatever the share"
    words = [sys.executable, "-m", "polyattn.bench.precompile", json.dumps(asked.plain()), "0", "1"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said.count("ahead, step/") == 1, "what fails is said, and met again when it is measured"
    assert "dense rows only" in said


# ---------------------------------------------------------------------------------------------------- showing


def test_a_quick_run_has_no_verdicts(done, places):
    sheet = read([places[0]])
    rows = [row for family in sheet.families for row in family.rows]
    assert results.summed(done, sheet, rows)["verdicts"] == done["verdicts"] == []
    assert "| bar |" not in pages.markdown(done)
    (said,) = results.summed({**done, "quick": False}, sheet, rows)["verdicts"]
    assert (said["verdict"], said["rows"]) == ("met", 2)


def test_a_result_is_shown_with_its_bars_and_failures(done, places):
    for row in done["rows"]:
        row["bound"] = "matmul"  # which it is on a CPU is a matter of its day
    sheet = read([places[0]])
    slow = results.summed({**done, "quick": False}, sheet, [row for family in sheet.families for row in family.rows])
    assert "| over the peer | tuned: geomean 1e-06 x right | met |" in pages.markdown(slow)
    text = pages.markdown(done)
    assert "Rows as small as they get: the times mean nothing." in text
    assert "`prefill`, Tiny: TFLOP/s (share of matmul, which bounds it)" in text
    assert "- broken: KeyError: 'of the library' (every row)" in text
    assert "the backend of that name, called through polyattn; called by hand: `right` right." in text
    assert "tuned torch_sdpa" in text
    assert "The device, over all rows" not in text, "of a quick run that says nothing"


def test_plots_are_the_same_for_the_same_result(done, tmp_path):
    first = plots.draw(done, tmp_path / "a")
    second = plots.draw(copy.deepcopy(done), tmp_path / "b")
    assert [path.name for path in first] == ["sheet.png", "sheet.svg"]
    assert first[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert first[1].read_bytes() == second[1].read_bytes()
    assert f"<dc:identifier>{plots.digest(done)}</dc:identifier>" in first[1].read_text()
    assert "d32 H4 kv2 B1 S48" in first[1].read_text()
    for row in done["rows"]:
        row["entries"] = {}
    assert plots.draw(done, tmp_path / "c") == [], "a sheet without times has no picture"


def test_plots_without_matplotlib_say_what_to_install(done, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendUnavailableError, match=r"plots need matplotlib: pip install 'polyattn\[plots\]'"):
        plots.draw(done, tmp_path)


def test_peers_are_what_a_result_names(asked):
    plan, _, result = begun(asked)
    assert result["libraries"]["slow"] == "compiled first"
    assert all(isinstance(peer, Peer) for peer in plan.peers.values())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("word", ["auto", "always", "never"])
def test_whom_the_tuner_tries_in_a_process_of_its_own(asked, monkeypatch, word):
    asked = dataclasses.replace(asked, tune=True, rows=("step",), isolate=word)
    plan, _, result = begun(asked)
    asked_of = []
    monkeypatch.setattr(running, "tune_one", lambda *args, isolation, **how: asked_of.append(isolation))
    list(run(plan, result, lambda row: None))
    assert asked_of == [word]
    assert ("--isolate" in asked.words()) == (word != "auto")


@pytest.mark.slow
def test_a_row_is_tuned_before_it_is_measured_where_that_is_asked_for(asked, configured, monkeypatch):
    plan, _, result = begun(dataclasses.replace(asked, tune=True, rows=("step",), peers=(), candidates=("*",)))
    list(run(plan, result, lambda row: None))
    (row,) = result["rows"]
    own = {name: entry["us"] for name, entry in row["entries"].items() if "us" in entry}
    assert row["choice"]["tuned"] in own
    chosen = inspection.explain(workload(plan.sized(plan.rows[0]), plan.device).request)
    assert (chosen.source, row["choice"]["tuned"]) == ("tuned", f"polyattn/{chosen.backend}")
    other = next(name.removeprefix("polyattn/") for name in own if name != row["choice"]["tuned"])
    configured(other)
    assert inspection.explain(workload(plan.sized(plan.rows[0]), plan.device).request).backend == other
    list(run(dataclasses.replace(plan, again=True, tune=False), result, lambda row: None))
    assert result["rows"][0]["choice"] == row["choice"], "not what somebody chose"
    monkeypatch.setattr(running, "tune_one", lambda *args, **how: pytest.fail("a kept row is not tuned again"))
    list(run(plan, result, lambda row: None))


@pytest.mark.parametrize(
    "patterns, wanted",
    [
        (["*"], {"polyattn/torch_sdpa", "polyattn/torch_native"}),
        (["torch_s*", "reference"], {"polyattn/torch_sdpa", "polyattn/reference"}),
        (["flex*"], set()),
        (["flex_attention"], {"polyattn/flex_attention"}),
        (["no_such_backend"], set()),
    ],
)
def test_last_resorts_and_what_only_people_choose_take_part_by_name(patterns, wanted):
    row = Row(family="f", kind="dense", heads=4, kv_heads=2, head_dim=32, batch=1, q_len=48)
    device = torch.device("cpu")
    found = {one.name: one for one in entries_of(workload(row, device), device, {}, patterns, Seen())}
    assert set(found) - {"polyattn/triton"} == wanted
    assert all(one.compiles == (name == "polyattn/flex_attention") for name, one in found.items() if "torch" in name)


def test_what_is_so_on_another_platform_says_nothing_of_this_one(monkeypatch):
    """Triton is a last resort on a CPU and compiles nowhere else than where its record says so."""
    backends = get_manager().backends
    for name in ("torch_sdpa", "torch_native"):
        info = backends[name, "cpu"]
        elsewhere = dataclasses.replace(info, platform="npu", priority=-5, compiles=not info.compiles)
        monkeypatch.setitem(backends, (name, "npu"), elsewhere)
    row = Row(family="f", kind="dense", heads=4, kv_heads=2, head_dim=32, batch=1, q_len=48)
    found = {one.name: one for one in entries_of(workload(row, CPU), CPU, {}, ["*"], Seen())}
    assert {"polyattn/torch_sdpa", "polyattn/torch_native"} <= set(found)
    assert not [name for name, one in found.items() if one.compiles and name.startswith("polyattn/torch_")]


def test_own_kernels_take_part_on_a_gpu(monkeypatch):
    triton = get_manager().backends["triton", "cuda"]
    assert (get_manager().backends["triton", "cpu"].priority or 0) < 0 <= (triton.priority or 0)
    row = Row(family="f", kind="dense", heads=4, kv_heads=2, head_dim=32, batch=1, q_len=48)
    asked = workload(row, CPU)
    found = Selection(asked.request, "triton", "cuda", "polyattn", (), None, "priority", "")
    one = measuring.Candidate("triton", found, True, "triton")
    monkeypatch.setattr(entries, "candidates", lambda *args, **how: (one,))
    assert [e.name for e in entries_of(asked, CPU, {}, ["*"], Seen())] == ["polyattn/triton"]
