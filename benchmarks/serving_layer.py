"""What serving costs beyond its kernels: a layer's call, and a step's plan; host time, one thread.

    python benchmarks/serving_layer.py [--device cpu] [--rounds 41] [--calls 3000] [--json FILE]
    python benchmarks/serving_layer.py --render FILE     # a result file as the table of docs/benchmarks.md

The kernel is one that does nothing but return its output, so that the rest is visible. `kernel by hand` is its bound
forward called with the step's tables; `forward_decode`, `forward` and `paged_attention` reach the same function, and
return the same tensor (checked before anything is timed). New keys and values are in the cache: what writes them is a
kernel; `with new keys` is `forward` with them, which on a device is its launch. Added microseconds are medians over
rounds, interleaved in one process; `spread` is their interquartile range. `step` is plan and prepare, once for all
layers of a decode step, which is the one after the last (`ForwardBatch.next`, in the time too); rows have their pages
already.
On a device with graphs also `replay`: a whole step whose graph holds the preparing and no kernel, whose ids lie where
the graph reads them, as a sampler on the device leaves them there; and `eager step`: plan, prepare, and what the calls
of all layers add. `tables` says who writes them on the device: core's operators, or
the kernels of a package.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import report
import torch

import polyattn
from polyattn.contract import AttentionRequest, BackendInfo, Bound, PagedTables, Provider, Range, row
from polyattn.contract.hookspecs import hookimpl
from polyattn.dispatch.device_facts import device_facts
from polyattn.registry.device_ops import device_ops
from polyattn.serving import (
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    KVCacheConfig,
    KVPool,
    Limits,
    PageAllocator,
    RequestTable,
    Step,
)

HEADS, KV_HEADS, WIDTH, LAYERS, TOKENS, PAGE = 8, 2, 64, 32, 512, 16
STEPS = PAGE + 1
"""Steps from the first one to the first again: fewer would be other steps in each round."""
BATCHES = (1, 8, 64)
BUDGET = 2.5
"""Microseconds of `forward_decode` beyond the kernel."""
STEP_BUDGETS = {"eager step": 150.0, "replay": 30.0}
"""Microseconds of a decode step of 32 layers, on a device with graphs."""

TITLES = {
    "kernel by hand": "kernel by hand us",
    "forward_decode": "forward_decode adds us",
    "forward": "forward adds us",
    "with new keys": "with new keys adds us",
    "paged_attention": "paged_attention adds us",
    "step": "plan and prepare us",
    "eager step": "eager step us",
    "replay": "replayed step us",
}

OUT: dict[torch.device, torch.Tensor] = {}
"""What the kernel returns, by device."""


POLYATTN_API_VERSION = 2


class Nothing:
    """Binds every request to a function that returns memory it was not asked to fill."""

    def bind(self, request: AttentionRequest) -> Bound:
        def forward(query: torch.Tensor, *caches: torch.Tensor, tables: PagedTables, **given: Any) -> torch.Tensor:
            return OUT[query.device][: query.shape[0]]

        return Bound(forward)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    rows = row(
        family="paged", phase=("extend", "decode"), dtype="float32", head_dim=Range(1), group=True, page_size=Range(1),
        causal=("none", "bottom_right"), s_relation=("fewer", "one"), save_kv_cache=True, graph_capture=True,
    )  # fmt: skip
    for platform in {"cpu", *(device_facts(device)["platform"] for device in OUT)}:
        provider = Provider("nothing", (rows,), f"{__name__}:Nothing")
        yield BackendInfo("nothing", platform, (provider,), summary="no kernel")


class Problem:
    """Decode steps of `count` requests, the first of them planned."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.layers = [AttentionLayer(i, HEADS, KV_HEADS, WIDTH) for i in range(LAYERS)]
        pages = 1 + count * (TOKENS // PAGE + 1)
        pool = KVPool(self.layers, KVCacheConfig(page_size=PAGE), pages, dtype=torch.float32, device=device)
        table = RequestTable(count, TOKENS + PAGE, PAGE, [-1], [PageAllocator(pages)], device=device)
        rows = [table.add() for _ in range(count)]
        for number in rows:
            table.extend(number, TOKENS + PAGE)
        limits = Limits(max_sequences=count, max_tokens=count, max_seqlen=TOKENS + PAGE)
        self.backend = AttentionBackend(self.layers, pool, table, limits=limits, backend="nothing")
        self.first = self._batch = ForwardBatch(ForwardMode.DECODE, rows, [TOKENS] * count, [1] * count)
        self.tables = self.begin().tables
        self.caches = pool.cache(0).tensors
        self.query = torch.randn(count, HEADS, WIDTH, device=device)
        self.new = torch.randn(2, count, KV_HEADS, WIDTH, device=device)

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Name -> one layer's call."""
        bound, layer, backend, batch = (
            Nothing().bind(AttentionRequest()).forward,
            self.layers[0],
            self.backend,
            self.first,
        )
        query, caches, tables, (key, value) = self.query, self.caches, self.tables, self.new
        more: dict[str, Any] = {"causal": True, "backend": "nothing"}
        more |= {name: getattr(tables, name) for name in PagedTables._fields[:5]}
        return {
            "kernel by hand": lambda: bound(query, *caches, tables=tables),
            "forward_decode": lambda: backend.forward_decode(query, None, None, layer, batch),
            "forward": lambda: backend.forward(query, None, None, layer),
            "with new keys": lambda: self.again().forward(query, key, value, layer),
            "paged_attention": lambda: polyattn.paged_attention(query, *caches, **more),
        }

    def again(self) -> AttentionBackend:
        """The backend, whose planned step no layer has written: preparing it again would be timed with the call."""
        self.backend._any[0].step.written.clear()  # type: ignore[attr-defined]
        return self.backend

    def begin(self) -> Step:
        """Plan the first step."""
        self._batch = self.first
        (step,) = self.backend.plan(self.first)
        self.backend.prepare()
        return step

    def next(self) -> ForwardBatch:
        """The step after the last, and the first again where that would need another page."""
        whole = self._batch.seq_lens[0] == TOKENS + PAGE
        self._batch = self.first if whole else self._batch.next()
        return self._batch

    def step(self) -> None:
        self.backend.plan(self.next())
        self.backend.prepare()

    def replay(self) -> Callable[[], Any]:
        """A replayed step of all layers, on a device with graphs. None of its replays waits for the device."""

        def model(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                out = self.backend.forward(self.query, None, None, layer)
            return out

        runner = GraphRunner(
            self.backend, model, max_sequences=self.count, buckets=[self.count], device=self.device,
            planned_positions=True,
        )  # fmt: skip
        ids = runner.input_ids[: self.count]
        runner.run(self.first, ids)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(PAGE + 2):
                runner.run(self.next(), ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return lambda: runner.run(self.next(), ids)


def timed(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls / 1000


@torch.inference_mode()
def measured(count: int, rounds: int, calls: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Per name: added microseconds over the kernel by hand; of steps their whole time."""
    OUT[device] = torch.zeros(count, HEADS, WIDTH, device=device)
    problem = Problem(count, device)
    ways = problem.calls()
    for name, way in ways.items():
        found = way()
        if found.data_ptr() != OUT[device].data_ptr() or found.shape != problem.query.shape:
            raise SystemExit(f"{name} does not return what the kernel returned; nothing is timed")
    times: dict[str, list[float]] = {name: [] for name in ways}
    steps = []
    for _ in range(rounds):
        problem.begin()
        for name, way in ways.items():
            # The functional call checks page tables on the CPU: its cost grows with the batch.
            times[name].append(timed(way, calls if name != "paged_attention" else max(calls // 20, 10)))
        steps.append(timed(problem.step, STEPS))
    base = times.pop("kernel by hand")
    rows = {name: _row([t - b for t, b in zip(each, base, strict=True)]) for name, each in times.items()}
    found = {"kernel by hand": _row(base), **rows, "step": _row(steps)}
    if device.type != "cpu":
        layers = [t - b for t, b in zip(times["forward"], base, strict=True)]
        found["eager step"] = _row([step + LAYERS * one for step, one in zip(steps, layers, strict=True)])
        replay = problem.replay()
        found["replay"] = _row([timed(replay, STEPS) for _ in range(rounds)])
    return found


def _row(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"us": round(middle, 3), "spread": round(high - low, 3)}


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    names = list(result["rows"][0]["us"])
    tables = f", tables by {result['tables']}" if "tables" in result else ""
    lines = [
        f"{report.caption(result)}; one thread, {result['layers']} layers{tables}.",
        "",
        f"| requests | {' | '.join(TITLES[name] for name in names)} |",
        f"|---:|{'---:|' * len(names)}",
    ]
    for each in result["rows"]:
        cells = [str(each["requests"]), *(f"{each['us'][name]['us']:.2f}" for name in names)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, nargs="+", default=BATCHES, metavar="N")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=3000)
    args = report.arguments(parser, markdown)
    if args is None:
        return
    torch.set_num_threads(1)
    device = torch.device(args.device)
    device = torch.device(device.type, 0) if device.type != "cpu" and device.index is None else device
    OUT[device] = torch.zeros(0)
    polyattn.register_plugin(sys.modules[__name__], name="nothing")
    ops = device_ops(device.type)
    result = {
        **report.stamp("serving-layer", device),
        "rounds": args.rounds,
        "calls": args.calls,
        "layers": LAYERS,
        "tables": ops.name if hasattr(ops, "writer") else "polyattn",
        "budget": BUDGET,
        "budgets": STEP_BUDGETS,
        "rows": [{"requests": n, "us": measured(n, args.rounds, args.calls, device)} for n in args.requests],
    }
    report.finish(result, markdown, args.json)


if __name__ == "__main__":
    main()
