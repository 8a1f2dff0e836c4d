"""POLYATTN_TUNING=online: the first large call of its kind has its backends measured before it runs.

Only calls that nobody chose a backend for, never one that is compiled or recorded into a device graph, not in a process
that serves, and not where several ranks would have to agree. What is measured is a batch of the same lengths, not the
caller's own tensors. The call itself runs as it would have; those after it use what was found.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..agreement import distributed
from ..call_shapes import Extent, extent_of
from ..errors import PolyattnError
from ..records import AttentionRequest
from ..tracing import lengths_of
from ..tuning import bucket, serving
from .probe import Prober
from .tuner import Isolation, tune_one
from .workload import Workload

if TYPE_CHECKING:
    from ..choose import Chosen

__all__ = ["BUDGET", "Budget", "large", "watched"]

_OPERATIONS, _BYTES = 2**30, 2**26
"""A call is large that has so many operations, or reads so many bytes of keys and values."""


@dataclasses.dataclass
class Budget:
    """What measuring may cost a process.

    Attributes:
        seconds: in all. each: for one request; left: of them. isolation: see `tuner.Isolation`.
    """

    seconds: float = 60.0
    each: float = 20.0
    isolation: Isolation = "auto"

    def __post_init__(self) -> None:
        self.left = self.seconds
        self.seen: set[tuple[AttentionRequest, Extent]] = set()
        self.lock = threading.Lock()


BUDGET = Budget()


def watched(chosen: Chosen) -> Chosen:
    """The functions of a choice that look at each call's size."""
    request = chosen.selection.request
    if request.graph_capture or request.transform or distributed():
        return chosen
    forward = _watching(chosen.bound.forward, request)
    return dataclasses.replace(chosen, bound=dataclasses.replace(chosen.bound, forward=forward, simple=None))


def large(request: AttentionRequest, extent: Extent) -> bool:
    """Whether a call is worth measuring for."""
    batch, s_q, s_k = extent
    width = sum(request.dims)
    operations = 2 * batch * request.heads * s_q * s_k * width
    return operations >= _OPERATIONS or 2 * batch * s_k * request.kv_heads * width >= _BYTES


def _watching(forward: Callable[..., Any], request: AttentionRequest) -> Callable[..., Any]:
    read = extent_of(request)

    def call(*tensors: Any, **keywords: Any) -> Any:
        extent = read(*tensors, **keywords)
        if large(request, extent):
            _consider(request, extent, tensors[0].device, keywords)
        return forward(*tensors, **keywords)

    return call


def _consider(request: AttentionRequest, extent: Extent, device: torch.device, keywords: dict[str, Any]) -> None:
    """Measure, if this is the first call of its kind, there is time left, and nobody waits for this process."""
    batch, s_q, s_k = extent
    name = (request, (bucket(batch), bucket(s_q), bucket(s_k)))
    if name in BUDGET.seen or BUDGET.left <= 0 or serving():
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    if not BUDGET.lock.acquire(blocking=False):
        return  # another thread measures
    try:
        BUDGET.seen.add(name)
        _measure(request, extent, device, keywords)
    finally:
        BUDGET.lock.release()


def _measure(request: AttentionRequest, extent: Extent, device: torch.device, keywords: dict[str, Any]) -> None:
    began = time.monotonic()
    each = min(BUDGET.each, BUDGET.left)
    try:
        lengths, shared = lengths_of(extent, keywords)
        workload = Workload(request, tuple(lengths), shared)
        with Prober(str(device), each) as prober:
            tune_one(
                workload, device, prober, isolation=BUDGET.isolation, deadline=began + each,
                source="POLYATTN_TUNING=online",
            )  # fmt: skip
    except (PolyattnError, torch.OutOfMemoryError) as exc:
        # The caller asked for attention, not for a measurement.
        warnings.warn(f"nothing was measured for {request.summary()}: {exc}", RuntimeWarning, stacklevel=5)
    finally:
        BUDGET.left -= time.monotonic() - began
