"""The vendors' own code behind the adapters, where it is at hand: see vendor_code.py."""

from __future__ import annotations

import pytest

from .vendor_code import RUNS, NotHereError


@pytest.mark.parametrize("name", RUNS)
def test_the_vendors_own_code(name: str) -> None:
    run = RUNS[name]
    try:
        failed = run.failed()
    except NotHereError as exc:
        pytest.skip(f"not run: {exc}")
    assert len(run.cases()) > 20
    assert failed == []
