"""The benchmarks of gradients, DSA, dual chunk attention and quantised caches run, and time nothing that is wrong."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn.bench.measure import Clock

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", ["backward", "dsa", "dual_chunk", "quantised_caches"])
def test_small(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, capsys: Any) -> None:
    module, path = load(name), tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small", "--json", str(path)])
    module.main()
    result = json.loads(path.read_text())
    assert result["small"]
    assert all("not_timed" not in row for row in result["rows"])
    for row in result["rows"]:
        assert all(one["us"] > 0 for one in row["calls"].values()), row
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--render", str(path)])
    capsys.readouterr()
    module.main()
    assert capsys.readouterr().out.strip() == module.markdown(result)


def test_what_is_wrong_or_fails_is_not_timed(load: Any) -> None:
    module, right = load("beside"), torch.ones(4)

    def fails() -> torch.Tensor:
        raise RuntimeError("no room\nfor it")

    calls = {"right": right.clone, "wrong": lambda: right * 1.5, "none": lambda: right * torch.nan, "fails": fails}
    found = module.beside(calls, right, 0.1, Clock(torch.device("cpu"), 1e-4), 1)
    assert "us" in found["right"]
    assert "more than 0.1" in found["wrong"]["not_timed"]
    assert "error is nan" in found["none"]["not_timed"]
    assert found["fails"] == {"not_timed": "RuntimeError: no room"}
    assert module.times_as_fast(found, "right", "wrong", "fails") is None


def test_ratios_are_to_the_fastest_other(load: Any) -> None:
    found = {"a": {"us": 2.0}, "b": {"us": 6.0}, "c": {"us": 8.0}, "d": {}}
    assert load("beside").times_as_fast(found, "a", "c", "b", "d") == 3.0
    assert load("beside").times_as_fast(found, "d", "a") is None
