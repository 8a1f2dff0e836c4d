"""What every test of this repository shares is what a plugin's own tests use: the options and fixtures of the kit."""

import contextlib
import os

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

# Triton reads its switch when it is first imported, by whoever that is: before any test, then.
if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine is slow, and no test says how fast one has to be.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")

pytest_plugins = ["polyattn.testing.plugin"]
