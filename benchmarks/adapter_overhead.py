"""What polyattn's adapters cost: a library through polyattn beside the same library called by hand, same kernel.

    python benchmarks/adapter_overhead.py [--device cuda] [--rounds 41] [--calls 1000] [--json FILE]
    python benchmarks/adapter_overhead.py --render FILE     # a result file as the table of docs/benchmarks.md

Host time per call, on calls so small that the device is not what is waited for; median of what is added, over rounds in
one process, interleaved. By hand is a peer of `polyattn bench` (benchmarks/peers): the library's own Python function,
prepared for the problem and called. Where that is more than a call of its operator, the operator is called as well, and
what is added to it is given beside. Dense: one token of 8 heads of 64, in the library's layout; `functional` is
`polyattn.attention`, `bound` a `polyattn.bind`. Paged: a decode step of 4 sequences of 256 keys, planned once:
`planned` is a layer's call of `AttentionBackend`. Both are recorded into device graphs too, where there are such:
`replayed` is what a call takes in a replay beyond the library's, on the device. Results are compared before anything is
timed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import report
import torch
from host_time import added, interleaved

import polyattn
from polyattn.bench import Row, peers
from polyattn.bench.measure import Clock, Inputs
from polyattn.bench.workloads import inputs_of, workload
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.serving import (
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    KVCacheConfig,
    KVPool,
    Limits,
    PageAllocator,
    RequestTable,
)

PEERS = os.path.join(os.path.dirname(__file__), "peers")
PAIRS = {
    "dense": {"sdpa": "torch_sdpa", "fa3_varlen": "fa3", "fa4": "fa4"},
    "paged": {"fa3": "fa3", "fa4": "fa4", "flashinfer_fa2": "flashinfer", "xqa": "trtllm_mha"},
}
"""Library by hand -> the backend of polyattn that calls the same kernel."""
OPERATORS = {("dense", "fa3_varlen"): "fa3"}
"""Its operator without its Python."""
PAGES = {"fa4": 128}
"""Tokens of a page, where a library does not take 16."""
OPTIONS = {"paged": {"fa4": {"free_slots": "finite"}}}
"""What makes it the same kernel: the pools here hold numbers everywhere, as the library wants it."""
BUDGETS = {"functional": 2.5, "bound": 1.5, "planned": 3.0}
"""Microseconds."""
BY_HAND, OPERATOR = "by hand", "operator"
IN_GRAPH = 32
"""Calls of one recording."""

Call = Callable[[], Any]


def dense(peer: peers.Peer, operator: peers.Peer | None, backend: str, device: torch.device) -> dict[str, Call]:
    """By hand, functional and bound, each in the layout of the library."""
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    row = Row(
        family="overhead", kind="dense", heads=8, kv_heads=8, head_dim=64, batch=1, q_len=1, causal=False, dtype=dtype
    )
    inputs = inputs_of(row, workload(row, device), device, sets=1)
    q, k, v = (inputs.tensors[0][name] for name in ("query", "key", "value"))
    layout, by_hand = "BSHD", functools.partial(peer.prepare(inputs), 0)
    if backend == "torch_sdpa":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        layout, by_hand = "BHSD", lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    site = polyattn.bind(layout=layout, backend=backend)
    bare = {} if operator is None else {OPERATOR: functools.partial(operator.prepare(inputs), 0)}
    return {
        BY_HAND: by_hand,
        **bare,
        "functional": lambda: polyattn.attention(q, k, v, layout=layout, backend=backend),
        "bound": lambda: site(q, k, v),
    }


def paged(peer: peers.Peer, operator: peers.Peer | None, backend: str, device: torch.device) -> dict[str, Call]:
    """By hand and planned: both over the pages and the tables of one engine."""
    size = PAGES.get(backend, 16)
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 4, "q_len": 1, "kv_len": 256}
    row = Row(family="overhead", kind="paged", **shape, page_size=size)
    layer = AttentionLayer(0, row.heads, row.kv_heads, row.head_dim)
    pages = 1 + row.batch * row.kv_len // row.page_size
    pool = KVPool([layer], KVCacheConfig(page_size=row.page_size), pages, dtype=torch.bfloat16, device=device)
    for tensor in pool.cache(0).tensors:
        tensor.normal_()
    table = RequestTable(row.batch, row.kv_len, row.page_size, [-1], [PageAllocator(pages)], device=device)
    numbers = [table.add() for _ in range(row.batch)]
    for number in numbers:
        table.extend(number, row.kv_len)
    table.flush()
    limits = Limits(max_sequences=row.batch, max_tokens=row.batch, max_seqlen=row.kv_len)
    engine = AttentionBackend([layer], pool, table, limits=limits, decode_backend=backend)
    batch = ForwardBatch(ForwardMode.DECODE, numbers, [row.kv_len] * row.batch, [1] * row.batch)
    (step,) = engine.plan(batch)
    engine.prepare()
    query = torch.randn(row.batch, row.heads, row.head_dim, dtype=torch.bfloat16, device=device)
    key_cache, value_cache = pool.cache(0).tensors
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    inputs = Inputs(workload(row, device), device, [tensors], dict(step.keywords), step=step, pool=pool)
    return {
        BY_HAND: functools.partial(peer.prepare(inputs), 0),
        "planned": lambda: engine.forward(query, None, None, layer),
    }


def check(calls: dict[str, Call]) -> None:
    """Nothing is timed that does not compute the same."""
    want = calls[BY_HAND]().double()
    for name, call in calls.items():
        error = float((call().double() - want).norm() / want.norm())
        if not error < 8e-3:
            raise SystemExit(f"{name} differs from the library by hand by {error:.1e}; nothing is timed")


def replayed(calls: dict[str, Call], clock: Clock) -> dict[str, float]:
    """Microseconds on the device that a call in a replay takes beyond the library's."""
    times = {name: clock.graph([call] * IN_GRAPH)[0]().seconds * 1e6 for name, call in calls.items()}
    return {name: round(time - times[BY_HAND], 3) for name, time in times.items() if name != BY_HAND}


