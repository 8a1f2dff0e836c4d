"""Parts of one run as one result."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest

from polyattn.bench import pages, results
from polyattn.bench.joining import joined, read_parts
from polyattn.bench.sheets import read
from polyattn.errors import ConfigError

SHEET = """
title: Made for tests
families:
  prefill:
    kind: dense
    of: {heads: 4, kv_heads: 2, head_dim: 32, causal: true, batch: 1}
    rows: [{q_len: 48}, {q_len: 64}]
  step:
    kind: paged
    of: {heads: 4, kv_heads: 2, head_dim: 32, q_len: 1, page_size: 16, batch: 2}
    rows: [{kv_len: 40}, {kv_len: 80}]
bars:
  - {name: over the peer, of: ["*"], than: peer, geomean: 1.5}
"""
OWN = "polyattn/own"
RATES = {"matmul": 700.0, "copy": 4200.0, "read": 4600.0}


@pytest.fixture
def sheet(tmp_path):
    (tmp_path / "sheet.yaml").write_text(SHEET)
    return read([tmp_path / "sheet.yaml"])


@pytest.fixture
def parts(sheet):
    """Prefill by one process, the steps by another."""
    return {f"{family.name}.json": part(sheet, family.name) for family in sheet.families}


def part(sheet, family, **rates):
    rows = next(each.rows for each in sheet.families if each.name == family)
    return {
        "benchmark": pages.BENCHMARK,
        "format": results.FORMAT,
        "command": f"polyattn bench sheet.yaml --rows {family}",
        "date": "2026-11-22",
        "device": "A device",
        "versions": {"polyattn": "0.1.0", "driver": "1"},
        "settings": {"seconds": 0.06, "tune": True, "candidates": ["*"], "peers": ["peer"]},
        "sheets": dict(sheet.digests),
        "titles": dict(sheet.titles),
        "quick": False,
        "libraries": {"peer": "A library"},
        "lost": {f"{family}/{rows[0].name}/{OWN}": "gone"},
        "rows": [
            {
                "sheet": "sheet", "family": family, "kind": row.kind, "name": row.name, "model": "",
                "fields": row.fields(), "unit": row.work().unit, "bound": "read" if row.serving else "matmul",
                "date": "2026-11-22", "code": "of that day",
                "accepted": True, "anchors": {**RATES, **rates}, "moved": 0.01, "choice": {"tuned": OWN},
                "entries": {
                    OWN: {"us": 10.0, "rate": 1.0, "percent": 10.0, "peak_bytes": 3 * 2**20},
                    "peer": {"us": 20.0, "rate": 0.5, "percent": 5.0, "peak_bytes": 2**20, "peer": True},
                },
            }
            for row in rows
        ],
        "verdicts": [],
    }  # fmt: skip


@pytest.fixture
def page(monkeypatch):
    """What writes this repository's pages from its results."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("page")


def test_a_family_is_a_line_of_the_summary(sheet, parts, page):
    slow, rejected = parts["step.json"]["rows"]
    slow["entries"]["peer"]["us"], rejected["accepted"] = 5.0, False
    text = page.summary(joined(parts, sheet))
    fast = parts["prefill.json"]["rows"][0]["name"]
    assert f"| prefill | 2 | 1 TFLOP/s | peer 2 | 2.00 | 2.00 | {fast} |" in text
    assert f"| step | 1 of 2 | 1 {slow['unit']} | peer 1 | 0.50 | 0.50 | {slow['name']} |" in text
    assert "| over the peer | tuned: geomean 1.5 x peer | missed, 1 of 4 rows missing | 1.26 | 0.50 |" in text
    for row in parts["step.json"]["rows"]:
        row["accepted"] = False
    assert "| step | 0 of 2 |  |  |  |  |  |" in page.summary(joined(parts, sheet))


def test_parts_become_one_result_with_verdicts_over_all_rows(sheet, parts):
    before = copy.deepcopy(parts)
    found = joined(dict(reversed(parts.items())), sheet)
    assert parts == before, "the parts are left as they are"
    assert [(row["family"], row["name"]) for row in found["rows"]] == [
        (family.name, row.name) for family in sheet.families for row in family.rows
    ], "in the order of the sheet, whatever that of the parts is"
    assert found["rows"] == [row for one in parts.values() for row in one["rows"]], "anchors are the rows' own"
    (said,) = found["verdicts"]
    assert (said["verdict"], said["rows"], said["geomean"], said["missing"]) == ("met", 4, 2.0, [])
    assert found["command"] == "polyattn bench sheet.yaml --rows step; polyattn bench sheet.yaml --rows prefill"
    assert set(found["lost"]) == {place for one in parts.values() for place in one["lost"]}
    assert [(one["rows"], one["anchors"]) for one in found["parts"]] == [(2, RATES), (2, RATES)]
    assert "In 2 parts, each on a device of its own; the middle of what those did: matmul 700, 700 TFLOP/s" in (
        pages.markdown(found)
    )
    alone = joined({"prefill.json": parts["prefill.json"]}, sheet)
    assert alone["verdicts"][0]["verdict"] == "incomplete", "rows that no part has are missing"
    assert "parts" not in pages.markdown(alone)


