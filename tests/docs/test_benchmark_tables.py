"""docs/benchmarks.md shows the committed result files and nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_dispatch_table_is_the_result_file():
    spec = importlib.util.spec_from_file_location("dispatch_benchmark", ROOT / "benchmarks" / "dispatch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = json.loads((ROOT / "benchmarks" / "results" / "dispatch.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = page.split("<!-- dispatch -->\n")[1].split("\n<!-- /dispatch -->")[0]
    assert shown == module.markdown(result)
    over = {n: r["added"] for n, r in result["rows"].items() if r["added"] > result["budgets"].get(n, r["added"])}
    assert not over, "the committed run is over budget"
    for host in ("transformers sdpa", "diffusers native"):
        assert result["rows"]["functional"]["added"] < result["rows"][host]["added"]


def test_kv_cache_accuracy_table_is_the_result_file():
    spec = importlib.util.spec_from_file_location("kv_cache_accuracy", ROOT / "benchmarks" / "kv_cache_accuracy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = json.loads((ROOT / "benchmarks" / "results" / "kv-cache-accuracy.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = page.split("<!-- kv-cache-accuracy -->\n")[1].split("\n<!-- /kv-cache-accuracy -->")[0]
    assert shown == module.markdown(result)
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


def test_step_metadata_table_is_the_result_file():
    spec = importlib.util.spec_from_file_location("step_metadata", ROOT / "benchmarks" / "step_metadata.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = json.loads((ROOT / "benchmarks" / "results" / "step-metadata.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = page.split("<!-- step-metadata -->\n")[1].split("\n<!-- /step-metadata -->")[0]
    assert shown == module.markdown(result)
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


def test_serving_layer_table_is_the_result_file():
    spec = importlib.util.spec_from_file_location("serving_layer", ROOT / "benchmarks" / "serving_layer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = json.loads((ROOT / "benchmarks" / "results" / "serving-layer.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = page.split("<!-- serving-layer -->\n")[1].split("\n<!-- /serving-layer -->")[0]
    assert shown == module.markdown(result)
    for row in result["rows"]:
        assert row["us"]["forward_decode"]["us"] <= result["budget"], "the committed run is over budget"
