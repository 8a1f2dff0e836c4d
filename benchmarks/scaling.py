"""How the costs of polyattn grow with use: each quantity at three sizes a decade apart, and the exponent of its growth.

    python benchmarks/scaling.py [--small] [--only WORDS] [--rounds 5] [--json benchmarks/results/scaling.json]
    python benchmarks/scaling.py --render FILE     # a result file as the table of docs/benchmarks.md

A quantity (benchmarks/quantities/) builds a state of a size, a full prefix cache of n prefixes for example, and gives
the operation to time. Sizes take turns within a round; a time is CPU time of this process, the median of the rounds.
The exponent is the slope of log(time) over log(size): 0 does not grow, 1 grows with the size. The command ends with 1
where an exponent is above what the quantity allows. `--small` takes sizes that CI can afford. Torch runs on one thread:
threads that wait for each other on a busy machine would count as time of the operation. Another process can still
disturb one size, so a quantity above its limit is measured anew, twice at most; a cost that grows is above each time.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from typing import Any

import report
import torch
from quantities import QUANTITIES
from quantities.common import Quantity

ATTEMPTS = 3


def exponent(sizes: list[int], times: list[float]) -> float:
    """The least-squares slope of log(time) over log(size)."""
    xs, ys = [math.log(size) for size in sizes], [math.log(time) for time in times]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    over = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return over / sum((x - mean_x) ** 2 for x in xs)


def measured(quantity: Quantity, sizes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """The times of one quantity, in microseconds of one operation, and the exponent of their growth."""
    operations = [quantity.prepare(size) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    gc.collect()
    gc.freeze()  # what is there by now, all of torch among it, is not looked through again before every operation
    for number in range(rounds + 1):
        for operation, found in zip(operations, times, strict=True):
            gc.collect()
            start = time.process_time_ns()
            count = operation()
            spent = time.process_time_ns() - start
            if number:  # the first round warms up
                found.append(spent / 1000 / count)
    gc.unfreeze()
    medians = [statistics.median(found) for found in times]
    return {
        "name": quantity.name,
        "sizes": list(sizes),
        "size_is": quantity.size_is,
        "us": [round(value, 3) for value in medians],
        "exponent": round(exponent(list(sizes), medians), 3),
        "allowed": quantity.allowed,
    }


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    lines = [
        report.caption(result) + ".",
        "",
        "| cost of one | grows with | sizes | us | exponent | allowed |",
        "|---|---|---|---|---:|---:|",
    ]
    for row in result["rows"]:
        sizes, times = (", ".join(map(form, row[name])) for name, form in (("sizes", "{:,}".format), ("us", figure)))
        lines.append(
            f"| {row['name']} | {row['size_is']} | {sizes} | {times} | {row['exponent']:.2f} | {row['allowed']:g} |"
        )
    return "\n".join(lines)


def figure(us: float) -> str:
    """A time with three digits that mean something."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--small", action="store_true", help="sizes that CI can afford")
    parser.add_argument("--only", default="", help="words that a quantity's name must contain")
    parser.add_argument("--rounds", type=int, default=5)
    asked = report.arguments(parser, markdown)
    if asked is None:
        return 0

    torch.set_num_threads(1)
    rows = []
    for quantity in QUANTITIES:
        if asked.only not in quantity.name:
            continue
        for _ in range(ATTEMPTS):
            row = measured(quantity, quantity.small if asked.small else quantity.sizes, asked.rounds)
            if row["exponent"] <= quantity.allowed:
                break
        rows.append(row)
        times = "  ".join(f"{size:>9,}: {us:>11,.1f}" for size, us in zip(row["sizes"], row["us"], strict=True))
        verdict = "ok" if row["exponent"] <= quantity.allowed else "ABOVE"
        print(f"{quantity.name:<58} {times} us   n^{row['exponent']:.2f} (<= {quantity.allowed}) {verdict}", flush=True)
    if not rows:
        print(f"no quantity has {asked.only!r} in its name", file=sys.stderr)
        return 2
    report.save({**report.stamp("scaling"), "rows": rows}, asked.json)
    return int(any(row["exponent"] > row["allowed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
