"""What the tests of several kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyattn.testing.conforming import STRICT


@pytest.fixture
def on_hopper(device: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    """Where there is none the test is not run; under --polyattn-strict-device that is a failure."""
    what = "the Hopper kernels"
    device("cuda", what=what)
    found = torch.cuda.get_device_capability()
    if found != (9, 0):
        reason = f"not run: {what} (this GPU is of compute capability {found[0]}.{found[1]}, not 9.0)"
        (pytest.fail if request.config.getoption(STRICT, False) else pytest.skip)(reason)
