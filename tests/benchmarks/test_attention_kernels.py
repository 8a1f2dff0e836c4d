"""The benchmark of the attention kernels, on the CPU: its sheet, its reference, its verdicts, and a dry run."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "attention_kernels.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("attention_kernels")


@pytest.fixture
def sheet(script):
    return script.sheets.read(script.SHEET, script.peers.ENTRIES)


# ------------------------------------------------------------------------------------------------------------ sheet


def test_the_sheet_has_every_row(sheet):
    rows = {family.name: family.rows for family in sheet.families}
    prefill = [*rows["prefill_d64"], *rows["prefill_d128"]]
    assert {(r.head_dim, r.kv_heads, r.causal, r.q_len) for r in prefill} == {
        (d, kv, causal, s) for d in (64, 128) for kv in (8, 32) for causal in (True, False) for s in (1024, 4096, 16384)
    }
    assert {r.batch * r.q_len for r in prefill} == {16384}
    assert {r.dims for r in (*rows["prefill_d256"], *rows["prefill_d192_128"])} == {(256, 256), (192, 128)}
    assert {r.head_dim for r in rows["prefill_odd"]} == {72, 80, 96}
    assert {(r.head_dim, r.causal, r.q_len) for r in rows["backward"]} == {
        (128, causal, s) for causal in (True, False) for s in (4096, 16384)
    }
    assert len(rows["decode"]) == 11
    assert {r.page_size for r in rows["decode_pages"]} == {1, 8, 16, 64, 128}
    assert {(r.batch, r.kv_len) for r in rows["decode_fp8"]} == {(64, 8192), (64, 32768)}
    latent = [*rows["mla_batched"], *rows["mla_single"]]
    assert {(r.batch, r.kv_len) for r in latent} == {(b, kv) for b in (1, 32, 128) for kv in (4096, 16384)}
    assert [(r.batch, r.shared, r.kv_len) for r in rows["cascade"]] == [(64, 16384, 16384 + 512)]
    assert {(r.block, r.density) for r in rows["block_sparse"]} == {(b, d) for b in (64, 128) for d in (0.1, 0.2, 0.5)}


def test_every_family_is_under_a_bar(sheet):
    compared = {bar.than for bar in sheet.bars} | {name for bar in sheet.bars for name in bar.of}
    assert {family.name for family in sheet.families} <= compared


def test_names_of_rows_are_what_is_selected(script, sheet):
    (family,) = script.sheets.selected(sheet, ["decode/*B1 KV2048*"])
    assert [row.name for row in family.rows] == ["d128 H32 kv8 B1 KV2048 page 16"]
    assert [f.name for f in script.sheets.selected(sheet, ["mla*", "extend"])] == [
        "mla_batched",
        "mla_single",
        "extend",
    ]
    with pytest.raises(script.sheets.SheetError, match=r"--rows 'decoed' names no row; families: prefill_d64,"):
        script.sheets.selected(sheet, ["decode", "decoed"])


WRONG = {
    "a key of the top": (lambda s: s.update(tolerances={}), "the sheet: unknown tolerances; known: anchors_within"),
    "a missing key": (lambda s: s.pop("bars"), "the sheet: bars is missing"),
    "a key of a family": (lambda s: s["families"]["decode"].update(peer=[]), "family decode: unknown peer; known:"),
    "a kind": (lambda s: s["families"]["decode"].update(kind="page"), "family decode: kind 'page' is not known; known"),
    "a peer": (lambda s: s["families"]["decode"].update(peers=["fa5"]), "family decode: no peer is called fa5; known"),
    "no rows": (lambda s: s["families"]["decode"].update(rows=[]), "family decode has no rows"),
    "a field": (
        lambda s: s["families"]["decode"]["rows"][0].update(pages=3),
        "family decode: a paged row has no pages; it takes batch, head_dim",
    ),
    "a missing field": (lambda s: s["families"]["decode"]["rows"][0].pop("batch"), "a row lacks batch"),
    "a type": (
        lambda s: s["families"]["decode"]["rows"][0].update(batch="8"),
        "family decode: batch is '8'; it is of type int",
    ),
    "a size": (
        lambda s: s["families"]["decode"]["rows"][0].update(kv_heads=5),
        "family decode: no attention has these sizes",
    ),
    "twice": (
        lambda s: s["families"]["decode"]["rows"].append(s["families"]["decode"]["rows"][0]),
        "family decode: two rows are the same",
    ),
    "a key of a bar": (lambda s: s["bars"][0].update(mean=1), "bar prefill d64, d128: unknown mean; known: each"),
    "a bar without a name": (lambda s: s["bars"][0].pop("name"), "it needs name, of and than"),
    "a family of a bar": (lambda s: s["bars"][0].update(of=["fill"]), "there is no family fill"),
    "than": (lambda s: s["bars"][0].update(than="fa5"), "than 'fa5' is neither best_peer, one_another, a peer nor"),
    "no limit": (lambda s: s["bars"][2].pop("each"), "asks for nothing: give each, geomean or spread"),
    "match": (lambda s: s["bars"][0].update(match=["batch"]), "match goes with a family, spread with one_another"),
    "work": (lambda s: s["bars"][0].update(work="effort"), "a row has no effort"),
    "a tolerance": (
        lambda s: s["tolerance"]["output"].update(rows=1),
        "tolerance of output: unknown rows; known: row, whole",
    ),
}


@pytest.mark.parametrize("change, said", WRONG.values(), ids=WRONG.keys())
def test_a_sheet_that_says_something_else_is_refused(script, tmp_path, change, said):
    wrong = copy.deepcopy(yaml.safe_load(script.SHEET.read_text()))
    change(wrong)
    path = tmp_path / "sheet.yaml"
    path.write_text(yaml.safe_dump(wrong))
    with pytest.raises(script.sheets.SheetError) as caught:
        script.sheets.read(path, script.peers.ENTRIES)
    assert said in str(caught.value)


def test_peers_are_selected_by_name(script):
    assert script.wanted_peers("sdpa_*, fa3") == ["sdpa_cudnn", "sdpa_flash", "sdpa_gathered", "fa3"]
    assert script.wanted_peers("") == []
    with pytest.raises(SystemExit, match=r"--peers 'fa5' names no entry; there are sdpa_cudnn, "):
        script.wanted_peers("fa3,fa5")


# -------------------------------------------------------------------------------------------------------- reference


def test_reference_gradients_are_those_of_autograd(script):
    reference = importlib.import_module("measuring.reference")
    q, k, v, dout = (torch.randn(2, 19, 8, dtype=torch.float64, requires_grad=True) for _ in range(4))
    places = torch.arange(19)
    out = reference.attention(q, k[0], v[0], 0.3, places <= places[:, None])
    wanted = torch.autograd.grad(out, (q, k, v), dout)
    found = reference.gradients(dout.detach(), q.detach(), k[0].detach(), v[0].detach(), 0.3, causal=True)
    for grad, one in zip(found, (wanted[0], wanted[1][0], wanted[2][0]), strict=True):
        torch.testing.assert_close(grad, one)


def test_distance_sees_one_wrong_row_and_what_is_not_finite(script):
    distance = importlib.import_module("measuring.reference").distance
    wanted = torch.randn(1000, 16, dtype=torch.float64)
    found = wanted.clone()
    assert distance(found, wanted) == (0, 0)
    found[17] *= -1
    whole, row = distance(found, wanted)
    assert whole < 0.1 < 1 < row
    found[17, 3] = float("nan")
    assert distance(found, wanted) == (float("inf"), float("inf"))
    with pytest.raises(ValueError, match=r"the result is \[999, 16\] where \[1000, 16\] is wanted"):
        distance(wanted[1:], wanted)


# ------------------------------------------------------------------------------------------------------------ clock


class Device:
    """What the clock sees of a GPU: time that calls take, in milliseconds, and events that read it."""

    def __init__(self, monkeypatch):
        self.now, self.log, self.slept = 0.0, [], 0
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def elapsed_time(self, end):
                return end.at - self.at

        class Graph:
            def replay(self):
                for call in device.recorded:
                    call()

        class Recording:
            def __init__(self, graph):
                pass

            def __enter__(self):
                device.log.append("record")
                device.recorded = []

            def __exit__(self, *_):
                device.log.append("recorded")

        cuda = type("cuda", (), {"wait_stream": lambda self, other: None})
        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": Recording,
            "Stream": lambda device: cuda(),
            "stream": Recording,
            "current_stream": lambda device: cuda(),
            "synchronize": lambda device: None,
            "_sleep": self.sleep,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        self.recorded = []

    def sleep(self, cycles):
        self.slept += cycles
        self.now += 1000.0

    def call(self, number, milliseconds):
        def work():
            self.log.append(number)
            self.now += milliseconds
            return number

        def call():
            self.recorded.append(work)
            return work()

        return call


def test_calls_are_timed_in_turn_and_the_time_of_issuing_them_is_not(script, monkeypatch):
    device = Device(monkeypatch)
    timer = importlib.import_module("measuring.clock").Timer(torch.device("cuda"), budget=0.08)
    found = timer.calls([device.call(number, 2.0) for number in range(2)])
    assert (found.seconds, found.spread, found.count) == (pytest.approx(0.002), 0, 40)
    assert device.slept > 0
    assert device.log[-4:] == [0, 1, 0, 1], "inputs change from call to call"
    warm = len(device.log) - found.count
    assert warm * 2.0 >= 25, "at least the warm-up's milliseconds come before"


def test_a_graph_gives_the_share_of_a_call(script, monkeypatch):
    device = Device(monkeypatch)
    timer = importlib.import_module("measuring.clock").Timer(torch.device("cuda"), budget=0.08)
    timing, results = timer.graph([device.call(number, 0.5) for number in range(4)])
    assert results == [0, 1, 2, 3]
    found = timing()
    assert (found.seconds, found.count) == (pytest.approx(0.0005), 40)


# --------------------------------------------------------------------------------------------------------- verdicts


def part(sheet, name, run=0, accepted=True, **us):
    """A part in which every row of a family took `us` microseconds by entry."""
    (family,) = (f for f in sheet.families if f.name == name)
    fields = importlib.import_module("measuring.verdicts").fields_of
    rows = []
    for row in family.rows:
        entries = {entry: {"us": time, "rate": 1.0} for entry, time in us.items()}
        said = {"family": name, "name": row.name, "run": run, "unit": "GB/s"}
        rows.append({**said, "fields": fields(row), "entries": entries})
    return {"family": name, "run": run, "accepted": accepted, "rows": rows}


def verdict_of(script, sheet, bar, *parts):
    return next(said for said in script.verdicts(sheet, parts) if said["bar"] == bar)


def test_the_best_peer_is_the_best_of_every_run(script, sheet):
    first = part(sheet, "decode", polyattn=10.0, fa3=11.0, xqa=12.0)
    second = part(sheet, "decode", run=1, polyattn=20.0, fa4=19.0)
    said = verdict_of(script, sheet, "paged decode", first)
    assert (said["verdict"], said["geomean"], said["least"]) == ("met", 1.1, 1.1)
    assert said["without"] == ["flashinfer", "flashinfer_fa2", "fa4", "sdpa_gathered"]
    said = verdict_of(script, sheet, "paged decode", first, second)
    assert (said["verdict"], said["geomean"]) == ("missed", 0.95)
    assert said["least"] == 0.95, "times of two runs are not divided: 10 / 19 would be met"


def test_one_row_under_the_bar_misses_it(script, sheet):
    measured = part(sheet, "decode", polyattn=10.0, fa3=12.0)
    measured["rows"][3]["entries"]["polyattn"]["us"] = 13.0
    said = verdict_of(script, sheet, "paged decode", measured)
    assert (said["verdict"], said["least"]) == ("missed", 0.923)
    assert said["least_row"] == measured["rows"][3]["name"]
    assert said["geomean"] > 1


def test_what_is_rejected_failed_or_missing_is_no_success(script, sheet):
    rejected = part(sheet, "extend", accepted=False, polyattn=10.0, fa3=12.0)
    assert verdict_of(script, sheet, "extend", rejected)["verdict"] == "incomplete"
    failed = part(sheet, "extend", polyattn=10.0, fa3=12.0)
    failed["rows"][1]["entries"]["polyattn"] = {"failed": "wrong"}
    said = verdict_of(script, sheet, "extend", failed)
    assert (said["verdict"], said["missing"]) == ("incomplete", [failed["rows"][1]["name"]])
    assert verdict_of(script, sheet, "MLA decode, one request")["verdict"] == "incomplete"


def test_other_families_are_matched_by_row(script, sheet):
    bfloat16, fp8 = part(sheet, "decode", polyattn=18.0), part(sheet, "decode_fp8", polyattn=10.0)
    assert verdict_of(script, sheet, "FP8 KV over bf16 KV", bfloat16, fp8)["verdict"] == "met"
    # Only rows of the same batch, length and page size count.
    for row in bfloat16["rows"]:
        if row["fields"]["batch"] != 64:
            row["entries"]["polyattn"]["us"] = 1.0
    assert verdict_of(script, sheet, "FP8 KV over bf16 KV", bfloat16, fp8)["least"] == 1.8
    elsewhere = part(sheet, "decode_fp8", run=1, polyattn=10.0)
    assert verdict_of(script, sheet, "FP8 KV over bf16 KV", bfloat16, elsewhere)["rows"] == 0


def test_block_sparse_is_held_to_its_share_of_dense(script, sheet):
    dense, sparse = part(sheet, "block_dense", polyattn=1000.0), part(sheet, "block_sparse", polyattn=0.0)
    for row in sparse["rows"]:
        row["entries"]["polyattn"]["us"] = 1000.0 * row["fields"]["density"] / 0.9
    said = verdict_of(script, sheet, "block-sparse over its share of dense", dense, sparse)
    assert (said["verdict"], said["least"], said["rows"]) == ("met", 0.9, 6)


def test_page_sizes_are_held_to_one_another(script, sheet):
    measured = part(sheet, "decode_pages", polyattn=100.0)
    measured["rows"][2]["entries"]["polyattn"]["us"] = 105.0
    assert verdict_of(script, sheet, "page sizes", measured)["verdict"] == "met"
    measured["rows"][0]["entries"]["polyattn"]["us"] = 98.0
    said = verdict_of(script, sheet, "page sizes", measured)
    assert (said["verdict"], said["spread"]) == ("missed", 0.071)


# ------------------------------------------------------------------------------------------------------------- runs


def one_row_of_each(sheet):
    return ",".join(f"{family.name}/{family.rows[0].name}" for family in sheet.families)


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """A dry run of the first row of every family, by core's own backend: (its result file, what it printed)."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        script = importlib.import_module("attention_kernels")
    finally:
        sys.path.remove(str(BENCHMARKS))
    rows = one_row_of_each(script.sheets.read(script.SHEET, script.peers.ENTRIES))
    result = tmp_path_factory.mktemp("dry") / "result.json"
    words = [
        "--dry-run",
        "--own",
        "torch_sdpa",
        "--rows",
        rows,
        "--peers",
        "sdpa_*,fa4,flashmla",
        "--json",
        str(result),
    ]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return result, done.stdout


