"""examples/diffusion_transformer.py is a hand-written model: every sparse video method serves it by its name."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from polyattn.methods.video.records import PORTABLE

EXAMPLE = Path(__file__).parents[2] / "examples" / "diffusion_transformer.py"
LAYERS = 2


def ran(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[float, str]:
    """(the norm that it says, what its run says)."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, _, told = capsys.readouterr().out.partition("\n")
    found = re.search(r"norm ([\d.]+)$", first)
    assert found is not None, first
    return float(found[1]), told


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("method", PORTABLE)
def test_it_runs_under_every_method(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = ran("--attention-backend", method, monkeypatch=monkeypatch, capsys=capsys)
    lines = told.splitlines()
    cross = [line for line in lines if "sparse video methods never serve cross-attention" in line]
    served = [line for line in lines if f" calls, {method}, density " in line]
    assert len(cross) == 1
    assert cross[0].startswith("layers without a number: 8 calls")
    # Layers of vmoba_attn cut the grid in turns, so that each has another density.
    assert len(served) == (LAYERS if method == "vmoba_attn" else 1), told
    calls = sum(int(n) for line in lines if line not in cross for n in re.findall(r": (\d+) calls?,", line))
    assert calls == 4 * LAYERS, "each step of each layer is told once"


def test_it_is_dense_where_all_tiles_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    how = {"monkeypatch": monkeypatch, "capsys": capsys}
    dense, _ = ran(**how)  # type: ignore[arg-type]
    name = ("--attention-backend", "video_sparse_attn", "--attention-backend-config")
    full, told = ran(*name, '{"sparsity": 0, "coarse": "off"}', **how)  # type: ignore[arg-type]
    assert full == pytest.approx(dense, rel=1e-4)
    assert "density 1;" in told
    sparse, _ = ran(*name, '{"sparsity": 0.9, "coarse": "one"}', **how)  # type: ignore[arg-type]
    assert sparse != pytest.approx(dense, rel=1e-4)
