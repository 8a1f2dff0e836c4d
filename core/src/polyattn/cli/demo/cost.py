"""Step 4 measures what a call through polyattn adds over calling PyTorch's SDPA directly."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from rich.text import Text

from ... import attention, bind
from ..rendering import grid
from .step import Step

__all__ = ["run", "time_calls"]

TITLE = "What dispatch costs"
ROUNDS, CALLS = 25, 1500
DIRECT = "F.scaled_dot_product_attention"
BUDGETS = {"polyattn.bind": 1.5, "polyattn.attention": 2.5}
"""Microseconds that a quiet machine keeps to; a busy one may not, and fails nothing."""
LOST = 50.0
"""Microseconds that only a lost fast path can cost."""


def run(bar: Progress) -> Step:
    q, k, v = (torch.randn(1, 8, 1, 64) for _ in "qkv")
    site = bind(layout="BHSD")
    calls: dict[str, Callable[[], Any]] = {
        DIRECT: lambda: F.scaled_dot_product_attention(q, k, v),
        "polyattn.bind": lambda: site(q, k, v),
        "polyattn.attention": lambda: attention(q, k, v, layout="BHSD"),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            want = calls[DIRECT]()
            same = all(torch.allclose(call(), want, atol=1e-6) for call in calls.values())
            times = time_calls(calls, bar)
    finally:
        torch.set_num_threads(threads)
    rows = {name: _row(times[name], times[DIRECT]) for name in calls}
    slowest = max(rows[name]["added_us"] for name in BUDGETS)
    functional, bound = (rows[name]["added_us"] for name in ("polyattn.attention", "polyattn.bind"))
    table = grid("!call", "!microseconds", "!added", "!budget on a quiet machine")
    for name, row in rows.items():
        added = "-" if name == DIRECT else f"{row['added_us']:+.2f}"
        style = "good" if name in BUDGETS and row["added_us"] <= BUDGETS[name] else "warn" if name in BUDGETS else ""
        budget = f"{BUDGETS[name]:g}" if name in BUDGETS else "-"
        table.add_row(Text(name, style="name"), f"{row['call_us']:.2f}", Text(added, style=style), budget)
    return Step(
        title=TITLE,
        note="[1, 8, 1, 64] float32, one thread, calls interleaved, medians",
        verdict="pass" if same and slowest <= LOST else "fail",
        figure=f"attention adds {functional:.1f} us, bind {bound:.1f} us"
        + ("" if same else "; its output differs from direct SDPA's"),
        parts=(table,),
        data={"calls": rows, "same_output": same, "budgets_us": BUDGETS, "rounds": ROUNDS, "calls_per_round": CALLS},
    )


def time_calls(calls: dict[str, Callable[[], Any]], bar: Progress) -> dict[str, list[float]]:
    """Time calls, in microseconds, one figure per round. The calls take turns, and so does which one goes first."""
    names = list(calls)
    task = bar.add_task("timing dispatch", total=ROUNDS)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            call = calls[name]
            begin = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            found[name].append((time.perf_counter_ns() - begin) / CALLS / 1000)
        bar.advance(task)
    return found


def _row(mine: list[float], direct: list[float]) -> dict[str, float]:
    added = [a - b for a, b in zip(mine, direct, strict=True)]
    return {"call_us": round(statistics.median(mine), 3), "added_us": round(statistics.median(added), 3)}
