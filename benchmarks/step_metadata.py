"""What a step's metadata costs: built once and read by every backend, beside the same made anew by each of them.

    python benchmarks/step_metadata.py [--rounds 15] [--json FILE]
    python benchmarks/step_metadata.py --render FILE     # a result file as the table of docs/benchmarks.md

One decode step of N requests, 512 to 3,072 keys each in pages of 16, on the CPU, one thread. A backend needs its page
table, cu_seqlens, indptr and indices, lengths of the last pages, and the table and lengths inside a window of 1,024.
`rebuilt` makes them from the request table and the lengths with torch's operators, as a backend does that is on its
own, after the engine brought the lengths to the device and made the slots and positions of the new tokens. `built` is
`StepBuffers.build`, which does that too, and the reads; `advanced` the same after `StepBuffers.advance`. What they make
is compared before anything is timed. Times are the processor's, medians over rounds, interleaved in one process; bytes
are those of all results of operators, `new` those in memory that was allocated for them.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import report
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.serving.step.step import Step, StepBuffers

PAGE, WINDOW, MAX_TOKENS, LONGEST = 16, 1023, 4096, 3072
BATCHES = (1, 4, 16, 64, 256)
BACKENDS = (1, 2, 20)
NAMES = (
    "page_table",
    "cu_seqlens_k",
    "kv_indptr",
    "kv_indices",
    "last_page_len",
    "window table",
    "window seq_lens",
    "slots",
    "positions",
)


class Problem:
    """N running requests and their next step."""

    def __init__(self, count: int) -> None:
        draw = random.Random(count)
        self.lens = [draw.randint(512, LONGEST) for _ in range(count)]
        self.table = RequestTable(count, MAX_TOKENS, PAGE, [-1], [PageAllocator(count * MAX_TOKENS // PAGE + 1)])
        self.rows = [self.table.add() for _ in range(count)]
        for row in draw.sample(self.rows, count):
            # Room for every step that is timed: what is measured is metadata, not the allocation of pages.
            self.table.extend(row, MAX_TOKENS)
        self.table.flush()
        self.buffers = StepBuffers(count, count, MAX_TOKENS // PAGE)
        self.batch = ForwardBatch(ForwardMode.DECODE, self.rows, self.lens, [1] * count)

    def build(self, backends: int) -> list[Tensor]:
        self.buffers._batch = None  # not the step after the last
        (step,) = self.buffers.build(self.batch, self.table)
        return [*read(step, backends), step.slots, step.positions]

    def advance(self, backends: int) -> list[Tensor]:
        (step,) = self.buffers.advance()
        return [*read(step, backends), step.slots, step.positions]

    def rebuild(self, backends: int) -> list[Tensor]:
        """By each backend, after the engine's own part."""
        table, rows = self.table.tables[0], torch.tensor(self.rows, dtype=torch.int32)
        seq_lens = torch.tensor(self.lens, dtype=torch.int32)
        positions = seq_lens.long() - 1
        slots = table[rows.long(), positions // PAGE].long() * PAGE + positions % PAGE
        longest = max(self.lens)
        for _ in range(backends):
            found = alone(table, rows, seq_lens, longest)
        return [*found, slots, positions]


def read(step: Step, backends: int) -> list[Tensor]:
    for _ in range(backends):
        windowed = step.windowed(WINDOW)
        found = [step.page_table, step.cu_seqlens_k, step.kv_indptr, step.kv_indices, step.last_page_len]
        found += [windowed.page_table, windowed.seq_lens]
    return found


def alone(table: Tensor, rows: Tensor, seq_lens: Tensor, longest: int) -> list[Tensor]:
    """What one backend needs, by itself."""
    columns = -(-longest // PAGE)
    page_table = table[:, :columns].index_select(0, rows)
    cu_seqlens_k = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    pages = (seq_lens + PAGE - 1) // PAGE
    kv_indptr = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    kv_indices = page_table[torch.arange(columns) < pages[:, None]]
    last_page_len = seq_lens - (pages - 1) * PAGE
    first = (seq_lens - 1 - WINDOW).clamp(min=0) // PAGE
    inside = min(columns, -(-(WINDOW + PAGE) // PAGE))
    places = (first[:, None] + torch.arange(inside)).clamp(max=columns - 1)
    return [
        page_table,
        cu_seqlens_k,
        kv_indptr,
        kv_indices,
        last_page_len,
        page_table.gather(1, places),
        seq_lens - first * PAGE,
    ]


class Count(TorchDispatchMode):
    """Operators, the bytes of their results, and those of them in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.written = self.new = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.is_view:
            return found
        self.operators += 1
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(found):
            self.written += tensor.nbytes
            self.new += tensor.nbytes * (tensor.untyped_storage().data_ptr() not in before)
        return found


def check(problem: Problem) -> None:
    """Nothing is timed that does not make the same."""
    want = problem.rebuild(1)
    for make in (problem.build, problem.rebuild):
        for name, found, wanted in zip(NAMES, make(1), want, strict=True):
            if name == "window table":  # past the pages of a row there is anything
                used = (problem.buffers.steps[0].windowed(WINDOW).seq_lens + PAGE - 1) // PAGE
                owned = torch.arange(min(found.shape[1], wanted.shape[1])) < used[:, None]
                found, wanted = (t[:, : owned.shape[1]][owned] for t in (found, wanted))
            if not torch.equal(found, wanted):
                raise SystemExit(f"{name} differs; nothing is timed")


def measured(problem: Problem, backends: int, rounds: int) -> dict[str, dict[str, float]]:
    """Per way: microseconds of the processor, operators, bytes of one step."""
    ways: dict[str, Callable[[int], list[Tensor]]] = {
        "rebuilt": problem.rebuild,
        "built": problem.build,
        "advanced": problem.advance,
    }
    calls = max(10, min(100, 2000 // len(problem.rows)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        problem.build(backends)
        for name, way in ways.items():
            start = time.process_time_ns()
            for _ in range(calls):
                way(backends)
            times[name].append((time.process_time_ns() - start) / calls / 1000)
    rows = {}
    for name, way in ways.items():
        problem.build(backends)
        with Count() as count:
            way(backends)
        low, middle, high = statistics.quantiles(times[name], n=4)
        rows[name] = {
            "us": middle,
            "spread": high - low,
            "operators": count.operators,
            "bytes": count.written,
            "new_bytes": count.new,
        }
    return rows


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    lines = [
        f"{report.caption(result)}; one thread.",
        "",
        "| requests | backends | rebuilt us | built us | advanced us | rebuilt KiB | built KiB | new KiB | operators |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        ways = row["ways"]
        us = [f"{ways[name]['us']:.0f}" for name in ("rebuilt", "built", "advanced")]
        kib = [ways["rebuilt"]["bytes"], ways["built"]["bytes"], ways["built"]["new_bytes"]]
        operators = " / ".join(str(ways[name]["operators"]) for name in ("rebuilt", "built", "advanced"))
        cells = [row["requests"], row["backends"], *us, *(f"{n / 1024:.0f}" for n in kib), operators]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = report.arguments(parser, markdown)
    if args is None:
        return
    torch.set_num_threads(1)
    rows = []
    for count in BATCHES:
        problem = Problem(count)
        check(problem)
        rows += [{"requests": count, "backends": n, "ways": measured(problem, n, args.rounds)} for n in BACKENDS]
    result = {
        **report.stamp("step-metadata"),
        "rounds": args.rounds,
        "page_size": PAGE,
        "window": WINDOW,
        "rows": rows,
    }
    report.finish(result, markdown, args.json)


if __name__ == "__main__":
    main()
