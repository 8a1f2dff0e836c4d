"""How the costs of polyattn grow with use: each quantity at three sizes a decade apart, and the exponent of its growth.

    python benchmarks/scaling.py [--small] [--only WORDS] [--rounds 5] [--output benchmarks/results/scaling.json]

A quantity (benchmarks/quantities/) builds a state of a size, a full prefix cache of n prefixes for example, and gives
the operation to time. Sizes take turns within a round; a time is CPU time of this process, the median of the rounds.
The exponent is the slope of log(time) over log(size): 0 does not grow, 1 grows with the size. The command ends with 1
where an exponent is above what the quantity allows. `--small` takes sizes that CI can afford.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

from quantities import QUANTITIES
from quantities.common import Quantity

import polyattn


def exponent(sizes: list[int], times: list[float]) -> float:
    """The least-squares slope of log(time) over log(size)."""
    xs, ys = [math.log(size) for size in sizes], [math.log(time) for time in times]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    over = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return over / sum((x - mean_x) ** 2 for x in xs)


def measured(quantity: Quantity, sizes: tuple[int, ...], rounds: int) -> dict[str, object]:
    """The times of one quantity, in microseconds of one operation, and the exponent of their growth."""
    operations = [quantity.prepare(size) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    gc.freeze()  # else each collection below walks the state, and all that was imported
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="sizes that CI can afford")
    parser.add_argument("--only", default="", help="words that a quantity's name must contain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()

    rows = []
    for quantity in QUANTITIES:
        if asked.only not in quantity.name:
            continue
        row = measured(quantity, quantity.small if asked.small else quantity.sizes, asked.rounds)
        rows.append(row)
        times = "  ".join(f"{size:>9,}: {us:>11,.1f}" for size, us in zip(row["sizes"], row["us"], strict=True))
        verdict = "ok" if row["exponent"] <= quantity.allowed else "ABOVE"
        print(f"{quantity.name:<58} {times} us   n^{row['exponent']:.2f} (<= {quantity.allowed}) {verdict}", flush=True)
    if not rows:
        print(f"no quantity has {asked.only!r} in its name", file=sys.stderr)
        return 2
    if asked.output:
        told = {
            "command": "python benchmarks/scaling.py" + (" --small" if asked.small else ""),
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "polyattn": polyattn.__version__,
            "quantities": rows,
        }
        asked.output.write_text(json.dumps(told, indent=1) + "\n")
    return int(any(row["exponent"] > row["allowed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
