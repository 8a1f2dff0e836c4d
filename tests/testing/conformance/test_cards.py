"""How the workers of a run share the cards of a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("worker", "visible", "seen"),
    [
        (None, "0,1,2,3", "0,1,2,3"),
        ("gw0", "0,1,2,3", "0,1,2,3"),
        ("gw2", "0,1,2,3", "2,3,0,1"),
        ("gw7", "GPU-a,GPU-b", "GPU-b,GPU-a"),
        ("gw3", "5", "5"),
        ("gw1", "", ""),
    ],
)
def test_workers_take_turns_with_the_cards(worker: str | None, visible: str, seen: str) -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": str(ROOT)}
    environ.pop("PYTEST_XDIST_WORKER", None)
    if worker:
        environ["PYTEST_XDIST_WORKER"] = worker
    code = "import conftest, os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == seen