def test_dry_run_measures_every_kind_of_row(dry, sheet):
    result = json.loads(dry[0].read_text())
    entries = {row["family"]: row["entries"] for part in result["parts"] for row in part["rows"]}
    assert list(entries) == [family.name for family in sheet.families]
    refused = entries.pop("block_sparse")["polyattn"]
    assert refused["failed"].startswith("UnsupportedRequestError: torch_sdpa, asked for by argument, cannot serve")
    for family, found in entries.items():
        assert found["polyattn"]["us"] > 0, family
        assert found["polyattn"]["served_by"].startswith("torch_sdpa@cpu"), family
        assert 0 < found["polyattn"]["error"][0] < sheet.tolerance["gradient"][0]
    assert entries["prefill_d128"]["sdpa_flash"]["us"] > 0
    assert entries["extend"]["sdpa_gathered"]["us"] > 0
    assert {"machine", "date", "versions", "command", "sheet"} <= result.keys()
    assert result["sheet"] == sheet.digest


def test_the_kernels_themselves_are_what_is_measured(tmp_path):
    result = tmp_path / "result.json"
    rows = "decode/*B1 KV2048*,block_sparse/*block 64 density 0.5"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--rows", rows, "--peers", "", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = [row["entries"]["polyattn"] for part in json.loads(result.read_text())["parts"] for row in part["rows"]]
    assert [entry["served_by"].split(" ")[0] for entry in entries] == ["triton@cpu"] * 2


