"""Layers over several devices, timed on the GPUs of one host beside what they are made of, and beside torch's own.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --out parallel.json
    torchrun --nproc-per-node 4 benchmarks/parallel.py --tokens 75600 115200 --video --out parallel-4.json
    torchrun --nproc-per-node 2 benchmarks/parallel.py --small      # on two CPU processes: that it runs
    python benchmarks/parallel.py --render FILE...                  # result files as the tables of docs/benchmarks.md

Nothing is timed before every mesh has given what one device gives, forward and backward, with text before and behind,
and with eight query heads to a key head. All rows of a size are timed in rounds, in another order each, the same on
all ranks; a time is the median over rounds of the slowest rank. Ratios are of this run alone. `--trace FILE` writes
a trace of a ring, and says how much of its transfers kernels hid. tests/distributed/job.py checks far more.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from ranks.checks import FAR, checked
from ranks.job import D, H, Inside, Job, Row, Rows, backward_of, no_grad
from torch import Tensor

import polyattn
from polyattn.distributed.costs import Machine, Shape, cost
from polyattn.errors import PolyattnError
from polyattn.nn import RingAttention, USPAttention
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable

TRAINING = ["cudnn", "triton"]
VIDEO = {256: (4, 8, 8), 75_600: (21, 45, 80), 115_200: (32, 45, 80)}
"""Tokens -> the grid of a video that has them."""


@contextlib.contextmanager
def torchs_own(job: Job, backend: Any) -> Iterator[None]:
    """torch's context parallelism. The call's tensors are cut already, as ranks hold them; one buffer is wanted."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    _cp_options.enable_load_balance = False  # it takes causal calls only
    one = [torch.zeros(2 * job.world, device=job.device)]
    with torch.nn.attention.sdpa_kernel(backend), context_parallel(job.ring, buffers=one, buffer_seq_dims=[0]):
        yield


def _sdpa(*inputs: Tensor) -> Tensor:
    """torch's function, by its name at the call: its context parallelism puts another one there."""
    return torch.nn.functional.scaled_dot_product_attention(*inputs)


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


def trained(job: Job, tokens: int, backends: list[str]) -> dict[str, dict[str, float]]:
    """Forward and backward by each backend that trains here: one device, and each mesh."""
    part, found = tokens // job.world, {}
    lengths = (part,) * job.world
    shard, whole = job.tensors(part, train=True), job.tensors(part * job.world, train=True)
    for backend in (None, *backends):
        try:
            rows = {"one device": backward_of(functools.partial(polyattn.attention, backend=backend), whole)}
            for name, layer in job.layers(backend=backend).items():
                rows[name] = backward_of(functools.partial(layer, lengths=lengths), shard)
        except PolyattnError as error:  # on all ranks alike: what is installed is
            if job.rank == 0:
                print(f"not trained by {backend}: {error}")
            continue
        step = polyattn.bind_part(backend=backend)
        served = polyattn.explain(polyattn.attention, *whole, backend=backend).id, polyattn.explain(step, *shard).id
        found[f"{backend or 'the choice'} ({served[0]}, a ring by {served[1]})"] = job.rows(rows)
    return found


def at(job: Job, tokens: int, train: list[str] | None) -> dict[str, Any]:
    """All rows of a length, and their ratios. train: None = forward only."""
    part, heads = tokens // job.world, H // job.world
    lengths = (part,) * job.world
    shard, whole, few = job.tensors(part), job.tensors(part * job.world), job.tensors(part * job.world, heads)
    layers, step = job.layers(transfers="send"), polyattn.bind_part(backward=False)
    copying = {
        f"{name}, blocks copied": layer
        for name, layer in job.layers(transfers="copy").items()
        if job.sizes[name][0] > 1
    }
    rows: Rows = {
        "one device": no_grad(polyattn.attention, *whole),
        "kernel of Ulysses": no_grad(polyattn.attention, *few),
        "step of a ring": functools.partial(step.forward, *shard),
        **{name: no_grad(layer, *shard, lengths=lengths) for name, layer in layers.items()},
        **{name: no_grad(layer, *shard, lengths=lengths) for name, layer in copying.items()},
        "Ulysses, lengths told each time": no_grad(layers["Ulysses"], *shard),
        **transfers(job, shard),
    }
    inside: Inside = {}
    heads_first = [one.transpose(1, 2).contiguous() for one in shard]
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION") if job.cuda else ("FLASH_ATTENTION",):
        row = f"torch context_parallel, {name}"
        rows[row] = no_grad(_sdpa, *heads_first)
        inside[row] = functools.partial(torchs_own, job, getattr(torch.nn.attention.SDPBackend, name))
    found = job.rows(rows, inside)
    del whole, few, shard, rows
    both = {} if train is None else trained(job, tokens, train)
    exchange, one = found["exchange of a tensor"], found["one device"]
    fastest = {row: min(times[row] for times in both.values()) for row in ("one device", *layers) if both}
    return {
        "tokens": tokens,
        "forward_ms": found,
        "forward_and_backward_ms": both,
        "predicted_ms": {
            f"{name}{kind}": cost(Shape(tokens, H, H, D), ring, ulysses, machine).time * 1e3
            for name, (ring, ulysses) in job.sizes.items()
            for kind, machine in (("", Machine()), (", blocks copied", Machine(copies=True)))
        },
        "ratios": {
            "Ulysses / (kernel + 4 exchanges), at most 1.06": found["Ulysses"]
            / (found["kernel of Ulysses"] + 4 * exchange),
            "ring / its steps, at most 1.08": found["ring"] / (job.world * found["step of a ring"]),
            **{f"one device / {name}": one / found[name] for name in (*layers, *copying)},
            **{
                f"forward and backward, one device / {name}": fastest["one device"] / fastest[name]
                for name in layers
                if both
            },
        },
        "transfers": {name: layer.transfers for name, layer in copying.items()},
        "served_by": polyattn.explain(polyattn.attention, *job.tensors(part * job.world, heads)).id,
        "step_served_by": polyattn.explain(step, *job.tensors(part)).id,
    }


