"""A job of several ranks: its device, its meshes, and a clock of the slowest rank."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyattn.distributed import init_mesh
from polyattn.nn import USPAttention

__all__ = ["D", "H", "Inside", "Job", "Row", "Rows", "backward_of", "no_grad"]

H, D, ROUNDS, CALLS = 24, 128, 7, 3
Row = Callable[[], Any]
Rows = dict[str, Row]
Inside = dict[str, Callable[[], contextlib.AbstractContextManager[None]]]
"""Rows that are called in a context, which is entered before the clock starts."""


class Job:
    """The rank, its device, and the mesh of all ranks as each layer takes it."""

    def __init__(self, *, small: bool) -> None:
        self.cuda = torch.cuda.is_available() and not small
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.sizes = {"Ulysses": (1, self.world), "ring": (self.world, 1)}
        if self.world > 2 and self.world % 2 == 0:
            self.sizes[f"USP 2 x {self.world // 2}"] = (2, self.world // 2)
        self.meshes = {
            name: init_mesh(ring=ring, ulysses=ulysses, device_type=self.device.type)
            for name, (ring, ulysses) in self.sizes.items()
        }
        self.ulysses, self.ring = self.meshes["Ulysses"]["ulysses"], self.meshes["ring"]["ring"]

    def wait(self) -> None:
        """Until this device has done all of its work."""
        if self.cuda:
            torch.cuda.synchronize()

    def layers(self, **options: Any) -> dict[str, USPAttention]:
        """A layer for each mesh."""
        return {name: USPAttention(mesh, **options) for name, mesh in self.meshes.items()}

    def tensors(self, tokens: int, heads: int = H, *, train: bool = False) -> list[Tensor]:
        """q, k, v."""
        dtype = torch.bfloat16 if self.cuda else torch.float32
        return [
            torch.randn(1, tokens, heads, D, device=self.device, dtype=dtype).requires_grad_(train) for _ in range(3)
        ]

    def timed(self, call: Row) -> float:
        """Milliseconds of a call, of the slowest rank."""
        self.wait()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        self.wait()
        spent = torch.tensor([(time.perf_counter() - begin) / CALLS * 1e3], dtype=torch.float64)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent)

    def recorded(self, call: Row) -> Row:
        """A call as a device graph, which is replayed."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.wait()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        return graph.replay

    def rows(self, rows: Rows, inside: Inside | None = None) -> dict[str, float]:
        """All of them, warm and in rounds."""
        around = {name: (inside or {}).get(name, contextlib.nullcontext) for name in rows}
        for _ in range(2):
            for name, call in rows.items():
                with around[name]():
                    call()
        found: dict[str, list[float]] = {name: [] for name in rows}
        order = random.Random(0)  # the same on all ranks
        for _ in range(ROUNDS):
            for name in order.sample(list(rows), len(rows)):
                with around[name]():
                    found[name].append(self.timed(rows[name]))
        return {name: statistics.median(times) for name, times in found.items()}


def backward_of(call: Callable[..., Tensor], inputs: list[Tensor]) -> Row:
    """A forward and its backward."""
    grad = torch.randn_like(call(*inputs).detach())

    def run() -> None:
        torch.autograd.grad(call(*inputs), inputs, grad)

    return run


def no_grad(call: Callable[..., Any], *inputs: Any, **given: Any) -> Row:
    """A call without gradients."""

    def run() -> None:
        with torch.no_grad():
            call(*inputs, **given)

    return run