def test_what_a_library_cannot_do_is_in_the_result(dry):
    result = json.loads(dry[0].read_text())
    entries = {row["family"]: row["entries"] for part in result["parts"] for row in part["rows"]}
    assert "No viable backend" in entries["prefill_d64"]["sdpa_cudnn"]["failed"]
    assert entries["mla_single"]["flashmla"]["failed"].startswith("not here: No module named 'vllm'")
    assert entries["decode"]["fa4"]["failed"] == "not compiled in a dry run"


def test_a_result_is_shown_with_its_bars_and_failures(dry, script):
    text = script.markdown(json.loads(dry[0].read_text()))
    assert "A dry run: the times mean nothing." in text
    assert "| cascade | each 5 x best_peer | incomplete, 1 of 1 rows missing |  |  |  |" in text
    assert "`decode`, GB/s" in text
    assert "- flashmla: not here: No module named 'vllm' (every row)" in text
    assert dry[1].strip().splitlines()[-1].startswith("| block-sparse over its share of dense |")


def test_results_are_merged_by_run(dry, script, sheet, tmp_path):
    result = json.loads(dry[0].read_text())
    both = script.merged([dry[0], dry[0]], sheet)
    assert len(both["parts"]) == 2 * len(result["parts"])
    assert {row["run"] for part in both["parts"] for row in part["rows"]} == {0, 1}
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**result, "machine": "another"}))
    with pytest.raises(SystemExit, match=r"other\.json: machine is not '.*', so it says nothing beside the others"):
        script.merged([dry[0], other], sheet)


