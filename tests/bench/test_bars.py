"""From measured rows to verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyattn.bench.bars import Bar, best, difference, verdicts
from polyattn.bench.pages import breaking
from polyattn.bench.sheets import read

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OWN = "polyattn/triton"
RATES = {"matmul": 700.0, "copy": 4200.0, "read": 4600.0}


@pytest.fixture(scope="module")
def sheet():
    return read([BENCHMARKS / "attention_kernels.yaml"])


def measured(sheet, family, accepted=True, choice=None, anchors=RATES, **us):
    """Every row of a family, in which entries took `us` microseconds; `own` is the Triton backend's."""
    rows = next(f.rows for f in sheet.families if f.name == family)
    entries = {OWN if name == "own" else name: {"us": time, "peer": name != "own"} for name, time in us.items()}
    return [
        {
            "family": family,
            "name": row.name,
            "fields": row.fields(),
            "bound": "read",
            "anchors": dict(anchors),
            "accepted": accepted,
            "entries": {name: dict(entry) for name, entry in entries.items()},
            "choice": choice or {},
        }
        for row in rows
    ]


def verdict_of(sheet, bar, *families):
    wanted = [row for family in sheet.families for row in family.rows]
    rows = [row for some in families for row in some]
    return next(said for said in verdicts(sheet.bars, wanted, rows) if said["bar"] == bar)


def test_a_pattern_is_the_fastest_of_the_peers_that_it_names(sheet):
    (row,) = measured(sheet, "cascade", own=10.0, flashinfer=30.0, flashinfer_fa2=20.0, fa3=5.0)
    assert best(row, peers=True, pattern="flashinfer*") == "flashinfer_fa2"
    assert best(row, peers=True, pattern="xqa*") is None
    bar = Bar(name="by hand", of=("cascade",), than="flashinfer*", geomean=1.0, who="polyattn/triton")
    wanted = [row for family in sheet.families for row in family.rows]
    (said,) = verdicts([bar], wanted, [row])
    assert (said["verdict"], said["geomean"]) == ("met", 2.0)


def test_the_best_peer_is_compared_row_by_row(sheet):
    said = verdict_of(sheet, "paged decode", measured(sheet, "decode", own=10.0, fa3=11.0, xqa=12.0))
    assert (said["verdict"], said["geomean"], said["least"], said["rows"]) == ("met", 1.1, 1.1, 11)
    rows = measured(sheet, "decode", own=10.0, fa3=12.0)
    rows[3]["entries"][OWN]["us"] = 13.0
    said = verdict_of(sheet, "paged decode", rows)
    assert (said["verdict"], said["least"]) == ("missed", 0.923)
    assert said["least_row"] == f"decode/{rows[3]['name']}"
    assert said["geomean"] > 1
    assert said["below"] == {"limit": 0.93, "rows": {said["least_row"]: 0.923}}, "that is the row that breaks it"
    for row in rows[:6]:
        row["entries"][OWN]["us"] = 15.0
    said = verdict_of(sheet, "paged decode", rows)
    assert said["geomean"] < 1
    assert (said["below"]["limit"], list(said["below"]["rows"].values())) == (1.0, [0.8] * 6)
    assert breaking(said).startswith("6 of 11 rows are below 1: decode/d128 ")
    assert breaking(verdict_of(sheet, "paged decode", measured(sheet, "decode", own=10.0, fa3=11.0))) == ""


def test_what_is_rejected_failed_or_missing_is_no_success(sheet):
    rejected = measured(sheet, "extend", accepted=False, own=10.0, fa3=12.0)
    assert verdict_of(sheet, "extend", rejected)["verdict"] == "incomplete"
    failed = measured(sheet, "extend", own=10.0, fa3=12.0)
    failed[1]["entries"][OWN] = {"kind": "wrong", "failed": "wrong"}
    said = verdict_of(sheet, "extend", failed)
    assert (said["verdict"], said["missing"]) == ("incomplete", [f"extend/{failed[1]['name']}"])
    assert verdict_of(sheet, "MLA decode, one request")["verdict"] == "incomplete"
    slow = measured(sheet, "extend", own=20.0, fa3=12.0)[:1]
    assert verdict_of(sheet, "extend", slow)["verdict"] == "missed", "what is missing could not mend it"


def test_other_families_are_matched_by_row(sheet):
    bfloat16, fp8 = measured(sheet, "decode", own=18.0), measured(sheet, "decode_fp8", own=10.0)
    assert verdict_of(sheet, "FP8 KV over bf16 KV", bfloat16, fp8)["verdict"] == "met"
    # Only rows of the same batch, length and page size count.
    for row in bfloat16:
        if row["fields"]["batch"] != 64:
            row["entries"][OWN]["us"] = 1.0
    assert verdict_of(sheet, "FP8 KV over bf16 KV", bfloat16, fp8)["least"] == 1.8
    another = measured(sheet, "decode_fp8", own=10.0, anchors={**RATES, "read": 4000.0})
    assert verdict_of(sheet, "FP8 KV over bf16 KV", bfloat16, another)["rows"] == 0, "the device was another"
    hotter = measured(sheet, "decode_fp8", own=10.0, anchors={**RATES, "matmul": 600.0})
    assert verdict_of(sheet, "FP8 KV over bf16 KV", bfloat16, hotter)["rows"] == 2, "that does not bound these rows"


def test_block_sparse_is_held_to_its_share_of_dense(sheet):
    dense, sparse = measured(sheet, "block_dense", own=1000.0), measured(sheet, "block_sparse", own=0.0)
    for row in sparse:
        row["entries"][OWN]["us"] = 1000.0 * row["fields"]["density"] / 0.9
    said = verdict_of(sheet, "block-sparse over its share of dense", dense, sparse)
    assert (said["verdict"], said["least"], said["rows"]) == ("met", 0.9, 6)


def test_page_sizes_are_held_to_one_another(sheet):
    rows = measured(sheet, "decode_pages", own=100.0)
    rows[2]["entries"][OWN]["us"] = 105.0
    assert verdict_of(sheet, "page sizes", rows)["verdict"] == "met"
    rows[0]["entries"][OWN]["us"] = 98.0
    said = verdict_of(sheet, "page sizes", rows)
    assert (said["verdict"], said["spread"]) == ("missed", 0.071)


def test_choices_are_held_to_the_fastest_candidate(sheet):
    bars = read([BENCHMARKS / "sheets"]).bars
    rows = measured(sheet, "extend", own=10.0, choice={"tuned": OWN, "rules": "polyattn/fa3"}, fa3=1.0)
    for row in rows:
        row["entries"]["polyattn/fa3"] = {"us": 12.5}
    assert [best(row, peers=False) for row in rows] == [OWN, OWN]
    assert [best(row, peers=True) for row in rows] == ["fa3", "fa3"]
    wanted = next(f.rows for f in sheet.families if f.name == "extend")
    said = {one["bar"]: one for one in verdicts(bars, wanted, rows)}
    assert (said["tuned choice"]["verdict"], said["tuned choice"]["least"]) == ("met", 1.0)
    assert (said["choice by rules"]["verdict"], said["choice by rules"]["geomean"]) == ("missed", 0.8)
    assert "decode over FlashInfer's default" not in said, "a bar on none of the rows says nothing"


def test_difference_is_the_largest_of_any_rate():
    assert difference(RATES, {**RATES, "copy": 2100.0}) == 0.5
    assert difference(RATES, RATES) == 0
