"""What every test of methods starts from: no configuration, and nobody asked for a method before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import polyattn


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    polyattn.configure()
    yield
    polyattn.configure()
