"""How long calls take, what memory they hold, and what of it is attention itself."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from polyattn.methods import bound
from polyattn.methods.video import sla, svg2, vmoba, vsa

from .checks import resolved
from .inputs import Row, Shape

SECONDS = 0.03


class Clock:
    """Milliseconds on a device by its events, on the CPU by its clock."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """The end has been waited for."""
        return float(start.elapsed_time(end)) if self.gpu else 1e3 * (end - start)

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def window(self, call: Callable[[], Any], count: int) -> float:
        """Milliseconds of a call: one that does not count, then so many after one another."""
        call()
        start = self.mark()
        for _ in range(count):
            call()
        end = self.mark()
        self.wait()
        return self.between(start, end) / count


def timed(calls: Mapping[str, Callable[[], Any]], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, rounds in ever other orders."""
    counts = {name: max(1, min(20, round(1e3 * SECONDS / clock.window(call, 1)))) for name, call in calls.items()}
    dice, found = random.Random(0), {name: list[float]() for name in calls}
    for _ in range(rounds):
        for name in dice.sample(list(calls), len(calls)):
            found[name].append(clock.window(calls[name], counts[name]))
    return found


@dataclasses.dataclass
class Inner:
    """A call of a family that a method made: when, and how many pairs of queries and keys are computed."""

    kind: str
    start: Any
    end: Any
    pairs: float


@contextlib.contextmanager
def watched(clock: Clock, *, count: bool) -> Iterator[list[Inner]]:
    """The calls of families that methods make while this is open. count: their pairs, which waits for the device."""
    found: list[Inner] = []
    real = bound._Inner._call

    def call(self: Any, function: Any, query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]) -> Any:
        start = clock.mark()
        result = real(self, function, query, key, value, given)
        end = clock.mark()
        found.append(Inner(function.__name__, start, end, pairs_of(query, key, given) if count else 0.0))
        return result

    with mock.patch.object(bound._Inner, "_call", call):
        yield found


def pairs_of(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> float:
    """Pairs of rows and keys that a call of a family computes, those of rows that fill up a block among them."""
    if "cu_seqlens_q" in given:
        rows, keys = (given[f"cu_seqlens_{side}"].diff().double() for side in "qk")
        return float((rows * keys).sum()) * query.shape[1]
    (B, H, S_q), S_k = query.shape[:3], key.shape[2]
    if "block_shape" not in given:
        return float(B * H * S_q * S_k)
    block_q, block_k = given["block_shape"]
    rows = (S_q - torch.arange(0, S_q, block_q, device=query.device)).clamp(max=block_q).double()
    sizes = given.get("block_valid")
    if sizes is None:
        sizes = (S_k - torch.arange(0, S_k, block_k, device=query.device)).clamp(max=block_k)
    sizes = sizes.double().expand(B, key.shape[1], -1).repeat_interleave(H // key.shape[1], 1)
    if given.get("lists") is None:
        seen = given["block_map"].expand(B, H, -1, -1).double() @ sizes[..., None]
        return float((seen[..., 0] * rows).sum())
    counts, indices = given["lists"]
    total = 0.0
    for h in range(H):  # a head at a time: lists of all in 64 bits are large
        listed = indices[:, min(h, indices.shape[1] - 1)].long()
        there = torch.arange(listed.shape[-1], device=query.device) < counts[:, min(h, counts.shape[1] - 1), :, None]
        keys = sizes[:, h, None].expand(-1, listed.shape[1], -1).gather(-1, listed.clamp(0, sizes.shape[-1] - 1))
        total += float(((keys * there).sum(-1) * rows).sum())
    return total * (B if indices.shape[0] == 1 else 1)


def beside(row: Row, shape: Shape, settings: Mapping[str, Any]) -> float:
    """Operations of a forward call that are not attention of pairs of tokens: branches, scores of maps, k-means."""
    S, H, D = row.tokens, shape.heads, shape.head_dim
    if row.method == sla.SLA.name:
        return H * S * D * (4.0 * (D + 1) + 2 * D) + 2.0 * H * D * (S / 128) * (S / 64)
    if row.method == vsa.NAME:
        tiles = math.prod(-(-size // 4) for size in row.grid)
        return 4.0 * H * D * tiles**2
    if row.method == svg2.NAME:
        given = resolved(row.method, settings)
        clusters = given["svg2_num_q_centroids"] + given["svg2_num_k_centroids"]
        return 2.0 * H * D * S * clusters * (given["svg2_kmeans_iter_step"] + 1)
    if row.method == vmoba.NAME:
        method = vmoba.VMoBA(**resolved(row.method, settings))
        sizes = [len(vmoba.chunks_of(row.grid, cut.chunk, torch.device("cpu")).sizes) for cut in method.cuts]
        return 2.0 * H * D * S * sum(sizes) / len(sizes)
    return 0.0


def peak_of(call: Callable[[], Any], held: int, clock: Clock) -> int | None:
    """Bytes of device memory that a first call takes at most, with its inputs and all that it keeps."""
    if not clock.gpu:
        call()
        return None
    clock.wait()
    gc.collect()  # what calls before this one left would count as given back by it
    before = torch.cuda.memory_allocated()
    result = call()
    del result
    clock.wait()
    kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    now = torch.cuda.memory_allocated()
    result = call()
    del result
    clock.wait()
    return held + kept + torch.cuda.max_memory_allocated() - now


def kernels_of(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of one call by the names of kernels, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    total: dict[str, float] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            total[event.name] = total.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3
    return dict(sorted(total.items(), key=lambda one: -one[1]))


# ----------------------------------------------------------------------------------------------------------------- rows
