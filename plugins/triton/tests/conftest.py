"""What the tests of several kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn import tuning
from polyattn.testing.conforming import STRICT
from polyattn_triton import runtime


@pytest.fixture
def on_hopper(device: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    """Where there is none the test is not run; under --polyattn-strict-device that is a failure."""
    what = "the Hopper kernels"
    device("cuda", what=what)
    found = torch.cuda.get_device_capability()
    if found != (9, 0):
        reason = f"not run: {what} (this GPU is of compute capability {found[0]}.{found[1]}, not 9.0)"
        (pytest.fail if request.config.getoption(STRICT, False) else pytest.skip)(reason)


@pytest.fixture
def interpreted() -> None:
    """Tests that emulate a kernel on the CPU are for processes that interpret: where Triton compiles, the launches
    beside it take no CPU tensors, and the kernel itself can be run."""
    if not runtime.INTERPRETED:
        pytest.skip("not run: the emulated kernel (the launches beside it are compiled here, and take no CPU tensors)")


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tuning store of the test's own."""
    with monkeypatch.context() as patched:
        patched.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "tuning.sqlite3"))
        patched.delenv("POLYATTN_TUNING", raising=False)
        tuning.reload()
        yield
    tuning.reload()
