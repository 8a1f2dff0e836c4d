"""Tests of single calls that need a vendor's library on a GPU."""

from __future__ import annotations

import pytest

from polyattn.testing.conforming import STRICT
from polyattn.testing.emulators import OnDevice

__all__ = ["need"]


def need(backend: str, request: pytest.FixtureRequest) -> None:
    """Skip the test where a backend ("name@cuda") is not here; under --polyattn-strict-device only a backend that is
    not for this architecture is not run."""
    here = type("Here", (OnDevice,), {"backend": backend})._place(None, None)
    if here.missing:
        strict = request.config.getoption(STRICT, False) and not here.other
        (pytest.fail if strict else pytest.skip)(f"not run: {here.missing}")