@torch.inference_mode()
def measured(device: torch.device, rounds: int, calls: int) -> Iterator[dict[str, Any]]:
    """A row for each pair: times of its calls, or why there are none."""
    clock, libraries = Clock(device), peers.load([PEERS])
    for kind, make in (("dense", dense), ("paged", paged)):
        polyattn.configure(attention_backend_config=OPTIONS.get(kind, {}))
        for name, backend in PAIRS[kind].items():
            row: dict[str, Any] = {"kind": kind, "library": libraries[name].library, "backend": backend}
            try:
                ways = make(libraries[name], libraries.get(OPERATORS.get((kind, name), "")), backend, device)
                check(ways)
            except (ModuleNotFoundError, UnsupportedRequestError, BackendUnavailableError) as exc:
                reason = str(exc).partition("\n")[0].partition(". Backends that can")[0]
                yield {**row, "not_here": reason}
                continue
            times = interleaved(ways, rounds, calls, clock.synchronise)
            beside = added(times, OPERATOR) if OPERATOR in ways else {}
            graph = replayed(ways, clock) if clock.on_gpu else {}
            yield {**row, "us": added(times, BY_HAND), "operator_us": beside, "replayed_us": graph}


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    lines = [
        f"{report.caption(result)}; one thread.",
        "",
        "| library | backend | by hand us | call | adds us | budget | adds to the operator us | replayed adds us |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        for name, found in row.get("us", {}).items():
            if name in (BY_HAND, OPERATOR):
                continue
            beside = row["operator_us"].get(name)
            by_hand = f"{row['us'][BY_HAND]['call']:.2f}"
            graph = f"{row['replayed_us'][name]:.2f}" if name in row["replayed_us"] else ""
            cells = [
                row["library"],
                row["backend"],
                by_hand,
                name,
                f"{found['added']:.2f}",
                f"{BUDGETS[name]:g}",
                "" if beside is None else f"{beside['added']:.2f}",
                graph,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    missing = [f"- {row['library']}, {row['kind']}: {row['not_here']}" for row in result["rows"] if "not_here" in row]
    return "\n".join([*lines, *([""] if missing else []), *missing])


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=1000)
    args = report.arguments(parser, markdown)
    if args is None:
        return
    torch.set_num_threads(1)
    device = torch.device(args.device)
    result = {
        **report.stamp("adapter-overhead", device, **peers.versions_of(peers.load([PEERS]))),
        "rounds": args.rounds,
        "calls": args.calls,
        "budgets": BUDGETS,
        "rows": list(measured(device, args.rounds, args.calls)),
    }
    report.finish(result, markdown, args.json)


if __name__ == "__main__":
    main()
