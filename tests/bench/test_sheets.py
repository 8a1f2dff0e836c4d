"""Sheets as data: what a row may say, what it is worth, and what the committed ones hold."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from polyattn.bench.measure import make_inputs
from polyattn.bench.rows import LATENT_FP8_ROW, Row, visible
from polyattn.bench.sheets import QUERY_DTYPES, read, selected
from polyattn.bench.workloads import workload
from polyattn.contract.request import DTYPES
from polyattn.errors import ConfigError
from polyattn.semantics.kv_quant import MLA_BYTES
from polyattn.semantics.validation import FLOATS
from polyattn.tuning.rows import canonical

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHEETS = BENCHMARKS / "sheets"
TABLE = BENCHMARKS.parent / "plugins" / "cuda" / "src" / "polyattn_cuda" / "measurements" / "nvidia-h200.json"


@pytest.fixture(scope="module")
def sheet():
    return read([SHEETS])


def rows_of(sheet):
    return [row for family in sheet.families for row in family.rows]


# ------------------------------------------------------------------------------------------------- the committed ones


def test_the_shipped_table_of_the_h200_knows_the_rows(sheet, monkeypatch):
    """A measurement is found by the request it was made for: where requests get another field, tables are made anew."""
    for where in ("bench.workloads", "serving.attention.phases"):
        monkeypatch.setattr(f"polyattn.{where}.device_facts", lambda device: {"platform": "cuda", "arch": "sm90"})
    known = {canonical(one["key"]) for one in json.loads(TABLE.read_text())["measurements"]}
    there = {row.id: canonical(workload(row, torch.device("cuda", 0)).key()) for row in rows_of(sheet)}
    # Triton has other kernels for these since: the table's times of it were not true any more (docs/tuning.md).
    stale = {
        row.id
        for row in rows_of(sheet)
        if row.kind == "packed"
        or (row.kind == "training" and row.head_dim <= 128)
        or (row.kind == "latent" and row.heads == 16)
        or (row.tree and row.q_len == 64)
        or (row.kind == "paged" and row.heads // row.kv_heads == 71)
    }
    assert {row for row, key in there.items() if key not in known} == stale


def test_the_sheets_cover_what_they_must(sheet):
    rows = rows_of(sheet)
    assert len(rows) >= 60
    assert {row.sheet for row in rows} == {path.stem for path in SHEETS.glob("*.yaml")} - {"all", "video_sparse"}
    assert {row.kind for row in rows} == {"dense", "packed", "training", "paged", "latent"}
    assert {row.heads // row.kv_heads for row in rows} >= {1, 2, 4, 7, 8, 12, 71, 128}
    assert {row.head_dim for row in rows} >= {64, 72, 80, 96, 128, 192, 256, 576}
    assert any(row.window != (-1, -1) for row in rows)
    assert any(row.sinks for row in rows)
    assert any(row.softcap for row in rows)
    assert any(row.tree for row in rows)
    assert any(row.shared for row in rows)


def test_every_row_says_whose_shape_it_is(sheet):
    assert not [row.id for row in rows_of(sheet) if not row.model or not row.source]


def test_every_row_is_a_request_of_polyattn(sheet):
    for row in rows_of(sheet):
        for sized in (row, row.tiny()):
            asked = workload(sized, torch.device("cpu")).request
            assert (asked.heads, asked.kv_heads, asked.dims) == (sized.heads, sized.kv_heads, sized.dims), row.id
            assert asked.sinks == sized.sinks
            assert asked.softcap == sized.softcap


def test_bars_on_the_whole_run_name_families_that_are_there(sheet):
    families = {family.name: family.rows[0] for family in sheet.families}
    bars = {bar.name: bar for bar in sheet.bars}
    for bar in bars.values():
        assert all(fnmatch.filter(families, pattern) for pattern in bar.of), bar.name
    (torch_own,) = (bar for bar in bars.values() if bar.than == "sdpa")
    held = {name for name in families if any(fnmatch.fnmatchcase(name, pattern) for pattern in torch_own.of)}
    dense = {name for name, row in families.items() if row.kind == "dense"}
    assert held == {name for name in dense if families[name].sheet in ("dit_video", "llm_prefill", "gqa")}
    assert bars["tuned choice"].of == bars["choice by rules"].of == ("*",)
    asked = {bar.name: (bar.each, bar.geomean) for bar in bars.values()}
    assert set(asked.values()) == {(0.95, 0.99), (None, 0.97), (None, 1.8), (None, 1.35), (None, 1.0)}


def test_bars_of_a_sheet_are_on_its_own_families(tmp_path):
    for name, more in (("a", "bars: [{name: own, of: ['*'], than: peer, each: 1.0}]"), ("b", "")):
        rows = "{kind: dense, of: {heads: 2, kv_heads: 2, head_dim: 32, causal: true, batch: 1}, rows: [{q_len: 8}]}"
        (tmp_path / f"{name}.yaml").write_text(f"title: {name}\nfamilies: {{family_{name}: {rows}}}\n{more}\n")
    (bar,) = read([tmp_path]).bars
    assert bar.of == ("family_a",)


def test_the_sheet_of_the_triton_kernels_keeps_its_rows():
    sheet = read([BENCHMARKS / "attention_kernels.yaml"])
    rows = {family.name: family.rows for family in sheet.families}
    prefill = [*rows["prefill_d64"], *rows["prefill_d128"]]
    assert {(r.head_dim, r.kv_heads, r.causal, r.q_len) for r in prefill} == {
        (d, kv, causal, s) for d in (64, 128) for kv in (8, 32) for causal in (True, False) for s in (1024, 4096, 16384)
    }
    assert {r.dims for r in (*rows["prefill_d256"], *rows["prefill_d192_128"])} == {(256, 256), (192, 128)}
    assert {r.head_dim for r in rows["prefill_odd"]} == {72, 80, 96}
    assert {(r.head_dim, r.causal, r.q_len) for r in rows["backward"]} == {
        (128, causal, s) for causal in (True, False) for s in (4096, 16384)
    }
    assert len(rows["decode"]) == 11
    assert {r.page_size for r in rows["decode_pages"]} == {1, 8, 16, 64, 128}
    latent = [*rows["mla_batched"], *rows["mla_single"]]
    assert {(r.batch, r.kv_len) for r in latent} == {(b, kv) for b in (1, 32, 128) for kv in (4096, 16384)}
    assert {(r.block, r.density) for r in rows["block_sparse"]} == {(b, d) for b in (64, 128) for d in (0.1, 0.2, 0.5)}
    compared = {bar.than for bar in sheet.bars} | {name for bar in sheet.bars for name in bar.of}
    assert set(rows) <= compared, "every family is under a bar"


# ------------------------------------------------------------------------------------------------------ selecting rows


def test_names_of_rows_are_what_is_selected(sheet):
    (family,) = selected(sheet, ["decode_8b/*B1 KV2048*"])
    assert [row.name for row in family.rows] == ["d128 H32 kv8 B1 KV2048 page 16"]
    assert [family.name for family in selected(sheet, ["mla_*", "flux"])] == [
        "flux",
        "mla_deepseek_v3",
        "mla_deepseek_v3_tp8",
        "mla_kimi_k2",
    ]
    with pytest.raises(ConfigError, match=r"--rows 'fluxx' names no row\. Did you mean 'flux'\? Families: wan_14b, "):
        selected(sheet, ["flux", "fluxx"])


# ---------------------------------------------------------------------------------------------------- refusing the rest

GOOD = {
    "title": "made for tests",
    "families": {
        "decode": {
            "kind": "paged",
            "of": {"heads": 8, "kv_heads": 2, "head_dim": 64, "q_len": 1, "page_size": 16},
            "rows": [{"batch": 1, "kv_len": 64}, {"batch": 2, "kv_len": 64}],
        },
        "prefill": {
            "kind": "dense",
            "rows": [{"heads": 4, "kv_heads": 4, "head_dim": 64, "causal": True, "q_len": 32, "batch": 2}],
        },
    },
    "bars": [{"name": "fast", "of": ["decode"], "than": "best_peer", "each": 1.0}],
}


def decode(given):
    return given["families"]["decode"]


def prefill(given):
    return given["families"]["prefill"]["rows"][0]


WRONG = {
    "a key of the top": (lambda s: s.update(tolerances={}), "unknown key 'tolerances'; allowed: bars, families, title"),
    "a missing key": (lambda s: s.pop("title"), "title is missing"),
    "families": (lambda s: s.update(families=[]), "families is []; it must be a mapping"),
    "bars": (lambda s: s.update(bars={}), "bars is {}; it must be a list"),
    "a key of a family": (lambda s: decode(s).update(peers=[]), "unknown key 'peers'; allowed: kind, of, rows"),
    "a kind": (lambda s: decode(s).update(kind="page"), "kind 'page' is not known. Did you mean 'paged' or 'packed'?"),
    "no rows": (lambda s: decode(s).update(rows=[]), "family decode has no rows"),
    "a row": (lambda s: decode(s).update(rows=[3]), "family decode: a row is 3; it must be a mapping"),
    "a field": (
        lambda s: decode(s)["rows"][0].update(pages=3),
        "a paged row has no pages; it takes batch, dtype, head_dim",
    ),
    "a missing field": (lambda s: decode(s)["rows"][0].pop("batch"), "a row lacks batch"),
    "a type": (lambda s: decode(s)["rows"][0].update(batch="8"), "batch is '8'; it is of type int"),
    "a truth": (lambda s: prefill(s).update(causal=1), "causal is 1; it is of type bool"),
    "a window": (lambda s: prefill(s).update(window=127), "window is 127; it is a list of whole numbers"),
    "half a window": (lambda s: prefill(s).update(window=[127]), "window is [127]; it is 2 whole numbers"),
    "no window": (lambda s: prefill(s).update(window=[-2, 0]), "left and right keys besides the row's own, -1 is no"),
    "heads": (lambda s: decode(s)["of"].update(kv_heads=3), "8 query heads are no multiple of 3 key heads"),
    "nothing": (lambda s: prefill(s).update(batch=0), "batch 0 is below 1"),
    "beyond": (lambda s: prefill(s).update(batch=10**30), "0 is above 2147483647, which no device holds"),
    "too few keys": (lambda s: decode(s)["of"].update(q_len=65), "kv_len 64 counts the 65 new tokens too"),
    "a shared part": (lambda s: decode(s)["of"].update(shared=24), "shared 24 must be whole pages of 16"),
    "twice": (
        lambda s: decode(s)["rows"].append({"batch": 1, "kv_len": 64}),
        "two rows are the same: d64 H8 kv2 B1 KV64 page 16",
    ),
    "a key of a bar": (lambda s: s["bars"][0].update(mean=1), "a bar has no mean; it takes each"),
    "a bar without a name": (lambda s: s["bars"][0].pop("name"), "a bar lacks name"),
    "a family of a bar": (lambda s: s["bars"][0].update(of=["fill"]), "no family of this sheet is called fill"),
    "who": (
        lambda s: s["bars"][0].update(who="fa3"),
        "who 'fa3' is neither tuned, shipped, unseen, rules, best nor polyattn/BACKEND",
    ),
    "no limit": (lambda s: s["bars"][0].pop("each"), "asks for nothing: give each, geomean or spread"),
    "match": (lambda s: s["bars"][0].update(match=["batch"]), "match goes with a family, spread with one_another"),
    "work": (
        lambda s: s["bars"][0].update(than="prefill", match=["batch"], work="effort"),
        "bar fast: a paged row, of family decode, has no effort",
    ),
    "a field to match": (
        lambda s: s["bars"][0].update(than="prefill", match=["page_size"]),
        "bar fast: a dense row, of family prefill, has no page_size",
    ),
    "work that is no number": (
        lambda s: s["bars"][0].update(than="prefill", match=["batch"], work="model"),
        "work 'model' is no number of a row",
    ),
    "a limit": (lambda s: s["bars"][0].update(each="fast"), "each of bar fast is 'fast'; it is of type float"),
    "no limit at all": (lambda s: s["bars"][0].update(each=0), "bar fast: each 0 is no limit: give a number above 0"),
    "a limit below 0": (lambda s: s["bars"][0].update(stretch=-1), "stretch -1 is no limit: give a number above 0"),
    "a limit that is no number": (lambda s: s["bars"][0].update(each=math.nan), "each of bar fast is nan; it is a fin"),
    "a limit without end": (lambda s: s["bars"][0].update(geomean=10**400), "geomean of bar fast is inf; it is a fin"),
    "on no family": (lambda s: s["bars"][0].update(of=[]), "of of bar fast is []; it is a list of names, one or more"),
    "on what is no name": (lambda s: s["bars"][0].update(of=[["decode"]]), "is [['decode']]; it is a list of names"),
    "than nobody": (
        lambda s: s["bars"][0].update(than=""),
        "than '' is neither tuned, shipped, unseen, rules, best, best_ca",
    ),
    "than a path": (lambda s: s["bars"][0].update(than="torch/sdpa"), "polyattn/BACKEND, a family nor a peer, whose"),
    "than a backend without a name": (lambda s: s["bars"][0].update(than="polyattn/"), "than 'polyattn/' is neither"),
    "a backend without a name": (lambda s: s["bars"][0].update(who="polyattn/"), "who 'polyattn/' is neither"),
    "a title": (lambda s: s.update(title=["a"]), "title is ['a']; it is of type str"),
    "several kinds": (lambda s: decode(s).update(kind=["paged"]), "kind ['paged'] is not known. Did you mean 'paged'"),
    "a dtype": (
        lambda s: prefill(s).update(dtype="bf16"),
        "family prefill: dtype 'bf16' is not known. Did you mean 'bfloat16'? Known: float64, float32, bfloat16, fl",
    ),
    "a dtype of no query": (lambda s: prefill(s).update(dtype="fp8_e4m3"), "dtype 'fp8_e4m3' is not known. Known: "),
    "a dtype of a cache": (
        lambda s: decode(s)["of"].update(kv_dtype="fp9"),
        "kv_dtype 'fp9' is not known. Known: auto, float64, float32, bfloat16, float16, fp8_e4m3, fp8_e5m2, fp4_e2m1, ",
    ),
    "fewer than no keys": (lambda s: prefill(s).update(kv_len=-4), "kv_len -4 is below 0: {"),
    "a width below 0": (lambda s: prefill(s).update(v_head_dim=-4), "v_head_dim -4 is below 0"),
    "a cap below 0": (lambda s: prefill(s).update(softcap=-5), "softcap -5 is below 0"),
    "a cap that is no number": (lambda s: prefill(s).update(softcap=math.nan), "softcap is nan; it is a finite number"),
    "less than nothing shared": (lambda s: decode(s)["of"].update(shared=-16), "shared -16 is below 0"),
    "too few keys of its own": (
        lambda s: decode(s)["of"].update(shared=32, q_len=40),
        "kv_len 64 counts the 40 new tokens too, after the 32 that are shared",
    ),
}


def written(folder, given, name="sheet.yaml"):
    path = folder / name
    path.write_text(yaml.safe_dump(given))
    return path


@pytest.mark.parametrize("change, said", WRONG.values(), ids=WRONG.keys())
def test_a_sheet_that_says_something_else_is_refused(tmp_path, change, said):
    given = copy.deepcopy(GOOD)
    read([written(tmp_path, given)])
    change(given)
    with pytest.raises(ConfigError) as caught:
        read([written(tmp_path, given)])
    assert said in str(caught.value)
    assert "sheet.yaml" in str(caught.value)


def test_bars_of_a_sheet_without_families_name_those_of_the_others(tmp_path):
    """Where some of a folder are read, a bar may be on one that is not: with `all.yaml` any of them is."""
    rows = written(tmp_path, GOOD)
    bar = {"name": "wide", "of": ["decode", "prefil"], "than": "best_peer", "each": 1.0}
    bars = written(tmp_path, {"title": "bars", "bars": [bar]}, "all.yaml")
    said = r"all\.yaml: bar wide: no family of these sheets is called prefil\. Did you mean 'prefill'\? There are: dec"
    for places in ([tmp_path], [rows, bars], [bars, rows]):
        with pytest.raises(ConfigError, match=said):
            read(places)
    with pytest.raises(ConfigError, match="no families, and so no rows, are in sheet all: name the"):
        selected(read([written(tmp_path, {"title": "bars", "bars": []}, "all.yaml")]), ["*"])
    bars = written(tmp_path, {"title": "bars", "bars": [bar]}, "all.yaml")
    written(tmp_path, {"title": "left out", "bars": []}, "other.yaml")
    assert [bar.name for bar in read([rows, bars]).bars if "prefil" in bar.of] == ["wide"]
    assert len(read([SHEETS / "all.yaml", SHEETS / "training.yaml"]).bars) == len(read([SHEETS]).bars)
    # What needs no family to be seen is refused all the same.
    written(tmp_path, {"title": "bars", "bars": [{**bar, "who": "fa3"}]}, "all.yaml")
    with pytest.raises(ConfigError, match=r"all\.yaml: bar wide: who 'fa3' is neither"):
        read([rows, bars])
    matched = {**bar, "of": ["decode"], "than": "prefill", "match": ["batch"]}
    written(tmp_path, {"title": "bars", "bars": [matched]}, "all.yaml")
    assert read([rows, bars]).bars[-1].match == ("batch",), "the row of another sheet's family"


def test_words_of_a_row_are_those_of_calls():
    assert set(QUERY_DTYPES) == {str(dtype).removeprefix("torch.") for dtype in FLOATS}


@pytest.mark.parametrize("kv_dtype", ["auto", *DTYPES])
def test_a_cache_in_any_dtype_is_counted_and_made(kv_dtype):
    row = dataclasses.replace(PAGED, kv_dtype=kv_dtype)
    asked = workload(row, torch.device("cpu"))
    made = make_inputs(asked, torch.device("cpu"), sets=1)
    stored = made.tensors[0]["key_cache"]
    usual = {"fp8_e4m3": "tensor", "fp8_e5m2": "tensor", "int8": "token", "fp4_e2m1": "block16"}
    assert asked.request.kv_scales == usual.get(kv_dtype, "")
    assert row.work().bytes == 2 * row.batch * row.kv_len * row.kv_heads * stored.shape[-1] * stored.dtype.itemsize


def test_a_sheet_is_safe_loaded(tmp_path):
    path = tmp_path / "sheet.yaml"
    path.write_text("title: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError, match="is not YAML: could not determine a constructor for the tag"):
        read([path])


def test_a_sheet_of_another_program_is_left_to_it():
    path = SHEETS / "video_sparse.yaml"
    with pytest.raises(
        ConfigError, match=r"is measured by a program of its own: python benchmarks/video_sparse\.py --sh"
    ):
        read([path])
    assert path.stem not in read([SHEETS]).digests


def test_sheets_that_cannot_be_told_apart_are_refused(tmp_path):
    first = written(tmp_path, GOOD)
    second = written(tmp_path, GOOD, "other.yaml")
    with pytest.raises(ConfigError, match="family decode is in sheet sheet too: rename one of them"):
        read([first, second])
    (tmp_path / "more").mkdir()
    with pytest.raises(ConfigError, match="two sheets are called sheet"):
        read([first, written(tmp_path / "more", GOOD)])
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"none is a folder without \.yaml files"):
        read([tmp_path / "none"])
    with pytest.raises(ConfigError, match="does not exist"):
        read([tmp_path / "absent.yaml"])


# ---------------------------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (3, 0), (3, 2), (-1, 2), (0, 0)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S_q, S_k", [(9, 9), (1, 9), (4, 9), (9, 4)])
def test_pairs_are_those_that_the_definition_sees(S_q, S_k, causal, window):
    place, key = torch.arange(S_q)[:, None] + S_k - S_q, torch.arange(S_k)
    left, right = window
    seen = key <= place if causal else torch.ones(S_q, S_k, dtype=torch.bool)
    if left >= 0:
        seen = seen & (place - key <= left)
    if right >= 0 and not causal:
        seen = seen & (key - place <= right)
    assert visible(S_q, S_k, causal, window) == int(seen.sum())


PAGED = Row(family="f", kind="paged", heads=8, kv_heads=2, head_dim=64, batch=3, q_len=1, kv_len=1000, page_size=16)
DENSE = Row(family="f", kind="dense", heads=8, kv_heads=2, head_dim=64, batch=3, q_len=100, causal=False)


def test_work_of_a_row():
    assert DENSE.work().operations == 3 * 8 * 100 * 100 * (2 * 64 + 2 * 64)
    half = dataclasses.replace(DENSE, causal=True).work().operations / DENSE.work().operations
    assert half == pytest.approx(0.505)
    assert dataclasses.replace(DENSE, kind="backward").work().operations == 2.5 * DENSE.work().operations
    assert dataclasses.replace(DENSE, kind="training").work().operations == 3.5 * DENSE.work().operations
    assert DENSE.work().unit == "TFLOP/s"
    packed = dataclasses.replace(DENSE, kind="packed", batch=1, q_len=0, lengths=(100, 100, 100))
    assert packed.work() == DENSE.work()
    assert DENSE.work().rate(2.0) == DENSE.work().operations / 2e12


def test_bytes_of_a_decode_row():
    row = PAGED
    assert row.work().bytes == 3 * 1000 * 2 * (64 + 64) * 2
    assert row.work().unit == "GB/s"
    assert dataclasses.replace(row, kv_dtype="fp8_e4m3").work().bytes == row.work().bytes / 2
    assert dataclasses.replace(row, window=(99, 0)).work().bytes == row.work().bytes / 10
    assert dataclasses.replace(row, q_len=4).work().unit == "TFLOP/s"
    latent = dataclasses.replace(row, kind="latent", kv_heads=1, head_dim=576, v_head_dim=512)
    assert latent.work().bytes == 3 * 1000 * 576 * 2
    assert dataclasses.replace(latent, kv_dtype="fp8_e4m3").work().bytes == 3 * 1000 * MLA_BYTES
    assert LATENT_FP8_ROW == MLA_BYTES