@pytest.fixture
def run(script, sheet, monkeypatch, tmp_path):
    """A run of one dense row in this process."""
    result = tmp_path / "result.json"
    words = ["--dry-run", "--own", "torch_sdpa", "--peers", "sdpa_flash", "--rows", "prefill_odd/d72*"]
    monkeypatch.setattr(sys, "argv", ["attention_kernels.py", *words, "--json", str(result)])
    args = script.arguments()
    return script.Run(args, sheet, script.sheets.selected(sheet, [args.rows]))


def instead(script, monkeypatch, call):
    """Have `call` as the entry sdpa_flash."""
    entry = script.peers.ENTRIES["sdpa_flash"]
    monkeypatch.setattr(type(entry), "prepare", lambda self, problem: lambda number: call(problem, number))


def test_a_wrong_result_is_not_timed(script, run, monkeypatch):
    instead(script, monkeypatch, lambda problem, number: problem.inputs[number][0].flip(1))
    found = run.row(run.families[0].rows[0])["entries"]["sdpa_flash"]
    assert found["failed"].startswith("WrongResultError: ")
    assert found["failed"].endswith("in the worst row; not timed")
    assert "us" not in found


def test_an_entry_that_takes_the_device_with_it_is_left_out_of_what_follows(script, run, monkeypatch):
    def lost(*_):
        raise RuntimeError("an illegal memory access was encountered")

    instead(script, monkeypatch, lost)
    monkeypatch.setattr(run.timer, "synchronise", lost)
    row = run.families[0].rows[0]
    with pytest.raises(script.DeviceLostError, match="prefill_odd/d72"):
        run.row(row)
    found = run.row(row)["entries"]
    assert found["sdpa_flash"]["failed"].startswith("the device was lost: RuntimeError: an illegal memory access")
    assert found["polyattn"]["us"] > 0


