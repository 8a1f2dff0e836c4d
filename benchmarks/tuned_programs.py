"""What tuning is worth to whole programs: traced, tuned from the trace, and run without measurements and with them.

    python benchmarks/tuned_programs.py [--json FILE] [PROGRAM ...]   # the two of examples/, from an empty store
    python benchmarks/tuned_programs.py --render FILE                 # a result file as the table of docs/benchmarks.md

Each program says several times how long the same work took; the fastest counts, so that compiling a kernel for the
first time is in no figure. The seconds of whole processes are kept in the result beside it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
import torch

from polyattn.bench import peers

EXAMPLES = Path(__file__).parents[1] / "examples"
PEERS = Path(__file__).parent / "peers"
PROGRAMS = ("transformers_generate.py", "diffusion_transformer.py")
SAID = re.compile(r"\bin (\d+\.\d+) s\b")
"""How a program says what a run of its work took."""


def ran(words: list[str], store: Path) -> tuple[str, str]:
    """What `polyattn` with these words printed, and what went beside that."""
    environ = {**os.environ, "POLYATTN_TUNING_STORE": str(store), "POLYATTN_TUNING": "use"}
    done = subprocess.run(
        [sys.executable, "-m", "polyattn", *words], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"polyattn {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout, done.stderr


def measured(program: Path, folder: Path) -> dict[str, Any]:
    """One program: seconds of its work and of its process, without measurements and with them, and who served what."""
    store, trace = folder / f"{program.stem}.sqlite3", folder / f"{program.stem}.jsonl"
    script = [sys.executable, str(program)]
    ran(["trace", "--out", str(trace), "--", *script], store)
    ran(["tune", "--from", str(trace)], store)
    found, said = ran(["trace", "--compare", "--json", "--out", str(trace), "--", *script], store)
    compared, took = json.loads(found), [float(text) for text in SAID.findall(said)]
    if not took or len(took) % 2:
        sys.exit(
            f"{program.name} was run twice and is to say the same number of times how long it took; it said {took}"
        )
    half = len(took) // 2
    return {
        "program": program.name,
        "work": {"without": min(took[:half]), "with": min(took[half:])},
        "process": {name: compared["seconds"][name] for name in ("without", "with")},
        "requests": [
            {name: one[name] for name in ("request", "count", "before", "backend")} for one in compared["requests"]
        ],
    }


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    lines = [
        f"{report.caption(result)}.",
        "",
        "| program | requests, changed | without s | with s | ratio | who serves, calls |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        pairs: dict[tuple[str, str], int] = {}
        for one in row["requests"]:
            pair = one["before"], one["backend"]
            pairs[pair] = pairs.get(pair, 0) + one["count"]
        served = [f"{old}, {n}" if old == new else f"{old} → {new}, {n}" for (old, new), n in pairs.items()]
        changed = sum(one["before"] != one["backend"] for one in row["requests"])
        was, now = row["work"]["without"], row["work"]["with"]
        cells = [f"{was:.3f}", f"{now:.3f}", f"{was / now:.2f}", "; ".join(served)]
        lines.append(f"| {row['program']} | {len(row['requests'])}, {changed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("programs", nargs="*", type=Path, metavar="PROGRAM")
    args = report.arguments(parser, markdown)
    if args is None:
        return
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    rows: list[dict[str, Any]] = []
    result = {**report.stamp("tuned-programs", device, **peers.versions_of(peers.load([str(PEERS)]))), "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        for program in args.programs or [EXAMPLES / name for name in PROGRAMS]:
            rows.append(measured(program, Path(folder)))
            report.save(result, args.json)
    report.finish(result, markdown, args.json)


if __name__ == "__main__":
    main()
