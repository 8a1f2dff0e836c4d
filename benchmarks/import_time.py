"""What importing costs, beside pluggy: `python benchmarks/import_time.py [--runs 7] [--json]`.

Each figure is the median over fresh processes with compiled bytecode, less that of a bare interpreter. Wall time
wanders with the machine, so this is a report, never a gate; what must hold exactly (no torch in sys.modules) is in
tests/test_imports.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import entry_points, version

STATEMENTS = {
    "pluggy": "import pluggy",
    "entry points scanned": "from importlib.metadata import entry_points as e; e(group='polyattn.backends')",
    "polyattn": "import polyattn",
    "polyattn, backends listed": "import polyattn; polyattn.list_backends()",
    "torch": "import torch",
}


def run_once(statement: str) -> float:
    """Seconds that a fresh interpreter takes for one statement; it may write bytecode, as a user's does."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, env=env)
    return time.perf_counter() - begin


def measure(runs: int) -> dict[str, float]:
    """Statement -> median milliseconds above a bare interpreter; the statements are interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in ("bare", *STATEMENTS)}
    run_once("import polyattn; polyattn.list_backends()")  # compiles what an editable install has not compiled yet
    for _ in range(runs):
        for name, taken in samples.items():
            taken.append(run_once(STATEMENTS.get(name, "pass")))
    bare = statistics.median(samples.pop("bare"))
    return {name: 1e3 * (statistics.median(taken) - bare) for name, taken in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="fresh processes per row (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    figures = measure(options.runs)
    plugins = sorted(entry.name for entry in entry_points(group="polyattn.backends"))
    if options.json:
        where = {"python": platform.python_version(), "machine": platform.machine(), "pluggy": version("pluggy")}
        print(json.dumps({"runs": options.runs, "plugins": plugins, **where, "milliseconds": figures}, indent=2))
        return
    print(f"Python {platform.python_version()}, {options.runs} runs each, plugins: {', '.join(plugins) or 'none'}")
    print("| import | ms | x pluggy |\n|---|---:|---:|")
    for name, milliseconds in figures.items():
        print(f"| {name} | {milliseconds:.0f} | {milliseconds / figures['pluggy']:.1f} |")


if __name__ == "__main__":
    main()
