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
