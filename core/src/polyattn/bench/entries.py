"""This module finds what takes part in a row: polyattn's candidates and peers, under the names that a result file
has."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence

import torch

from ..contract import BackendInfo
from ..errors import BackendUnavailableError, UnsupportedRequestError
from ..registry.manager import get_manager
from ..selection.select import Selection
from .bars import OWN
from .measure import Call, Candidate, Inputs, Workload, candidates, peak_memory
from .peers import Peer

__all__ = ["OWN", "Entry", "Seen", "entries_of", "why_none"]


@dataclasses.dataclass
class Seen:
    """Records what is noticed on the way: which entry ran last (a lost device is its fault), and peaks of memory."""

    last: str = ""
    peaks: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A candidate or a peer; an entrant of `polyattn.bench.measure.measure`.

    Attributes:
        selection: of a candidate. compiles: its kernels are made at their first call.
    """

    name: str
    what: Candidate | Peer
    seen: Seen
    selection: Selection | None = None
    compiles: bool = False

    def prepare(self, inputs: Inputs) -> Call:
        self.seen.last = self.name
        try:
            inner: Call = self.what.prepare(inputs)
        except ModuleNotFoundError as exc:
            raise UnsupportedRequestError(f"not here: {exc}") from exc

        def call(number: int) -> object:
            self.seen.last = self.name
            return inner(number)

        if inputs.device.type == "cuda":
            inner(0)  # whatever only the first call takes is no part of the peak
            self.seen.peaks[self.name] = peak_memory(inputs.device, lambda: inner(0))
        return call


def entries_of(
    asked: Workload, device: torch.device, peers: Mapping[str, Peer], patterns: Sequence[str], seen: Seen
) -> list[Entry]:
    """The candidates that patterns name, then the peers.

    Args:
        patterns: of backends. One that is a backend's own name asks for it even where it is not chosen by itself.
    """
    found = [
        Entry(OWN + one.name, one, seen, one.selection, _info(one).compiles)
        for one in _candidates(asked, device, patterns)
    ]
    return found + [Entry(name, peer, seen, compiles=peer.compiles) for name, peer in peers.items()]


def _candidates(asked: Workload, device: torch.device, patterns: Sequence[str]) -> list[Candidate]:
    """Return the candidates of a row, or None if no backend that patterns name takes it: peers are measured all the
    same. Last resorts, such as the reference, take part where they are named: elsewhere they would take most of the
    time."""
    try:
        named, usual = _able(asked, device)
    except (UnsupportedRequestError, BackendUnavailableError):
        return []
    matching = {name for name in usual if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    return [one for one in named if one.name in patterns or one.name in matching]


def _able(asked: Workload, device: torch.device) -> tuple[tuple[Candidate, ...], list[str]]:
    """(who takes a row, the names of those that a pattern may mean: chosen by themselves, and no last resorts).

    Raises:
        UnsupportedRequestError, BackendUnavailableError: nobody takes it.
    """
    named = candidates(asked, device, by_name=True)
    return named, [one.name for one in candidates(asked, device) if (_info(one).priority or 0) >= 0]


def _info(one: Candidate) -> BackendInfo:
    """Its record. One of the same name on another platform may be a last resort, or compile, where this is not so."""
    return get_manager().backends[one.selection.backend, one.selection.platform]


def why_none(asked: Workload, device: torch.device, patterns: Sequence[str]) -> str:
    """Say why a row has no candidate, for people."""
    try:
        named, usual = _able(asked, device)
    except (UnsupportedRequestError, BackendUnavailableError) as exc:
        return str(exc).partition("\n")[0]
    if usual:
        return f"--candidates {' '.join(patterns)} names none of those that may be chosen for it: {', '.join(usual)}"
    able = ", ".join(one.name for one in named)
    return f"only a last resort would be chosen for it: name one that takes it with --candidates ({able})"
