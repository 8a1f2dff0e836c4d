"""The benchmark of sparse video methods, tiny and on the CPU: its rows run, and what is wrong is not timed."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import polyattn
from polyattn.methods import bound
from polyattn.semantics.block_maps import lists_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("video_sparse")
    polyattn.configure()


def run(module: Any, monkeypatch: pytest.MonkeyPatch, path: Path, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["video_sparse.py", "--cpu-smoke", "--json", str(path), *words])
    assert module.main() == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_its_rows_are_those_that_are_asked_for(module: Any) -> None:
    rows = {row.name: row for row in module.rows_of(yaml.safe_load(module.SHEET.read_text()))}
    lengths = {row.grid: math.prod(row.grid) for row in rows.values()}
    assert {(21, 30, 52): 32760, (21, 45, 80): 75600, (30, 48, 80): 115200}.items() <= lengths.items()
    assert {row.grid for row in rows.values() if row.method == "vmoba_attn"} == {(20, 28, 52), (20, 30, 52)}
    bars = {name: (row.must, row.stretch) for name, row in rows.items()}
    assert (bars["vsa_0.9/wan_480p"], bars["vsa_0.9_backward/wan_720p"]) == ((5, 6), (3, 4))
    assert [rows[f"window/{name}"].must for name in ("wan_480p", "wan_720p", "hunyuan_720p")] == [None] * 3
    assert {row.rest for row in rows.values()} == {0.35, 0.25}
    assert max(row.tiny().tokens for row in rows.values()) < 3000
    groups = module.groups_of(list(rows.values()))
    assert sum(map(len, groups)) == len(rows)
    for group in groups:
        assert len({(row.tokens, row.direction) for row in group}) == 1
        assert len({row.method for row in group}) == len(group), "a method has one set of options at a time"


def test_rows_run_and_no_figure_counts(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(module, monkeypatch, tmp_path / "result.json", "--only", "vsa_0.9", "svg2", "sla", "vmoba_threshold")
    rows = {row["name"].partition("/")[0]: row for row in result["rows"]}
    assert set(rows) == {"vsa_0.9", "vsa_0.9_backward", "svg2", "sla_0.95", "vmoba_threshold"}
    for name, row in rows.items():
        assert "not_timed" not in row, name
        assert row["ms"] > 0 < row["density"] < 1, name
        assert row["fastest"] == "torch_sdpa", name
        assert "verdicts" not in row, name
        assert any("@cpu" in kernel for kernel in row["served_by"]), name
        assert ("inner_ms" in row) == (row["direction"] == "forward"), name
    assert rows["svg2"]["executed"] > rows["svg2"]["density"], "clusters are filled up to blocks"
    # 2 of 18 tiles, of which those at the edges hold fewer keys and are filled up as queries.
    assert rows["vsa_0.9"]["density"] == pytest.approx(2 / 18, rel=0.5)
    text = capsys.readouterr().out
    assert "Tiny grids on a CPU: the figures mean nothing." in text
    assert "| vsa_0.9_backward/wan_480p | 600 |" in text
    assert "- svg2/wan_480p: centres 12, strength 1.63, spread 0.5, region [1, 1, 1]; density 0." in text
    assert module.markdown(result) in text


def test_windows_of_a_strategy_are_timed_at_several_places(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (row,) = run(module, monkeypatch, tmp_path / "result.json", "--only", "sta")["rows"]
    assert (row["samples"], row["text"]) == (2, [0, 40])
    # One tile of six along one axis or another, and the text.
    assert 0.3 < row["density"] < 0.4


def test_without_a_strategy_file_its_row_says_so(module: Any) -> None:
    sheet = yaml.safe_load(module.SHEET.read_text())
    (row,) = (row for row in module.rows_of(sheet) if row.name.startswith("sta/"))
    args = argparse.Namespace(cpu_smoke=False, sta_strategy=None, rounds=2, profile=False)
    shape = module.Shape(2, 32, torch.float32, CPU)
    (found,) = module.measured([row.tiny()], shape, sheet, args, Path())
    assert found["not_timed"] == "its windows are read from a file: give --sta-strategy FILE"
    assert "ms" not in found


@pytest.mark.parametrize("fault", ["the map", "the scale", "a gradient"])
def test_what_is_wrong_is_not_timed(
    fault: str, module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = bound._Inner._call

    def wrong(self: Any, call: Any, query: Any, key: Any, value: Any, given: Any) -> Any:
        given = dict(given)
        if fault == "the map":
            counts, indices = given["lists"]
            given["lists"] = counts, indices.roll(1, 2)
        elif fault == "the scale":
            given["scale"] = 0.95 * query.shape[-1] ** -0.5
        else:
            key = key.detach()
        return real(self, call, query, key, value, given)

    monkeypatch.setattr(bound._Inner, "_call", wrong)
    row = "vsa_0.9_backward" if fault == "a gradient" else "vsa_0.9/"
    (found,) = run(module, monkeypatch, tmp_path / "result.json", "--only", row)["rows"]
    assert found["not_timed"].startswith("differs from its reference on a small grid (relative L2 error): ")
    assert ("gradient of key" in found["not_timed"]) == (fault == "a gradient")
    assert "ms" not in found
    assert "Not timed:" in capsys.readouterr().out


def test_pairs_are_those_of_the_mask(module: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key = torch.zeros(2, 4, 40, 8), torch.zeros(2, 2, 50, 8)
    block_map = torch.rand(2, 4, 3, 7, generator=draw) < 0.5
    valid = torch.tensor([8, 3, 8, 0, 8, 8, 2], dtype=torch.int32)
    keys = torch.nn.functional.one_hot(torch.arange(50) // 8, 7)[torch.arange(50) % 8 < valid[torch.arange(50) // 8]]
    rows = torch.nn.functional.one_hot(torch.arange(40) // 16, 3)
    right = int((rows @ block_map.long() @ keys.T).sum())
    given = {"block_shape": (16, 8), "block_valid": valid}
    pairs_of = importlib.import_module("video.timing").pairs_of
    assert pairs_of(query, key, {**given, "block_map": block_map}) == right
    lists = lists_of(block_map)
    assert pairs_of(query, key, {**given, "lists": lists}) == right
    assert pairs_of(query, key, {}) == 2 * 4 * 40 * 50
    starts = {f"cu_seqlens_{side}": torch.tensor([0, *ends]) for side, ends in (("q", (3, 10)), ("k", (5, 6)))}
    assert pairs_of(torch.zeros(10, 4, 8), torch.zeros(6, 2, 8), starts) == 4 * (3 * 5 + 7 * 1)


def test_rows_are_held_to_their_bars(module: Any) -> None:
    row = module.Row("a", "svg2", (1, 1, 1), {}, {}, density=0.25, must=2.0, stretch=3.0, rest=0.25)
    limits = {"memory": 2.3, "memory_stretch": 1.3}
    shape = module.Shape(1, 1, torch.float32, CPU)

    def judged(ms: float, *, rest: float = 0.2, density: float = 0.25, memory: int = 100) -> list[str]:
        result = {
            "ms": ms,
            "inner_ms": 1.0,
            "rest_ms": rest,
            "density": density,
            "fastest": "fa",
            "dense": {"fa": {"ms": 6}},
        }
        module.judge(result, row, shape, limits, (memory, 100))
        return list(result["verdicts"].values())

    assert judged(2.0) == ["stretch", "met", "stretch"]
    assert judged(3.0, rest=0.3, memory=200) == ["met", "missed", "met"]
    assert judged(3.1, memory=231) == ["missed", "met", "missed"]
    assert judged(2.0, density=0.2) == ["stretch", "missed", "met", "stretch"], "fewer pairs than the bar is for"


def test_what_names_no_row_is_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["video_sparse.py", "--cpu-smoke", "--only", "nothing"])
    with pytest.raises(SystemExit):
        module.main()
    assert "--only nothing names no row; rows: vsa_0.9/wan_480p, " in capsys.readouterr().err
