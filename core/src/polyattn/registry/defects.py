"""Known faults of libraries: which of them the installed versions have, and what selection does about each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..contract import AttentionRequest, BackendInfo, Defect, Provider, Rejected, Verdict
from ..contract.capability import holds
from .distributions import distribution_version, is_version, matches, normalise_distribution

__all__ = ["Listed", "Narrow", "affecting", "listed", "mended", "narrowing", "refusal"]

Narrow = Callable[[AttentionRequest], "Verdict | None"]
"""What is said of a request that capability rows accept: a refusal, or nothing."""


def affecting(provider: Provider, installed: Mapping[str, str] | None = None) -> tuple[Defect, ...]:
    """The faults that a provider's libraries have. A version that is not known has them all.

    Args:
        installed: what-if: normalised distribution name -> version ("" = any version); None = ask the machine.
    """
    return tuple(defect for defect in provider.defects if _has(defect, provider, installed))


def _has(defect: Defect, provider: Provider, installed: Mapping[str, str] | None) -> bool:
    also = (need.also for need in provider.requires if need.distribution == defect.library)
    for name in (defect.library, *itertools.chain.from_iterable(also)):
        version = distribution_version(name) if installed is None else installed.get(normalise_distribution(name))
        if version and is_version(version):
            return not defect.versions or matches(version, defect.versions)
    return True


def refusal(defects: Iterable[Defect], request: AttentionRequest, named: bool = False) -> Rejected | None:
    """The refusal of a request that runs into a fault.

    Args:
        request: in normal form. named: somebody asked for this very backend.
    """
    stopped = ("refused",) if named else ("refused", "by name")
    found = [defect for defect in defects if defect.done in stopped and holds(defect.when, request)]
    return Rejected([_sentence(defect) for defect in found]) if found else None


def _sentence(defect: Defect) -> str:
    unasked = "; it is not chosen by itself for this, and can be asked for by name" if defect.done == "by name" else ""
    return f"known defect of {defect.library}{defect.versions}: {defect.what} ({defect.source}){unasked}"


def mended(defects: Iterable[Defect], request: AttentionRequest) -> Sequence[str]:
    """Return what a reader should know of the faults that an adapter goes around for a request in normal form."""
    found = (defect for defect in defects if defect.done == "mended" and holds(defect.when, request))
    return [f"known defect of {d.library}{d.versions}: {d.what} ({d.source}); mended here: {d.how}" for d in found]


@dataclasses.dataclass(frozen=True)
class Listed:
    """Describes one fault for people: `backends` has name@platform of all that it concerns."""

    library: str
    what: str
    source: str
    done: str
    backends: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "backends": list(self.backends)}


DONE = {
    "refused": "such calls are refused",
    "by name": "not chosen by itself for such calls",
    "undeclared": "not declared, so refused",
}


def listed(found: Iterable[tuple[BackendInfo, Iterable[Defect]]]) -> list[Listed]:
    """Faults by library, those that differ in their conditions alone as one."""
    groups: dict[tuple[str, str, str, str], dict[str, None]] = {}
    for info, defects in found:
        for d in defects:
            done = DONE.get(d.done) or f"mended: {d.how}"
            groups.setdefault((d.library + d.versions, d.what, d.source, done), {})[info.id] = None
    return [Listed(*group, tuple(ids)) for group, ids in sorted(groups.items())]


def narrowing(
    narrow: Callable[[BackendInfo, AttentionRequest], Verdict | None],
    info: BackendInfo,
    defects: Sequence[Defect],
    named: bool = False,
) -> Narrow:
    """Return every reason against a request that comes after the capability rows: known faults, then the plugin's own
    hook.

    Args:
        narrow: that hook, of all plugins. named: as `refusal`.
    """

    def say(request: AttentionRequest) -> Verdict | None:
        faulty = refusal(defects, request, named)
        return narrow(info, request) if faulty is None else faulty

    return say
