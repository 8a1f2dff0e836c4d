"""What the conformance tests share."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: compiles a program, seconds each; leave out with -m 'not slow'")


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    # Cases draw their tensors from generators of their own; dropout draws from this one.
    torch.manual_seed(0)
