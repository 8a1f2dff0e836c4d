"""Dual chunk attention: a decode step of a layer beside the sum of the three calls that it is made of.

    python benchmarks/dual_chunk.py [--json FILE]     # on a GPU
    python benchmarks/dual_chunk.py --small           # tiny, on the CPU: that it runs. No figure counts
    python benchmarks/dual_chunk.py --render FILE     # a result file as the table of docs/benchmarks.md

16 requests of 40,000 tokens of a Qwen2.5-7B-1M layer with 32 query heads, in chunks of 8,192. Each backend is compared
with torch's operators on the CPU in float32, over the same cache, before it is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import report
import torch
from beside import beside, run
from torch import Tensor

from polyattn.bench.measure import Clock
from polyattn.errors import PolyattnError
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
from polyattn.serving.dual_chunk import PARTS, DualChunk

MUST, MOST = 1.15, 0.01
BACKENDS = ("dual_chunk_flash_attn", "triton", "fa3")


class Size(NamedTuple):
    rows: int
    tokens: int
    heads: tuple[int, int]
    head_dim: int
    page_size: int
    chunks: DualChunk
    rounds: int


FULL = Size(16, 40000, (32, 8), 128, 64, DualChunk(9216, 1024), 9)
SMALL = Size(2, 20, (4, 2), 8, 4, DualChunk(12, 4), 1)


class Problem:
    """A layer over a pool of random keys, and queries of a decode step."""

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.layer = AttentionLayer(0, *size.heads, size.head_dim, dual_chunk=size.chunks)
        self.pages = size.rows * -(-size.tokens // size.page_size) + 1
        self.pool = KVPool(
            [self.layer], KVCacheConfig(page_size=size.page_size), self.pages, dtype=self.dtype, device=device
        )
        for cache in (self.pool.cache(0).key_cache, self.pool.cache(0).value_cache):
            assert cache is not None
            cache.normal_()
        shape = (size.rows, len(PARTS), size.heads[0], size.head_dim)
        self.query = torch.randn(*shape, dtype=self.dtype, device=device)

    def right(self) -> Tensor:
        """What torch's operators give for the same caches and queries on the CPU, in float32."""
        whole = Problem(self.size, torch.device("cpu"))
        whole.query.copy_(self.query)
        for name in ("key_cache", "value_cache"):
            getattr(whole.pool.cache(0), name).copy_(getattr(self.pool.cache(0), name))
        made = whole.backend("torch_native")
        return made.forward(whole.query, None, None, whole.layer).to(self.device)

    def backend(self, name: str) -> AttentionBackend:
        """A backend with the step planned."""
        size = self.size
        table = RequestTable(
            size.rows, size.tokens, size.page_size, [-1], [PageAllocator(self.pages)], device=self.device
        )
        limits = Limits(size.rows, size.tokens, size.tokens)
        made = AttentionBackend([self.layer], self.pool, table, limits=limits, backend=name)
        rows = [table.add() for _ in range(size.rows)]
        for row in rows:
            table.extend(row, size.tokens)
        made.init_forward_metadata(ForwardBatch(ForwardMode.DECODE, rows, [size.tokens] * size.rows, [1] * size.rows))
        return made


def measure(size: Size, clock: Clock) -> Iterator[dict[str, Any]]:
    problem = Problem(size, clock.device)
    right = problem.right()
    for name in BACKENDS if clock.on_gpu else ("torch_sdpa",):
        try:
            backend = problem.backend(name)
        except PolyattnError as exc:
            yield {"backend": name, "not_timed": f"{type(exc).__name__}: {str(exc).splitlines()[0]}"}
            continue
        whole = functools.partial(backend.forward, problem.query, None, None, problem.layer)
        checked = beside({"whole": whole}, right, MOST, clock, 1)["whole"]
        if "not_timed" in checked:
            yield {"backend": name, **checked}
            continue
        chunk_calls = backend._any[0]._calls
        parts = {
            part: functools.partial(call, problem.query[:, n], None, None, False)
            for n, (part, call) in enumerate(zip(PARTS, chunk_calls, strict=True))
        }
        found = beside({"whole": whole, **parts}, None, 0.0, clock, size.rounds)
        row: dict[str, Any] = {"backend": name, "error": checked["error"], "calls": found}
        if all("us" in one for one in found.values()):
            row["times_sum"] = round(found["whole"]["us"] / sum(found[part]["us"] for part in parts), 3)
            row["must"] = MUST
        yield row


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    lines = [
        f"{report.caption(result)}.",
        "",
        f"| backend | error | whole us | {' us | '.join(PARTS)} us | whole over their sum, at most {MUST:g} |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        if "not_timed" in row:
            lines.append(f"| `{row['backend']}` | not timed: {row['not_timed']} |" + " |" * 5)
            continue
        times = [f"{row['calls'][one]['us']:.1f}" if "us" in row["calls"][one] else "-" for one in ("whole", *PARTS)]
        said = "-"
        if "times_sum" in row:
            said = f"{row['times_sum']:.2f}: {'met' if row['times_sum'] <= row['must'] else 'missed'}"
        lines.append(f"| `{row['backend']}` | {row['error']:.1e} | {' | '.join(times)} | {said} |")
    return "\n".join(lines)


def main() -> None:
    run("dual-chunk", __doc__, markdown, measure, (SMALL, FULL))


if __name__ == "__main__":
    main()
