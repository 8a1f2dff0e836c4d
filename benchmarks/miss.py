"""What the first call of a new signature costs: Python calls, the functions and files they are in, and microseconds.

    python benchmarks/miss.py [--rounds 5] [--against CHECKOUT]

Measured on `attention` of [1, 8, 1, D] in float32 on the CPU, one thread, with a D that was not seen before, in
processes that take turns; the time of SDPA itself is taken off. `--against` names a checkout of another commit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CODE = """
import collections, json, statistics, sys, time
import torch
import polyattn
torch.set_num_threads(1)

def first(d):
    q = torch.randn(1, 8, 1, d)
    start = time.perf_counter_ns()
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    middle = time.perf_counter_ns()
    polyattn.attention(q, q, q, layout="BHSD")
    return (time.perf_counter_ns() - middle - (middle - start)) / 1000

for d in range(8, 40):
    first(d)
seen = collections.Counter()
q = torch.randn(1, 8, 1, 41)
sys.setprofile(lambda frame, event, arg: seen.update([frame.f_code]) if event == "call" else None)
polyattn.attention(q, q, q, layout="BHSD")
sys.setprofile(None)
times = [first(d) for d in range(50, 250)]
files = {code.co_filename for code in seen}
print(json.dumps({"calls": sum(seen.values()), "functions": len(seen), "files": len(files),
                  "us": statistics.median(times)}))
"""


def measured(checkout: Path) -> dict[str, float]:
    """One process of a checkout."""
    sources = [checkout / "core" / "src", *sorted(checkout.glob("plugins/[!_]*/src"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    checkouts = {"here": HERE, **({} if args.against is None else {"against": args.against})}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            rows[name].append(measured(checkout))
    for name, found in rows.items():
        middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
        print(f"{name}: {', '.join(f'{value:g} {key}' for key, value in middle.items())}")
    if args.against is not None:
        ratios = [a["us"] / b["us"] for a, b in zip(rows["here"], rows["against"], strict=True)]
        print(f"time, here over against: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