def test_a_part_is_measured_again_and_then_rejected_where_the_device_changed(script, run, monkeypatch):
    rates = iter([{"read": 100.0}, {"read": 90.0}] * 2)
    # Not the module itself: it imports Triton, which decides for the whole process whether it interprets.
    instead = types.SimpleNamespace(anchors=lambda timer: next(rates))
    monkeypatch.setitem(sys.modules, "measuring.anchors", instead)
    monkeypatch.setattr(run.args, "dry_run", False)
    monkeypatch.setattr(run, "row", lambda row: {"family": row.family, "name": row.name, "run": 0, "entries": {}})
    run.all()
    assert next(rates, None) is None, "the part was tried twice"
    assert [(p["accepted"], p["anchors"]["difference"]) for p in run.result["parts"]] == [(False, 0.1)]
    assert json.loads(run.args.json.read_text())["parts"], "what was measured is kept part by part"


def test_parts_beyond_the_time_limit_are_named(run, monkeypatch):
    monkeypatch.setattr(run.args, "limit", -1.0)
    run.all()
    assert run.result["parts"] == []
    assert run.result["not_begun"] == ["prefill_odd"]


def test_what_compiles_is_compiled_once(script, sheet):
    names = list(script.peers.ENTRIES)
    found = [item for share in range(5) for item in script.shares(sheet.families, names, share, 5)]
    wanted = list(script.shares(sheet.families, names, 0, 1))
    assert len(found) == len(wanted) == len({(row.family, row.name, name) for row, name in found})
    assert {name for _, name in found} == {"polyattn", "flex_attention", "fa4", "fla"}
