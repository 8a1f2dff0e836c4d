"""docs/benchmarks.md shows the committed result files and nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def committed(monkeypatch):
    """`committed("dispatch")`: the benchmark's module and its result file."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def read(name):
        module = importlib.import_module(name.replace("-", "_"))
        return module, json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    return read


def test_the_page_is_what_its_command_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("page")
    text = page.PAGE.read_text()
    assert page.written(text) == text, "python benchmarks/page.py writes it"
    shown = {name for _, name, _ in page.BLOCK.findall(text)}
    with pytest.raises(SystemExit, match=r"shows no-such-run, but there is no no-such-run\.json among the results"):
        page.written("<!-- no-such-run -->\n<!-- /no-such-run -->")
    results = {path.stem for path in page.RESULTS.glob("*.json")}
    assert {name for name in results if not name.startswith("conformance-")} == shown, "every result is shown"


def test_attention_kernels_are_held_to_the_bars_of_their_sheet():
    from polyattn.bench import results
    from polyattn.bench.sheets import read

    sheet = read([ROOT / "benchmarks" / "attention_kernels.yaml"])
    result = results.load(ROOT / "benchmarks" / "results" / "attention-kernels.json")
    rows = [row for family in sheet.families for row in family.rows]
    assert result["sheets"] == dict(sheet.digests)
    assert {(row["family"], row["name"]) for row in result["rows"]} == {(row.family, row.name) for row in rows}
    assert results.summed(result, sheet, rows)["verdicts"] == result["verdicts"]


def test_dispatch_table_is_the_result_file(committed):
    _, result = committed("dispatch")
    over = {n: r["added"] for n, r in result["rows"].items() if r["added"] > result["budgets"].get(n, r["added"])}
    assert not over, "the committed run is over budget"
    for host in ("transformers sdpa", "diffusers native"):
        assert result["rows"]["functional"]["added"] < result["rows"][host]["added"]


def test_kv_cache_accuracy_table_is_the_result_file(committed):
    module, result = committed("kv-cache-accuracy")
    rows = result["rows"]
    assert rows["fp8_e4m3, by tensor"]["of_bf16"] == 0.5
    assert rows["fp4_e2m1, by 16 numbers"]["of_bf16"] == 0.28125
    assert rows["latent fp8_e4m3, by 128 numbers"]["of_bf16"] == 656 / 1152
    first = module.measure(layers=1, tokens=48, seed=result["seed"])
    assert first.keys() == rows.keys()
    for name, row in first.items():
        assert (row["bytes"], row["of_bf16"]) == (rows[name]["bytes"], rows[name]["of_bf16"])
        for kind in ("plain", "outliers"):
            assert 0.5 < row[kind][0] / max(rows[name][kind]) < 2, "the committed figures are of this code"


def test_step_metadata_table_is_the_result_file(committed):
    module, result = committed("step-metadata")
    rows = {(row["requests"], row["backends"]): row["ways"] for row in result["rows"]}
    assert {n for n, _ in rows} == {1, 4, 16, 64, 256}
    for ways in rows.values():
        assert ways["built"]["new_bytes"] == ways["advanced"]["new_bytes"] == 0
    for n in (1, 4, 16, 64, 256):
        alone, all_ = rows[n, 1], rows[n, 20]
        assert all_["built"]["bytes"] == alone["built"]["bytes"], "backends beyond the first cost nothing"
        assert all_["built"]["us"] < all_["rebuilt"]["us"] / 4
    problem = module.Problem(4)
    module.check(problem)
    found = module.measured(problem, 2, rounds=2)
    for name in ("built", "advanced"):
        for figure in ("operators", "bytes", "new_bytes"):
            assert found[name][figure] == rows[4, 2][name][figure], "the committed figures are of this code"


def test_serving_layer_table_is_the_result_file(committed):
    _, result = committed("serving-layer")
    for row in result["rows"]:
        assert row["us"]["forward_decode"]["us"] <= result["budget"], "the committed run is over budget"
