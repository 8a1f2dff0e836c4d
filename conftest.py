"""What every test of this repository shares is what a plugin's own tests use: the options and fixtures of the kit."""

import contextlib
import gc
import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence

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

# It took a third of the time until all tests are collected; `pytest_runtestloop` turns it on again.
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
        "slow(keep=0, quick=''): the cases of this test are slow or very many; without --polyattn-full `keep` of them "
        "run, the same ones each time, and those with `quick` in their names, which are neither",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--polyattn-full` runs: of each test that is marked slow all cases but `keep`."""
    if config.getoption("--polyattn-full"):
        return
    cases = defaultdict(list)
    for item in items:
        if (marker := item.get_closest_marker("slow")) is None:
            continue
        quick = marker.kwargs.get("quick", "")
        if not quick or quick not in item.nodeid:
            cases[item.nodeid.partition("[")[0], marker.kwargs.get("keep", 0)].append(item)
    named = [one for one in config.args if "::" in one]
    left_out: set[pytest.Item] = set()
    for (_, keep), found in cases.items():
        # Drawn, not every nth: what alternates in a list of parameters would be left out as one. By their names, so
        # that a case that is kept of all is kept of some.
        drawn = sorted(found, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        left_out.update(item for item in drawn[keep:] if not _is_named(item, named))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _is_named(item: pytest.Item, arguments: Sequence[str]) -> bool:
    """Whether somebody asked for this case, for all of its test, or for its class."""
    case = _in_its_file(item.nodeid)
    return any(case == one or case.startswith((f"{one}[", f"{one}::")) for one in map(_in_its_file, arguments))


def _in_its_file(name: str) -> str:
    """A name without the folders, which are another's where pytest is started in another."""
    file, _, rest = name.partition("::")
    return f"{file.rpartition('/')[2]}::{rest}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Keep the garbage collector from walking again and again over what was made until now, which stays."""
    gc.collect()
    gc.freeze()
    gc.enable()
