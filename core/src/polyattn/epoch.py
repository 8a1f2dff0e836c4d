"""One number for 'something that decides has changed': plugins, process-wide configuration, the tuning store.

Caches compare it and start over. `token` is for guards of compiled code: another string once what that code was made
with has changed. To trace anew costs seconds, and torch.compile gives up after a few times.
"""

from __future__ import annotations

__all__ = ["EPOCH", "bump"]


class _Epoch:
    __slots__ = ("token", "value")

    def __init__(self) -> None:
        self.value = 0
        self.token = "epoch-0"


EPOCH = _Epoch()


def bump(*, traced: bool = True) -> None:
    """Every cached choice is stale from here on. traced: compiled code too."""
    EPOCH.value += 1
    if traced:
        EPOCH.token = f"epoch-{EPOCH.value}"
