"""One number for 'something that decides has changed': plugins, process-wide configuration, the tuning store.

Caches compare it and start over. `token` is the same as a string, for guards of compiled code.
"""

from __future__ import annotations

__all__ = ["EPOCH", "bump"]


class _Epoch:
    __slots__ = ("token", "value")

    def __init__(self) -> None:
        self.value = 0
        self.token = "epoch-0"


EPOCH = _Epoch()


def bump() -> None:
    """Every cached choice is stale from here on."""
    EPOCH.value += 1
    EPOCH.token = f"epoch-{EPOCH.value}"
