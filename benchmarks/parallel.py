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
import functools
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
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable

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


@contextlib.contextmanager
def torchs_own(job: Job, backend: Any) -> Iterator[None]:
    """torch's context parallelism. The call's tensors are cut already, as ranks hold them; one buffer is wanted."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    _cp_options.enable_load_balance = False  # it takes causal calls only
    one = [torch.zeros(2 * job.world, device=job.device)]
    with torch.nn.attention.sdpa_kernel(backend), context_parallel(job.ring, buffers=one, buffer_seq_dims=[0]):
        yield


def transfers(job: Job, shard: list[Tensor]) -> Rows:
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
    rows: Rows = {
        "one device": no_grad(polyattn.attention, *whole),
        "kernel of Ulysses": no_grad(polyattn.attention, *few),
        "step of a ring": lambda: step.forward(*shard),
        "Ulysses": no_grad(ulysses, *shard, lengths=lengths),
        "Ulysses, lengths told each time": no_grad(ulysses, *shard),
        "ring": no_grad(ring, *shard, lengths=lengths),
        **transfers(job, shard),
    }
    inside: Inside = {}
    if with_torch:
        heads_first = [one.transpose(1, 2).contiguous() for one in shard]
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION") if job.cuda else ("FLASH_ATTENTION",):
            row = f"torch context_parallel, {name}"
            rows[row] = no_grad(torch.nn.functional.scaled_dot_product_attention, *heads_first)
            inside[row] = functools.partial(torchs_own, job, getattr(torch.nn.attention.SDPBackend, name))
    found = job.rows(rows, inside)
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


def decoder(job: Job, keys: int, mesh: Any = None) -> Row:
    """A layer's decode step of one request with so many keys on this rank."""
    layer = AttentionLayer(0, heads=32, kv_heads=8, head_dim=D)
    dtype, page = (torch.bfloat16, 64) if job.cuda else (torch.float32, 16)
    pages = keys // page + 2
    pool = KVPool([layer], KVCacheConfig(page_size=page), pages, dtype=dtype, device=job.device)
    table = RequestTable(1, keys + page, page, [-1], [PageAllocator(pages)], job.device)
    limits = Limits(max_sequences=1, max_tokens=1, max_seqlen=keys)
    backend = AttentionBackend([layer], pool, table, limits=limits, ranks=mesh)
    row = table.add()
    table.extend(row, keys)
    batch = ForwardBatch(ForwardMode.DECODE, [row], [keys], [1])
    backend.init_forward_metadata(batch)
    query = torch.randn(1, 32, D, dtype=dtype, device=job.device)

    def run() -> None:
        backend.forward_decode(query, None, None, layer, batch)

    return run


def decoding(job: Job, keys: int) -> dict[str, Any]:
    """A decode step over the ranks, beside one device and what ranks exchange."""
    result = torch.zeros(1, 32, D + 1, device=job.device)
    parts = [torch.empty_like(result) for _ in range(job.world)]
    with torch.no_grad():
        found = job.rows(
            {
                "one device": decoder(job, keys),
                "this rank's keys": decoder(job, keys // job.world),
                "over the ranks": decoder(job, keys // job.world, job.ring),
                "exchange": lambda: dist.all_gather(parts, result, group=job.ring.get_group()),
            }
        )
    most = found["one device"] / job.world + 1.1 * found["exchange"]
    return {
        "keys": keys,
        "ms": found,
        "over the ranks / (a share of one device + 1.1 exchange), at most 1": found["over the ranks"] / most,
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
        "sizes": [at(job, size, with_torch=True) for size in sizes],
    }
    result["decode"] = decoding(job, 1024 if given.small else 131_072)
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
