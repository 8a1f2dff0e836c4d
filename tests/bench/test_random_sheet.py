"""benchmarks/random_sheet.py: sheets of shapes that nobody chose."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from polyattn.bench.sheets import Sheet, read
from polyattn.bench.workloads import workload

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "random_sheet.py"


@pytest.fixture(scope="module")
def random_sheet() -> ModuleType:
    spec = importlib.util.spec_from_file_location("random_sheet", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(folder: Path, *words: str) -> Sheet:
    out = folder / f"random-{'-'.join(words)}.yaml"
    subprocess.run([sys.executable, str(SCRIPT), *words, "--out", str(out)], check=True)
    return read([out])


def test_a_seed_is_a_sheet_that_bench_reads(tmp_path: Path, random_sheet: ModuleType) -> None:
    sheet = made(tmp_path, "7", "--rows", "20")
    families = {family.name: family.rows for family in sheet.families}
    assert {name: len(rows) for name, rows in families.items()} == dict.fromkeys(random_sheet.FAMILIES, 20)
    rows = [row for some in families.values() for row in some]
    groups = {row.heads // row.kv_heads for row in rows if row.kind != "latent"}
    assert {3, 5, 6, 7, 12} <= groups
    assert {72, 80, 96} <= {row.head_dim for row in rows}
    assert all(row.window[0] > 0 and row.q_len == 1 for row in families["random_decode_windows"])
    assert all(not row.causal and 128 <= row.q_len <= 1024 for row in families["random_short"])
    assert all(1 in row.lengths and max(row.lengths) >= 2000 for row in families["random_packed"])
    assert all(3 <= row.q_len <= 600 for row in families["random_extend"])
    for row in rows:
        keys = sum(row.lengths) or row.batch * row.keys
        assert keys * row.kv_heads * sum(row.dims) * 2 < 2**31, f"{row.id} fills a device"
        assert workload(row.tiny(), torch.device("cpu")).request.head_dim == row.head_dim


def test_a_seed_says_everything_and_more_rows_go_on(random_sheet: ModuleType) -> None:
    few, many, other = random_sheet.drawn([7], 3), random_sheet.drawn([7], 8), random_sheet.drawn([8], 3)
    for name in random_sheet.FAMILIES:
        assert few["families"][name]["rows"] == many["families"][name]["rows"][:3]
        assert few["families"][name]["rows"] != other["families"][name]["rows"]


def test_seeds_are_one_sheet(random_sheet: ModuleType) -> None:
    both, alone = random_sheet.drawn([7, 8], 3), random_sheet.drawn([7], 3)
    assert both["title"] == "Random shapes, seeds 7, 8"
    for name in random_sheet.FAMILIES:
        rows = both["families"][name]["rows"]
        assert rows[:3] == alone["families"][name]["rows"]
        assert [row["model"] for row in rows] == ["seed 7"] * 3 + ["seed 8"] * 3
    twice = random_sheet.drawn([7, 7], 3)["families"]["random_decode"]["rows"]
    assert all(a != b for i, a in enumerate(twice) for b in twice[:i]), "bench refuses two rows that are one"


def test_some_families_are_a_sheet(random_sheet: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "some.yaml"
    monkeypatch.setattr(
        "sys.argv", ["random_sheet.py", "7", "--rows=2", "--families", "random_training", f"--out={out}"]
    )
    random_sheet.main()
    sheet = read([out])
    assert [family.name for family in sheet.families] == ["random_training"]
    assert [bar.name for bar in sheet.bars] == [
        "choice of sizes unseen",
        "tuned choice",
        "our training over the fastest library",
    ]
    assert (
        random_sheet.drawn([7], 2)["families"]["random_training"]["rows"][0]["q_len"] == sheet.families[0].rows[0].q_len
    )
