"""Every error polyattn raises. Each message says what, which value, what is allowed, and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "BackendUnavailableError",
    "BusyError",
    "ConfigError",
    "GraphError",
    "InternalError",
    "InvalidInputError",
    "OutOfPagesError",
    "PluginError",
    "PolyattnError",
    "RankError",
    "UnsupportedRequestError",
    "did_you_mean",
    "without_torch",
]


class PolyattnError(Exception):
    """Base of every error raised by polyattn."""


class InvalidInputError(PolyattnError, ValueError):
    """An argument has a wrong shape, dtype, device or value. No backend could serve it."""


class UnsupportedRequestError(PolyattnError, NotImplementedError):
    """The call is valid, but no backend (or not the one asked for) can serve it.

    Attributes:
        rejected: backend name -> the reasons it gave, in the order they were asked.
    """

    def __init__(self, message: str, rejected: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(message)
        self.rejected: dict[str, list[str]] = {k: list(v) for k, v in (rejected or {}).items()}


class BackendUnavailableError(PolyattnError, RuntimeError):
    """A backend asked for by name is unknown, not installed, planned or broken here."""


class PluginError(PolyattnError, RuntimeError):
    """A plugin broke the contract: its package, its records or one of its hooks."""


class ConfigError(PolyattnError, ValueError):
    """A configuration value, key, file or environment variable is wrong."""


class OutOfPagesError(PolyattnError, RuntimeError):
    """A KV cache has fewer free pages than a request needs now. Nothing was taken: the call can be made again.

    Attributes:
        wanted: pages that were needed. free: pages there were. capacity: pages there can ever be.
        group: the group of layers whose pages ran out; None where the allocator was asked directly.
    """

    def __init__(
        self, message: str, wanted: int = 0, free: int = 0, capacity: int = 0, group: int | None = None
    ) -> None:
        super().__init__(message)
        self.wanted, self.free, self.capacity, self.group = wanted, free, capacity, group


class BusyError(PolyattnError, RuntimeError):
    """An engine takes no request now: as many wait as may, or it is shutting down. Nothing was taken in.

    Attributes:
        passing: whether the same engine may take it later.
    """

    def __init__(self, message: str, passing: bool = True) -> None:
        super().__init__(message)
        self.passing = passing


class GraphError(PolyattnError, RuntimeError):
    """A step cannot be recorded into a device graph, or a recording no longer fits what it is replayed for.

    Attributes:
        violations: one sentence each, with the operator and the line of code where one is to blame.
    """

    def __init__(self, message: str, violations: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.violations = list(violations)


class InternalError(PolyattnError, RuntimeError):
    """A bookkeeping contradicts itself: a defect of polyattn, or of code that changed it from outside."""


class RankError(PolyattnError, RuntimeError):
    """Another rank of the job refused a call that all of them make together, or did not come to it in time."""


def without_torch(what: str) -> str:
    """The sentence about something that needs torch, where there is none."""
    return (
        f"{what} needs torch, which is not installed here: pip install 'torch>=2.11', or the build for your device "
        f"from https://pytorch.org/get-started/locally"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence offering the nearest of `known`, whatever the case, with a leading space, or an empty string."""
    names = {n.lower(): n for n in sorted(set(known))}
    near = [names[n] for n in difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.6)]
    # A word that is known is not what is wrong: to offer it back helps nobody.
    return f" Did you mean {' or '.join(map(repr, near))}?" if near and name not in near else ""