def test_a_page_says_when_rows_were_measured_and_which_once_more(sheet, parts):
    found = joined(parts, sheet)
    assert pages.caption(found) == "2026-11-22, A device; polyattn 0.1.0, driver 1"
    assert pages.again_line(found) == ""
    found["rows"][1] |= {"date": "2026-11-24", "replaced": 1, "code": "of another day"}
    text = pages.markdown(found)
    assert text.startswith("2026-11-22 to 2026-11-24, A device; ")
    assert "1 of 4 rows, marked *, were measured again after the others; that is what is shown, and the" in text
    assert "measurement before it is not kept. They are of 2 states of polyattn's code." in text
    assert f"| {found['rows'][1]['name']} \\* | 1 (10%)" in text


def test_a_page_says_what_entries_are_what_bounds_them_and_what_they_take(sheet, parts):
    found = joined(parts, sheet)
    text = pages.markdown(found)
    assert "called through polyattn; called by hand: `peer` A library." in text
    assert "`step`: GB/s (share of read, which bounds it)" in text
    assert "| row | polyattn/own | peer | choice | MiB: choice, least, most |" in text
    assert "| tuned own 1.00 | 3, 1 peer, 3 polyattn/own |" in text
    found["rows"][0]["bound"] = "read"
    text = pages.markdown(found)
    assert "`prefill`: TFLOP/s (share of read or matmul, which bounds it)" in text
    assert "| 1 (10%) | 0.5 (5%) | read | tuned own 1.00 |" in text


def test_a_page_says_once_who_failed_for_one_reason(sheet, parts):
    found = joined(parts, sheet)
    first, second = found["rows"][:2]
    for name in ("peer", "other", "third"):
        for row in (first, second):
            row["entries"][name] = {"kind": "refused", "failed": "no such rows"}
    second["entries"]["third"] = {"kind": "failed", "failed": "of its own"}
    second["note"] = "a note"
    text = pages.markdown(found)
    assert "- peer, other: no such rows (every row)" in text
    assert f"- third: no such rows ({first['name']})" in text
    assert f"- third: of its own ({second['name']})" in text
    assert f"- a note ({second['name']})" in text


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("device", "Another", "device differs: A device in prefill.json, Another in step.json. Only parts of one"),
        ("versions", {"polyattn": "0.1.0", "driver": "2"}, "versions differs: driver: 1 in prefill.json, 2 in"),
        ("settings", {"seconds": 0.1}, "settings differs: seconds: 0.06 in prefill.json, 0.1 in step.json, tune"),
        ("sheets", {"sheet": "0"}, "sheets differs: sheet: .* in prefill.json, 0 in step.json"),
        ("quick", True, "quick differs: False in prefill.json, True in step.json"),
    ],
)  # fmt: skip
def test_parts_of_different_runs_are_refused(sheet, parts, name, value, said):
    parts["step.json"][name] = value
    with pytest.raises(ConfigError, match=said):
        joined(parts, sheet)


def test_the_sheets_must_be_those_that_were_measured(parts, tmp_path):
    (tmp_path / "sheet.yaml").write_text(SHEET.replace("80", "81"))
    with pytest.raises(
        ConfigError, match=r"--join: the sheets are not those that were measured: sheet: .* in prefill\."
    ):
        joined(parts, read([tmp_path / "sheet.yaml"]))


def test_a_row_is_accepted_in_one_part_only(sheet, parts):
    again = part(sheet, "step")
    with pytest.raises(
        ConfigError, match=r"step/.*KV40 page 16 is accepted in step\.json and in again\.json: .* no row"
    ):
        joined({**parts, "again.json": again}, sheet)
    # One that a part rejected is taken from the part that did not.
    first, second = parts["step.json"]["rows"]
    first |= {"accepted": False, "moved": 0.05}
    second |= {"accepted": False, "moved": 0.06}
    again["rows"][1] |= {"accepted": False, "moved": 0.04}
    found = joined({**parts, "again.json": again}, sheet)
    assert [(row["accepted"], row["moved"]) for row in found["rows"]] == [
        (True, 0.01), (True, 0.01), (True, 0.01), (False, 0.04)
    ]  # fmt: skip
    assert found["verdicts"][0]["missing"] == [f"step/{second['name']}"]


def test_what_bounds_a_row_must_be_the_same_on_all_devices(sheet, parts):
    """The device of one part does products 4% slower: of its rows those are rejected that are bound by them."""
    slow = part(sheet, "prefill", matmul=670.0)
    slow["rows"][1]["bound"] = "read"
    fast = part(sheet, "step")
    fast["rows"], parts["step.json"]["rows"] = fast["rows"][:1], parts["step.json"]["rows"][1:]
    found = joined({"prefill.json": slow, "fast.json": fast, "step.json": parts["step.json"]}, sheet)
    assert [(row["accepted"], row.get("apart")) for row in found["rows"]] == [
        (False, 0.0429), (True, None), (True, None), (True, None)
    ]  # fmt: skip
    assert found["verdicts"][0]["missing"] == [f"prefill/{slow['rows'][0]['name']}"]
    assert "(rejected: its device is 4% from the others)" in pages.markdown(found)
    near = part(sheet, "prefill", matmul=680.0)
    found = joined({"prefill.json": near, "fast.json": fast, "step.json": parts["step.json"]}, sheet)
    assert all(row["accepted"] for row in found["rows"])


def test_parts_are_read_once_each(sheet, parts, tmp_path):
    path = tmp_path / "part.json"
    results.save(parts["step.json"], path)
    assert read_parts([path]) == {str(path): parts["step.json"]}
    with pytest.raises(ConfigError, match=r"--join .*part\.json is named twice"):
        read_parts([path, path])
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no result of `polyattn bench`"):
        read_parts([path])