def video(job: Job, tokens: int) -> dict[str, Any]:
    """VSA at a sparsity of 0.9 by one device, and under Ulysses."""
    name, grid = "video_sparse_attn", VIDEO[tokens]
    polyattn.configure(attention_backend_config={name: {"sparsity": 0.9, "coarse": "off"}})
    part = tokens // job.world
    place = polyattn.video.place(grid=grid)
    layer = USPAttention(job.meshes["Ulysses"], backend=name)
    whole = job.tensors(tokens)
    shard = job.tensors(part)
    right = polyattn.attention(*whole, backend=name, place=place)
    mine = slice(job.rank * part, (job.rank + 1) * part)
    for one in whole:
        dist.broadcast(one, 0)
    right = polyattn.attention(*whole, backend=name, place=place)[:, mine]
    got = layer(*(one[:, mine].contiguous() for one in whole), place=place)
    far = float((got.float() - right.float()).norm() / right.float().norm())
    if far > FAR[got.dtype]:
        raise SystemExit(f"VSA under Ulysses: {far:.1e} from one device: it is not timed")
    rows = {
        "one device, dense": no_grad(polyattn.attention, *whole),
        "one device": no_grad(polyattn.attention, *whole, backend=name, place=place),
        "Ulysses": no_grad(layer, *shard, lengths=(part,) * job.world, place=place),
    }
    found = job.rows(rows)
    polyattn.configure()
    return {"tokens": tokens, "ms": found, "error": far, "one device / Ulysses": found["one device"] / found["Ulysses"]}


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
    """A decode step over the ranks, beside one device and what ranks exchange: as calls, and recorded in a graph."""
    result = torch.zeros(1, 32, D + 1, device=job.device)
    parts = result.new_empty(job.world, 32, D + 1)
    steps: Rows = {
        "one device": decoder(job, keys),
        "this rank's keys": decoder(job, keys // job.world),
        "over the ranks": decoder(job, keys // job.world, job.ring),
        "exchange": lambda: dist.all_gather_into_tensor(parts, result, group=job.ring.get_group()),
    }
    found: dict[str, Any] = {"keys": keys}
    with torch.no_grad():
        found["ms"] = job.rows(steps)
        if job.cuda:
            found["ms in a graph"] = job.rows({name: job.recorded(step) for name, step in steps.items()})
    times = found.get("ms in a graph", found["ms"])
    most = times["one device"] / job.world + 1.1 * times["exchange"]
    return found | {
        "over the ranks / (a share of one device + 1.1 exchange), at most 1": times["over the ranks"] / most
    }


def traced(job: Job, tokens: int, file: Path) -> dict[str, float]:
    """A trace of a ring's call; the share of its transfers during which a kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    ring, part = RingAttention(job.ring, transfers="copy"), tokens // job.world
    call = no_grad(ring, *job.tensors(part), lengths=(part,) * job.world)
    for _ in range(3):
        call()
    job.wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(5):  # the host is late for the first only
            call()
        job.wait()
    if job.rank == 0:
        seen.export_chrome_trace(str(file))
    return overlap(file) if job.rank == 0 else {}


def overlap(file: Path) -> dict[str, float]:
    """The milliseconds of transfers in a trace, NCCL's kernels and copies, and the share of them during which another
    kernel ran."""
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    found = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy")]
    moving, others = (
        sorted((one["ts"], one["ts"] + one["dur"]) for one in found if _moves(one) == wanted)
        for wanted in (True, False)
    )
    total = sum(end - begin for begin, end in moving)
    hidden, done = 0.0, float("-inf")
    for start, stop in others:  # kernels may run beside each other: what one has hidden does not count again
        start, done = max(start, done), max(stop, done)
        hidden += sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in moving)
    return {"transfers_ms": total / 1e3, "hidden_share": hidden / total if total else 0.0}


def _moves(event: dict[str, Any]) -> bool:
    return event["cat"] == "gpu_memcpy" or "nccl" in event["name"].lower()


def markdown(result: dict[str, Any]) -> str:
    """A result file as the tables of docs/benchmarks.md."""
    lines = [f"{report.caption(result)}; {result['ranks']} ranks, {result['shape']}.", ""]
    sizes = result["sizes"]
    head = [f"{one['tokens']:,}" for one in sizes]
    lines += [f"| ms at so many tokens | {' | '.join(head)} |", f"|---|{'---:|' * len(sizes)}"]
    for row in sizes[0]["forward_ms"]:
        cells = [_ms(one["forward_ms"][row], one["predicted_ms"].get(row)) for one in sizes]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    for backend, times in sizes[0]["forward_and_backward_ms"].items():
        for row in times:
            cells = [_ms(one["forward_and_backward_ms"].get(backend, {}).get(row)) for one in sizes]
            lines.append(f"| forward and backward by {backend}: {row} | {' | '.join(cells)} |")
    for row in sizes[0]["ratios"]:
        cells = [f"{one['ratios'][row]:.3f}" if row in one["ratios"] else "" for one in sizes]
        lines.append(f"| **{row}** | {' | '.join(cells)} |")
    for name, how in sizes[0].get("transfers", {}).items():
        lines += ["", f"{name[0].upper()}{name[1:]}: they were {how}."]
    decode = result["decode"]
    bar = next(name for name in decode if name.startswith("over the ranks"))
    for kind in ("ms", "ms in a graph"):
        if kind in decode:
            times = ", ".join(f"{name} {ms:.3f}" for name, ms in decode[kind].items())
            lines += ["", f"A decode step, {decode['keys']:,} keys, {kind}: {times}."]
    lines += [f"{bar[0].upper()}{bar[1:]}: {decode[bar]:.2f}."]
    for video in result["video"]:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in video["ms"].items())
        lines.append(f"VSA at 0.9, {video['tokens']:,} tokens: {times}: {video['one device / Ulysses']:.2f} times.")
    if result.get("trace"):
        trace = result["trace"]
        lines.append(
            f"Trace of a ring: {trace['transfers_ms']:.2f} ms of transfers, kernels ran in {trace['hidden_share']:.0%}."
        )
    return "\n".join(lines)


def _ms(ms: float | None, predicted: float | None = None) -> str:
    said = "" if ms is None else f"{ms:.2f}"
    return said if predicted is None else f"{said} ({predicted:.2f} predicted)"


def main() -> None:
    """Time all sizes; rank 0 prints, and writes the result file."""
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_760, 75_600])
    parser.add_argument("--train", nargs="*", default=TRAINING, help="backends that train by name, beside the choice")
    parser.add_argument("--train-tokens", type=int, nargs="*", help="lengths that are trained; as a rule all")
    parser.add_argument("--video", action="store_true", help="VSA under Ulysses too, for lengths of known videos")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny sizes, on the CPU")
    given = report.arguments(parser, markdown)
    if given is None:
        return
    job = Job(small=given.small)
    sizes = [256] if given.small else given.tokens
    words = shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *report.asked(sys.argv[1:])])
    command = f"torchrun --nproc-per-node {job.world} {words}"
    result: dict[str, Any] = {
        **report.stamp("parallel", job.device),
        "command": command,
        "ranks": job.world,
        "shape": f"B1 H{H} D{D}",
        "errors": checked(job),
        "sizes": [],
        "video": [],
    }
    if job.rank == 0:
        print(f"the largest errors beside one device: {result['errors']}", flush=True)
    result["decode"] = decoding(job, 1024 if given.small else 131_072)
    if given.trace:
        result["trace"] = traced(job, sizes[0], given.trace)
    training = sizes if given.train_tokens is None else given.train_tokens
    for tokens in sizes:
        result["sizes"].append(at(job, tokens, (given.train if job.cuda else []) if tokens in training else None))
        if given.video and tokens in VIDEO:
            result["video"].append(video(job, tokens))
        if job.rank == 0:
            report.save(result, given.json)
    if job.rank == 0:
        report.finish(result, markdown, given.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
