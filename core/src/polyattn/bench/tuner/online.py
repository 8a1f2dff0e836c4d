"""POLYATTN_TUNING=online: the first large call of its kind has its backends measured before it runs.

Only calls that nobody chose a backend for, never one that is compiled or recorded into a device graph, not in a process
that serves, not where several ranks would have to agree, and not where the caller's program looks on: what a forward
was served by must serve its recomputation. What is measured is a batch of the same lengths, not the caller's own
tensors, in a thread of its own. The call itself runs as it would have; those after it use what was found.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ...contract import AttentionRequest
from ...contract.lengths import Extent, extent_of
from ...dispatch.rank_agreement import distributed
from ...dispatch.trace_requests import lengths_of
from ...errors import PolyattnError
from ...tuning import bucket, request_key, serving
from ...tuning.rows import canonical
from ..measure.marks import forgive
from ..measure.probe import Prober
from ..measure.workload import Workload
from .offline import Isolation, Tried, tune_one

if TYPE_CHECKING:
    from ...dispatch.binding import Chosen

__all__ = ["BUDGET", "Budget", "large", "watched"]

_OPERATIONS, _BYTES = 2**30, 2**26
"""A call is large that has so many operations, or reads so many bytes of keys and values."""


@dataclasses.dataclass
class Budget:
    """Describes what measuring may cost a process.

    Attributes:
        seconds: in all. each: for one request; left: of them. isolation: see `tuner.Isolation`.
        seen: what was considered. kept: requests, as they are filed, whose choice must stay as it is.
    """

    seconds: float = 60.0
    each: float = 20.0
    isolation: Isolation = "auto"

    def __post_init__(self) -> None:
        self.left = self.seconds
        self.seen: set[tuple[AttentionRequest, Extent]] = set()
        self.kept: set[str] = set()
        self.lock = threading.Lock()


BUDGET = Budget()


def _after_fork() -> None:
    """Make a new lock after a fork: a thread of the parent that held the old one does not exist in the child."""
    BUDGET.lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def watched(chosen: Chosen) -> Chosen:
    """The functions of a choice that look at each call's size."""
    request = chosen.selection.request
    if request.graph_capture or request.transform:
        return chosen
    forward = _watching(chosen.bound.forward, request)
    return dataclasses.replace(chosen, bound=dataclasses.replace(chosen.bound, forward=forward, simple=None))


def large(request: AttentionRequest, extent: Extent) -> bool:
    """Return whether a call is worth measuring for."""
    batch, s_q, s_k = extent
    width = sum(request.dims)
    operations = 2 * batch * request.heads * s_q * s_k * width
    return operations >= _OPERATIONS or 2 * batch * s_k * request.kv_heads * width >= _BYTES


def _watching(forward: Callable[..., Any], request: AttentionRequest) -> Callable[..., Any]:
    read, filed = extent_of(request), canonical(request_key(request))

    def call(*tensors: Any, **keywords: Any) -> Any:
        if _recomputed():
            # Of any length: a measurement decides for lengths near its own.
            BUDGET.kept.add(filed)
        elif filed not in BUDGET.kept:
            extent = read(*tensors, **keywords)
            if large(request, extent) and not _looked_at():
                _consider(request, extent, tensors[0].device, keywords)
        return forward(*tensors, **keywords)

    return call


def _recomputed() -> bool:
    """Return whether hooks take what is saved for a backward, as those of activation checkpointing do: they compute it
    anew later, and must find the same then."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _looked_at() -> bool:
    """Return whether a mode sees the operators of this thread: one that traces, counts or fakes them. `torch.device`
    and `torch.set_default_device` are modes too, which only say where tensors are made."""
    return bool(torch._C._len_torch_dispatch_stack()) or any(
        not isinstance(mode, DeviceContext)
        for mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    )


def _consider(request: AttentionRequest, extent: Extent, device: torch.device, keywords: dict[str, Any]) -> None:
    """Measure, if this is the first call of its kind, there is time left, and nobody waits for this process."""
    batch, s_q, s_k = extent
    name = (request, (bucket(batch), bucket(s_q), bucket(s_k)))
    if name in BUDGET.seen or BUDGET.left <= 0 or serving():
        return
    if distributed():  # asked at each call: a choice may be older than the job
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    budget = BUDGET
    if not budget.lock.acquire(blocking=False):
        return  # another thread measures
    budget.seen.add(name)
    failed: list[Exception] = []
    said: list[Tried] = []

    def work() -> None:
        try:
            if device.index is not None:
                torch.accelerator.set_device_index(device)
            said.append(_measure(Workload(request, tuple(lengths), shared), device, budget))
        except Exception as exc:  # noqa: BLE001 - it belongs to the caller, whose thread this is not
            failed.append(exc)
        finally:
            budget.lock.release()

    try:
        lengths, shared = lengths_of(extent, keywords)  # reads the caller's tensors, on the caller's stream
        # Autocast, hooks, modes and the stream are those of a thread: what is measured has none of the caller's.
        thread = threading.Thread(target=work, name="polyattn-online", daemon=True)
        thread.start()
    except BaseException:
        budget.lock.release()
        raise
    try:
        thread.join()
    except BaseException:  # Ctrl-C: the program ends, mostly, and the thread with it
        forgive()
        raise
    for exc in failed:
        if not isinstance(exc, PolyattnError):
            raise exc
    # The caller asked for attention, not for a measurement.
    for why in (*map(str, failed), *(tried.reason for tried in said if tried.outcome in ("refused", "not begun"))):
        warnings.warn(f"nothing was measured for {request.summary()}: {why}", RuntimeWarning, stacklevel=4)


def _measure(workload: Workload, device: torch.device, budget: Budget) -> Tried:
    began = time.monotonic()
    each = min(budget.each, budget.left)
    try:
        with Prober(str(device), each) as prober:
            return tune_one(
                workload, device, prober, isolation=budget.isolation, deadline=began + each, strict=True,
                source="POLYATTN_TUNING=online",
            )  # fmt: skip
    finally:
        budget.left -= time.monotonic() - began
