"""benchmarks/random_shapes.py: how good choices and kernels are on rows that nobody chose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ALL, FEW = "everything here", "Triton and PyTorch"


@pytest.fixture
def random_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import random_shapes

    yield random_shapes
    for name in ("random_shapes", "report"):
        sys.modules.pop(name, None)


def row(us: dict[str, float], choice: dict[str, str], **more: Any) -> dict[str, Any]:
    own = [name for name in us if name.startswith("polyattn/") and name != "polyattn/fa"]
    found = {"family": "random_short", "kind": "dense", "us": us, "few": own, "choice": {ALL: choice, FEW: choice}}
    return {**found, **more}


def test_a_choice_is_held_to_the_fastest_that_is_installed(random_shapes: ModuleType) -> None:
    one = row(
        {"polyattn/fa": 10.0, "polyattn/triton": 20.0, "polyattn/torch_sdpa": 25.0, "fa3": 9.0},
        {"rules": "polyattn/torch_sdpa", "model": "polyattn/triton", "tuned": "polyattn/gone"},
    )
    assert random_shapes.speeds(one, ALL, "rules") == pytest.approx(0.4)
    assert random_shapes.speeds(one, FEW, "rules") == pytest.approx(0.8)
    assert random_shapes.speeds(one, FEW, "model") == 1
    assert random_shapes.speeds(one, ALL, "tuned") is None, "who was not timed has no speed"
    assert random_shapes.over_libraries(one) == pytest.approx(9 / 20), "called by hand or through polyattn"


def test_a_call_costs_its_host_where_that_takes_longer(random_shapes: ModuleType) -> None:
    one = row(
        {"polyattn/triton": 20.0, "polyattn/torch_sdpa": 25.0},
        {"rules": "polyattn/torch_sdpa", "model": "polyattn/triton"},
        host={"polyattn/triton": 50.0, "polyattn/torch_sdpa": 10.0},
    )
    assert random_shapes.speeds(one, ALL, "rules") == 1
    assert random_shapes.speeds(one, ALL, "model") == pytest.approx(0.5)


def test_a_host_is_timed_again_whenever_it_is_asked(random_shapes: ModuleType) -> None:
    """The least of two moments counts (`measured`): now and then the host is taken away for longer than a call."""
    moments = iter([9e-5, 8e-5, 7e-5, 2e-5, 3e-5])

    class Stopped:
        def issues(self, calls: list[Any]) -> Any:
            return types.SimpleNamespace(seconds=next(moments))

        def calls(self, calls: list[Any]) -> float:
            return 0.0

        def graph(self, calls: list[Any]) -> Any:
            return (lambda: 0.0,)

    one = types.SimpleNamespace(what=types.SimpleNamespace(prepare=lambda inputs: lambda number: None))
    _, took = random_shapes._timing(one, types.SimpleNamespace(count=2), Stopped(), recorded=False)
    assert (took(), took()) == (7e-5, 2e-5)
    assert random_shapes._timing(one, types.SimpleNamespace(count=2), Stopped(), recorded=True)[1] is None


def test_the_tables_count_who_is_low(random_shapes: ModuleType) -> None:
    times = {"polyattn/triton": 10.0, "polyattn/torch_sdpa": 12.5, "fa3": 7.0}
    choice = {"rules": "polyattn/torch_sdpa", "model": "polyattn/triton", "tuned": "polyattn/triton"}
    result = {"date": "2026-01-02", "machine": "a device", "versions": {"torch": "2"}}
    more = {"row": "a", "model": "seed 1", "first": {}}
    training = row(times, choice, kind="training", family="random_training", **more)
    rows = [row(times, choice, **more), training, {"note": "not checked"}]
    said = random_shapes.markdown({**result, "rows": rows})
    assert "of 3 rows 2 were checked in time" in said
    assert f"| {ALL} | `--rules seed` | 2 | 0.800 | 0.80 | 2 | 0 |" in said
    assert f"| {FEW} | tuned | 2 | 1.000 | 1.00 | 0 | 0 |" in said
    assert "| all but training | 1 | 0.700 | 0.70 | 1 | 1 |" in said
    assert "| training | 1 | 0.700 | 0.70 | 1 | 1 |" in said


def test_who_is_low_is_named_with_both_measurements(random_shapes: ModuleType) -> None:
    """A time that the first rounds do not agree with is seen as such where nothing but the summary is left."""
    times = {"polyattn/triton": 500.0, "polyattn/torch_sdpa": 25.0, "fa3": 20.0}
    chosen = {"rules": "polyattn/torch_sdpa", "model": "polyattn/triton", "tuned": "polyattn/torch_sdpa"}
    more = {"row": "a", "model": "seed 1", "first": {"polyattn/triton": 30.0}, "host": {"polyattn/triton": 90.0}}
    low = list(random_shapes.low_rows([row(times, chosen, **more)]))
    assert low == [
        ["short: a, seed 1", "our Triton kernels", "triton 500 (first rounds: 30)", "0.04"],
        ["short: a, seed 1", f"the cost model, {ALL}", "triton 500", "0.05"],
        ["short: a, seed 1", f"the cost model, {FEW}", "triton 500", "0.05"],
    ]
    fast = row({**times, "polyattn/triton": 20.0}, {**chosen, "model": "polyattn/triton"}, **{**more, "host": {}})
    assert list(random_shapes.low_rows([fast])) == []


def test_a_sheet_is_checked_timed_and_written_down(tmp_path: Path) -> None:
    dense = {"heads": 2, "kv_heads": 1, "head_dim": 16, "batch": 1, "q_len": 40, "causal": True}
    paged = {"heads": 2, "kv_heads": 1, "head_dim": 16, "batch": 2, "q_len": 1, "kv_len": 40, "page_size": 16}
    sheet = {
        "title": "two rows",
        "families": {"some": {"kind": "dense", "rows": [dense]}, "others": {"kind": "paged", "rows": [paged]}},
        "bars": [],
    }
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(sheet, sort_keys=False))
    subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / "random_shapes.py"),
            str(tmp_path / "two.yaml"),
            "--device=cpu",
            "--processes=1",
            f"--json={tmp_path / 'out.json'}",
        ],
        check=True,
        env={**os.environ, "POLYATTN_EXTRA_PLUGINS": "", "POLYATTN_TUNING_STORE": str(tmp_path / "store")},
    )
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [one["family"] for one in rows] == ["some", "others"]
    for one in rows:
        assert min(one["us"].values()) > 0
        assert "polyattn/torch_sdpa" in one["us"]
        assert {"rules", "model", "tuned", "source"} <= one["choice"][ALL].keys()
        assert one["choice"][ALL]["tuned"] in one["us"]
        assert set(one["few"]) <= set(one["us"])
        assert one["measurement"]["key"]["batch"] == {"some": 1, "others": 2}[one["family"]]
