"""Layers over several devices, timed on the GPUs of one host beside what they are made of, and beside torch's own.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --out parallel.json
    torchrun --nproc-per-node 2 benchmarks/parallel.py --small      # on two CPU processes: that it runs

All rows of a size are timed in rounds, in another order each, the same on all ranks; a time is the median over rounds
of the slowest rank. Ratios are of this run alone. `--trace FILE` writes a trace of a ring, and says how much
of its transfers kernels hid. Correctness has a program of its own: tests/distributed/job.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import polyattn
from polyattn.distributed import init_mesh
from polyattn.nn import RingAttention, UlyssesAttention

H, D, ROUNDS, CALLS = 24, 128, 7, 3
Row = Callable[[], Any]


class Job:
    """The rank, its device, and the mesh of all ranks as each layer takes it."""

    def __init__(self, *, small: bool) -> None:
        self.cuda = torch.cuda.is_available() and not small
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.ulysses = init_mesh(ulysses=self.world, device_type=self.device.type)["ulysses"]
        self.ring = init_mesh(ring=self.world, device_type=self.device.type)["ring"]

    def wait(self) -> None:
        """Until this device has done all of its work."""
        if self.cuda:
            torch.cuda.synchronize()

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

    def rows(self, rows: dict[str, Row]) -> dict[str, float]:
        """All of them, warm and in rounds."""
        for _ in range(2):
            for call in rows.values():
                call()
        found: dict[str, list[float]] = {name: [] for name in rows}
        order = random.Random(0)  # the same on all ranks
        for _ in range(ROUNDS):
            for name in order.sample(list(rows), len(rows)):
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


@contextlib.contextmanager
def torchs_own(job: Job, buffers: list[Tensor]) -> Iterator[None]:
    """torch's context parallelism; inputs are cut by us, as ranks hold them."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    _cp_options.enable_load_balance = False  # it takes causal calls only
    with context_parallel(job.ring, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        yield


def transfers(job: Job, shard: list[Tensor]) -> dict[str, Row]:
    """What layers exchange, by itself: a tensor's all-to-all, and keys and values with the neighbours."""
    flat, into = shard[0].flatten(), torch.empty_like(shard[0]).flatten()
    coming = [torch.empty_like(one) for one in shard[1:]]

    def neighbours() -> None:
        group = job.ring.get_group()
        to, source = (job.rank + 1) % job.world, (job.rank - 1) % job.world
        ops = [dist.P2POp(dist.isend, one, to, group) for one in shard[1:]]
        ops += [dist.P2POp(dist.irecv, one, source, group) for one in coming]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {
        "exchange of a tensor": lambda: dist.all_to_all_single(into, flat, group=job.ulysses.get_group()),
        "exchange with the neighbour": neighbours,
    }


def at(job: Job, tokens: int, *, with_torch: bool) -> dict[str, Any]:
    """All rows of a length, and their ratios."""
    part, heads = tokens // job.world, H // job.world
    lengths = (part,) * job.world
    shard, whole, few = job.tensors(part), job.tensors(part * job.world), job.tensors(part * job.world, heads)
    ulysses, ring = UlyssesAttention(job.ulysses), RingAttention(job.ring)
    step = polyattn.bind_part(backward=False)
    rows: dict[str, Row] = {
        "one device": no_grad(polyattn.attention, *whole),
        "kernel of Ulysses": no_grad(polyattn.attention, *few),
        "step of a ring": lambda: step.forward(*shard),
        "Ulysses": no_grad(ulysses, *shard, lengths=lengths),
        "Ulysses, lengths told each time": no_grad(ulysses, *shard),
        "ring": no_grad(ring, *shard, lengths=lengths),
        **transfers(job, shard),
    }
    if with_torch:
        heads_first = [one.transpose(1, 2).contiguous() for one in shard]
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            backend = getattr(torch.nn.attention.SDPBackend, name)

            def call(backend: Any = backend) -> None:
                with torch.no_grad(), torch.nn.attention.sdpa_kernel(backend), torchs_own(job, []):
                    torch.nn.functional.scaled_dot_product_attention(*heads_first)

            rows[f"torch context_parallel, {name}"] = call
    found = job.rows(rows)
    del whole, few, shard
    shard, whole = job.tensors(part, train=True), job.tensors(part * job.world, train=True)
    trained = {
        "one device": backward_of(polyattn.attention, whole),
        "Ulysses": backward_of(lambda *own: ulysses(*own, lengths=lengths), shard),
        "ring": backward_of(lambda *own: ring(*own, lengths=lengths), shard),
    }
    both = job.rows(trained)
    exchange, one = found["exchange of a tensor"], found["one device"]
    return {
        "tokens": tokens,
        "forward_ms": found,
        "forward_and_backward_ms": both,
        "ratios": {
            "Ulysses / (kernel + 4 exchanges), at most 1.06": found["Ulysses"]
            / (found["kernel of Ulysses"] + 4 * exchange),
            "ring / its steps, at most 1.08": found["ring"] / (job.world * found["step of a ring"]),
            "one device / Ulysses": one / found["Ulysses"],
            "one device / ring": one / found["ring"],
            "forward and backward, one device / Ulysses": both["one device"] / both["Ulysses"],
            "forward and backward, one device / ring": both["one device"] / both["ring"],
        },
        "served_by": polyattn.explain(polyattn.attention, *job.tensors(part * job.world, heads)).id,
        "step_served_by": polyattn.explain(step, *job.tensors(part)).id,
    }


def traced(job: Job, tokens: int, file: Path) -> dict[str, float]:
    """A trace of a ring's call; the share of its transfers during which a kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    ring, part = RingAttention(job.ring), tokens // job.world
    call = no_grad(ring, *job.tensors(part), lengths=(part,) * job.world)
    for _ in range(3):
        call()
    job.wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        job.wait()
    if job.rank == 0:
        seen.export_chrome_trace(str(file))
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for one in seen.events():
        if one.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in one.name.lower()].append((one.time_range.start, one.time_range.end))
    total = sum(end - begin for begin, end in spans[True])
    hidden = sum(
        max(0.0, min(end, stop) - max(begin, start)) for begin, end in spans[True] for start, stop in spans[False]
    )
    return {"transfers_ms": total / 1e3, "hidden_share": hidden / total if total else 0.0}


def main() -> None:
    """Time all sizes; rank 0 prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_760, 75_600])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny sizes, on the CPU")
    given = parser.parse_args()
    job = Job(small=given.small)
    sizes = [256] if given.small else given.tokens
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if job.cuda else "cpu",
        "ranks": job.world,
        "torch": torch.__version__,
        "shape": f"B1 H{H} D{D}",
        "sizes": [at(job, size, with_torch=job.cuda) for size in sizes],
    }
    if given.trace:
        result["trace"] = traced(job, sizes[0], given.trace)
    if job.rank == 0:
        text = json.dumps(result, indent=1)
        print(text)
        if given.out:
            given.out.write_text(text + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
