"""The pages show the committed result files and nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def committed(monkeypatch):
    """`committed("dispatch")`: the benchmark's module and its result file."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def read(name):
        module = importlib.import_module(name.replace("-", "_"))
        return module, json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    return read


def test_the_pages_are_what_their_command_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("page")
    texts = [path.read_text() for path in page.PAGES]
    assert [page.written(text) for text in texts] == texts, "python benchmarks/page.py writes them"
    shown = {name.partition(":")[0] for text in texts for _, name, _ in page.BLOCK.findall(text)}
    with pytest.raises(SystemExit, match=r"shows no-such-run, but there is no no-such-run\.json among the results"):
        page.written("<!-- no-such-run -->\n<!-- /no-such-run -->")
    results = {path.stem for path in page.RESULTS.glob("*.json")}
    assert {name for name in results if not name.startswith("conformance-")} == shown, "every result is shown"


def test_the_pictures_are_of_the_results(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("page")
    assert page.outdated() == [], "python benchmarks/page.py draws them"
    folder = tmp_path / "bench-h200"
    folder.mkdir()
    monkeypatch.setattr(page, "PICTURES", tmp_path)
    assert page.outdated() == [folder], "a sheet has no picture"
    for path in (ROOT / "docs" / "images" / "bench-h200").glob("*.svg"):
        (folder / path.name).write_text(path.read_text())
    assert page.outdated() == []
    (folder / path.name).write_text("<svg/>")
    assert page.outdated() == [folder], "one is of something else"


SHEETS = {"attention-kernels": "attention_kernels.yaml", "bench-h200": "sheets"}
"""Results of `polyattn bench` -> what they are of."""


@pytest.mark.parametrize("name", [name for name in SHEETS if (RESULTS / f"{name}.json").is_file()])
def test_results_are_held_to_the_bars_of_their_sheets(name):
    from polyattn.bench import results
    from polyattn.bench.sheets import read

    sheet = read([ROOT / "benchmarks" / SHEETS[name]])
    result = results.load(RESULTS / f"{name}.json")
    rows = [row for family in sheet.families for row in family.rows]
    assert result["sheets"] == dict(sheet.digests)
    assert {(row["family"], row["name"]) for row in result["rows"]} <= {(row.family, row.name) for row in rows}
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


def test_shipped_tables_are_held_to_what_they_say_of_requests_they_do_not_have(committed):
    module, result = committed("shipped-tables")
    assert module.measure() == result["devices"], "python benchmarks/shipped_tables.py writes it"
    for installed in result["devices"].values():
        assert list(installed) == ["all libraries", "Triton and PyTorch"]
        for rows, unseen, model in zip(installed.values(), (0.96, 0.99), (0.94, 0.99), strict=True):
            assert sum(row["predicted"] for row in rows) > len(rows) * 3 / 4
            figures = [float(module.figures(rows, who)[0]) for who in ("rules", "unseen", "model")]
            assert figures[1] >= unseen > figures[0], "asked of choices that nobody measured"
            assert figures[2] >= model > figures[0], "and of those for models that nobody did"
        low = [float(row["unseen"][1]) < module.LOW for row in installed["all libraries"]]
        assert sum(low) * 15 < len(low)


def test_kernel_counters_are_read_from_what_ncu_writes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("kernel_counters")
    stalls = {
        "barrier": "1.00",
        "wait": "0.50",
        "selected": "1.00",
        "math_pipe_throttle": "0.50",
        "not_issued_wait": "9",
    }
    names = ["Kernel Name", *module.METRICS.values(), *(module.STALL.format(name) for name in stalls)]

    def line(kernel, ns):
        cells = [kernel, ns, *["50.0"] * (len(module.METRICS) - 1), *stalls.values()]
        return ",".join(f'"{cell}"' for cell in cells)

    mark = line(f"{module.MARK}(long)", "1")
    rows = [mark, line("attend", "1,000"), line("_merge", "40")]
    text = ["==PROF== Connected", ",".join(f'"{name}"' for name in names), ",".join('""' for _ in names)]
    found = module.read(module.launches([*text, *rows * len(module.ROWS)]))
    assert [row["row"] for row in found] == list(module.ROWS), "what takes a twentieth of a row is left out"
    assert (found[0]["kernel"], found[0]["ns"], found[0]["tensor"]) == ("attend", 1000, 50)
    assert found[0]["waits"] == {"barrier": 33.3, "wait": 16.7, "math_pipe_throttle": 16.7}
    with pytest.raises(SystemExit, match="the first launch is attend"):
        module.read(module.launches([*text, *rows[1:]]))
    with pytest.raises(SystemExit, match=f"1 rows are marked, not {len(module.ROWS)}"):
        module.read(module.launches([*text, *rows]))
    result, counters = tmp_path / "kernel-counters.json", tmp_path / "counters.csv"
    counters.write_text("\n".join([*text, *rows * len(module.ROWS)]))
    with pytest.raises(SystemExit, match="the run under ncu writes this file first"):
        module.filled(result, counters)
    result.write_text(json.dumps({"benchmark": "engine"}))
    with pytest.raises(SystemExit, match="this is a result of engine"):
        module.filled(result, counters)
    result.write_text(json.dumps({"benchmark": "kernel-counters", "machine": "a GPU", "rows": []}))
    filled = module.filled(result, counters)
    assert (filled["machine"], filled["rows"]) == ("a GPU", found), "what ran is what the run wrote"


def test_no_cost_grows_faster_than_it_may(committed):
    module, result = committed("scaling")
    assert [row["name"] for row in result["rows"] if row["exponent"] > row["allowed"]] == []
    assert module.exponent([10, 100, 1000], [3.0, 30.0, 300.0]) == pytest.approx(1)
    assert module.exponent([10, 100, 1000], [3.0, 3.0, 3.0]) == pytest.approx(0)


def test_prefix_caching_costs_no_more_than_it_may(committed):
    module, result = committed("engine-soak")
    assert [module.wrong(row) for row in result["rows"] if module.wrong(row)] == []
    spoilt = {**result["rows"][0], "ratio": 1.11, "same_tokens": False, "leaked": True}
    assert module.wrong(spoilt) == ["1.11 times as long, 1.1 are allowed", "other tokens", "pages are lost"]
