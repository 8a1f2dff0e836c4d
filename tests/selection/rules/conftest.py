"""The rules are data in six packages: these tests ask them all."""

from __future__ import annotations

import pytest

from polyattn.registry.manager import get_manager

VENDORS = ("ascend", "cuda", "musa", "rocm", "triton", "xpu")


@pytest.fixture(scope="session", autouse=True)
def every_vendor_package_is_here() -> None:
    plugins = get_manager().plugins
    absent = [f"plugins/{name}" for name in VENDORS if name not in plugins or plugins[name].state != "ready"]
    if absent:
        pytest.fail(f"install {' '.join(absent)} first (pip install -e), or name them in POLYATTN_EXTRA_PLUGINS")
