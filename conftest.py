"""What every test of this repository shares: the option for machines that must have a chip, and how to ask for one."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from polyattn.plugins import get_manager
from polyattn.records import DeviceReport

STRICT_DEVICE = "--polyattn-strict-device"
FULL = "--polyattn-full"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("polyattn")
    group.addoption(
        STRICT_DEVICE,
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
        if request.config.getoption(STRICT_DEVICE):
            pytest.fail(reason)
        pytest.skip(reason)

    return need
