"""Where FlashInfer's wrappers work: their workspaces, who may use them, and when they may be planned again."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, GraphError, Slot

__all__ = ["LENDER", "Lender", "Workbench", "float_bytes", "int_bytes", "processors"]

_LEAST = 128 << 20
"""Bytes of a single call's workspace: what FlashInfer recommends."""
_RESIDENT = 2
"""Thread blocks of a multiprocessor that FlashInfer's planner counts on."""
_TILES = (16, 64, 128)
"""Rows (queries times heads of a group) of its tiles: the smallest that a sequence fits in, else the largest."""
_STAGED = 8 << 20
"""Bytes of the integer workspace that a wrapper makes for itself."""
_MOST_SCHEDULED = 4096
"""Tiles of a head up to which the fa3 template has a schedule for each head; above, one for all."""


def float_bytes(
    request: AttentionRequest, device: torch.device, sequences: int, tokens: int, *, recorded: bool = False
) -> int:
    """Bytes that partial outputs and LSEs of split keys need at most, by the planner's own arithmetic
    (`PrefillSplitQOKVIndptr` and `PrefillPlan` in scheduler.cuh of 0.6.18; 0.7 divides by the heads of a group).

    Keys are split while the chip is not full; a recorded step has room for all of its tiles as well.

    Args:
        sequences, tokens: of the largest step, padding included.
    """
    longest = max(tokens - sequences + 1, 1) if recorded else tokens
    tile = next((rows for rows in _TILES if longest * request.group <= rows), _TILES[-1])
    tiles = _RESIDENT * processors(device) // request.kv_heads
    if recorded:
        tiles = max(tiles, -(-tokens * request.group // tile) + sequences - 1)
    return 4 * request.heads * tiles * tile * (request.dims[1] + 1) + (1 << 20)


def int_bytes(request: AttentionRequest, sequences: int, tokens: int) -> int:
    """Bytes that the schedule of the fa3 template needs at most, by the planner's own arithmetic (`PrefillSM90Plan` in
    scheduler.cuh of 0.6.18 and 0.7.2): seven int32 for each tile of queries, of each head while there are few.

    Args:
        sequences, tokens: of a step, or of the largest one of a recorded wrapper.
    """
    tile = 192 if request.dims[1] == 64 else 128
    tiles = -(-tokens // tile) + sequences - 1
    # Starts of the multiprocessors' work and alignment come on top.
    return 7 * 4 * max(tiles, min(tiles, _MOST_SCHEDULED) * request.heads) + (16 << 10)


def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _no_capture(device: torch.device) -> None:
    """Refuse to plan while a graph is being recorded.

    Raises:
        GraphError: it is.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise GraphError(
            "FlashInfer plans on the host, and this call is being recorded into a CUDA graph: record it through the "
            "sessions of polyattn.serving (`Bound.session`), which plan outside of the graph, or use a backend that "
            "does not plan, such as triton or fa3"
        )


class Workbench:
    """Wrappers that share one workspace, of which one is planned at a time.

    Args:
        device: of the tensors. memory: as `Slot.workspace`; None = memory of its own, which may grow.
    """

    def __init__(self, device: torch.device, memory: Callable[[str, int], Tensor] | None = None) -> None:
        self.device, self._memory = device, memory
        self._workspace: Tensor | None = None
        self._wrappers: dict[Hashable, Any] = {}
        self._planned: set[int] = set()
        self._staged: dict[int, int] = {}
        self._made_for: Hashable = None
        self._copied: torch.cuda.Event | None = None

    @classmethod
    def of(cls, slot: Slot) -> Workbench:
        """That of a serving session."""
        return cls(slot.device, slot.workspace)

    def workspace(self, nbytes: int) -> Tensor:
        """uint8 of at least `nbytes`, zeroed when it is made: some of the kernels count in it, and leave zeros."""
        if self._workspace is None or self._workspace.numel() < nbytes:
            if self._memory is None:
                self._workspace = torch.zeros(max(nbytes, _LEAST), dtype=torch.uint8, device=self.device)
            else:
                self._workspace = self._memory("flashinfer", nbytes).zero_()
            self._wrappers.clear()
            self._planned.clear()
            self._staged.clear()
            self._made_for = None
        return self._workspace

    def indices(self, name: str, count: int) -> Tensor:
        """int32 [count] that stays where it is, in the memory of a session."""
        assert self._memory is not None
        return self._memory(f"flashinfer {name}", 4 * count).view(torch.int32)

    def wrapper(self, kind: Hashable, make: Callable[[Tensor], Any], nbytes: int) -> Any:
        """The wrapper of this kind; `make` is given the workspace, of at least `nbytes`."""
        workspace = self.workspace(nbytes)
        if kind not in self._wrappers:
            self._wrappers[kind] = make(workspace)
        return self._wrappers[kind]

    def planned(self, wrapper: Any) -> bool:
        """Whether this wrapper was planned here before."""
        return id(wrapper) in self._planned

    def holds(self, made_for: Hashable) -> bool:
        """Whether the last plan made here was `made_for` this."""
        return self._made_for is not None and self._made_for == made_for

    def stage(self, wrapper: Any, nbytes: int) -> None:
        """Give a wrapper an integer workspace of at least `nbytes`, pinned memory of that size included. To be done
        while `planning`: what the wrapper had is no longer being copied then, and nothing recorded reads it yet, since
        the first plan of a recorded wrapper says how much all of them need."""
        if nbytes > self._staged.get(id(wrapper), _STAGED):
            nbytes = 1 << (nbytes - 1).bit_length()
            wrapper.reset_workspace_buffer(
                float_workspace_buffer=self._workspace,
                int_workspace_buffer=torch.empty(nbytes, dtype=torch.uint8, device=self.device),
            )
            self._staged[id(wrapper)] = nbytes

    @contextlib.contextmanager
    def planning(self, wrapper: Any, made_for: Hashable = None) -> Iterator[None]:
        """Around every plan of a wrapper. A plan is copied to the device from pinned memory, which the next one writes
        over: so that waits until the copy was made. By then it usually was."""
        self._made_for = None
        if self._copied is not None:
            self._copied.synchronize()
        yield
        if self.device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self.device))
        self._made_for = made_for
        self._planned.add(id(wrapper))


class Lender:
    """Workbenches for single calls: each has one user at a time, whatever thread, and one stream for good."""

    def __init__(self) -> None:
        self._free: dict[Hashable, deque[Workbench]] = {}

    @contextlib.contextmanager
    def lend(self, device: torch.device) -> Iterator[Workbench]:
        """A workbench for a call on the device's current stream.

        Raises:
            GraphError: a graph is being recorded.
        """
        _no_capture(device)
        free = self._free.setdefault((device, _stream(device)), deque())
        try:
            bench = free.pop()
        except IndexError:
            bench = Workbench(device)
        try:
            yield bench
        finally:
            free.append(bench)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


LENDER = Lender()
"""That of all of FlashInfer's wrappers."""
