"""pytest's side of the kit, `-p polyattn.testing.plugin`: its options, and how a test asks for a chip.

pytest --pyargs polyattn.testing.suite -p polyattn.testing.plugin --polyattn-backend mine
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from ..contract import DeviceReport
from ..registry.manager import get_manager

pytest.register_assert_rewrite("polyattn.testing.conforming", "polyattn.testing.declaring")

# After the line above: what is imported before it keeps its plain assert statements.
from .conforming import BACKEND, DEVICE, FULL, STRICT  # noqa: E402

__all__ = ["device"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("polyattn")
    group.addoption(BACKEND, metavar="NAME", help="backend that polyattn.testing.suite is run for")
    group.addoption(
        DEVICE, metavar="DEVICE", help="torch device of the conformance tests (default: the backend's, else the CPU)"
    )
    group.addoption(
        STRICT,
        action="store_true",
        default=False,
        help="a test that needs a chip fails, instead of being skipped, on a machine without it",
    )
    group.addoption(FULL, action="store_true", default=False, help="run the long version of tests that have one")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Callable[..., DeviceReport]:
    """`device("rocm", "cuda", what="these kernels")`: the report of the first of these devices that is here; with none
    of them, `what` is reported as not run."""

    def need(*platforms: str, what: str) -> DeviceReport:
        lacking = []
        for platform in platforms:
            module, _, function = get_manager().platforms[platform].detect.partition(":")
            report: DeviceReport = getattr(importlib.import_module(module), function)()
            if report.present:
                return report
            lacking.append(f"no {platform} device: {report.detail}")
        reason = f"not run: {what} ({'; '.join(lacking)})"
        if request.config.getoption(STRICT):
            pytest.fail(reason)
        pytest.skip(reason)

    return need
