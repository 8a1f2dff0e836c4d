"""What every test of this repository shares is what a plugin's own tests use: the options and fixtures of the kit."""

import contextlib
import gc
import os
import random
from collections import defaultdict

import pytest
import torch


def share_cards() -> None:
    """Each worker of pytest-xdist has another card of several as its first. A driver reads that when it is first asked,
    and counting here does not ask it."""
    count = torch.cuda.device_count()
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    turn = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cards)
    if turn:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*cards[turn:], *cards[:turn]])


share_cards()

# Until all tests are collected, when `pytest_collection_finish` turns it on again: a third of that time was its.
gc.disable()

# Triton reads its switch when it is first imported, by whoever that is: before any test, then.
if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine is slow, and no test says how fast one has to be.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")

pytest_plugins = ["polyattn.testing.plugin"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "slow(keep=0): the cases of this test are slow or very many; without --polyattn-full `keep` of them run, "
        "the same ones each time",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--polyattn-full` runs: of each test that is marked slow all cases but `keep`."""
    if config.getoption("--polyattn-full"):
        return
    cases = defaultdict(list)
    for item in items:
        if (marker := item.get_closest_marker("slow")) is not None:
            cases[item.nodeid.partition("[")[0], marker.kwargs.get("keep", 0)].append(item)
    left_out: set[pytest.Item] = set()
    for (test, keep), found in cases.items():
        # Drawn, not every nth: what alternates in a list of parameters would be left out as one.
        kept = random.Random(test).sample(found, min(keep, len(found)))
        left_out.update(set(found) - set(kept))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking again and again over what was made until now, which stays."""
    gc.collect()
    gc.freeze()
    gc.enable()
