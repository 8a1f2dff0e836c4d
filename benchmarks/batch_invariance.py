"""What batch-invariant decode costs: the Triton package's kernels asked for the same bits whatever else is in a batch.

    python benchmarks/batch_invariance.py [--json FILE] [--quick]   # --quick: tiny, does everything run?
    python benchmarks/batch_invariance.py --render FILE             # a result file as the table of docs/kernels.md

A decode step as an engine replays it, with both: parts of a sequence as the batch fills the chip, and parts of a fixed
length. Both are checked against the reference, and timed in one run by turns. That the bits are those of a request
alone is for conformance to show (`batch_invariant`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import report
import torch

from polyattn.bench import Row
from polyattn.bench.measure import Call, Candidate, Clock, Inputs, candidates, measure
from polyattn.bench.workloads import inputs_of, workload

BACKEND = "triton"
PAGED: dict[str, Any] = {"kind": "paged", "heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16}
LATENT: dict[str, Any] = {"kind": "latent", "heads": 128, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
ROWS = (
    *(
        Row(family="decode", **PAGED, batch=b, q_len=1, kv_len=n)
        for b, n in ((1, 2048), (1, 32768), (8, 8192), (64, 8192))
    ),
    *(Row(family="latent", **LATENT, page_size=64, batch=b, q_len=1, kv_len=n) for b, n in ((1, 4096), (32, 4096))),
)
WAYS = {"as the batch fills the chip": False, "batch-invariant": True}


@dataclasses.dataclass(frozen=True)
class Way:
    """An entrant of `measure`: the backend, asked for the same bits in any batch or not."""

    name: str
    candidate: Candidate

    def prepare(self, inputs: Inputs) -> Call:
        request = dataclasses.replace(inputs.workload.request, batch_invariant=WAYS[self.name])
        asked = dataclasses.replace(inputs.workload, request=request)
        return self.candidate.prepare(dataclasses.replace(inputs, workload=asked))


def measured(device: torch.device, *, quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each step: microseconds by way, or why there are none."""
    clock = Clock(device)
    for full in ROWS:
        row = full.tiny() if quick else full
        asked = workload(row, device)
        (one,) = (one for one in candidates(asked, device, by_name=True) if one.name == BACKEND)
        ways = [Way(name, one) for name in WAYS]
        found = measure(inputs_of(row, asked, device), ways, clock=clock, rounds=1 if quick else 9, recorded=True)
        found = {name: found[name] for name in WAYS}  # whoever was faster
        times = {name: round(one.time.seconds * 1e6, 3) for name, one in found.items() if one.time is not None}
        reasons = {name: one.reason for name, one in found.items() if one.time is None}
        yield {"row": full.name, "us": times, **({"not_timed": reasons} if reasons else {})}


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/kernels.md."""
    plain, invariant = WAYS
    lines = [
        f"{report.caption(result)}.",
        "",
        f"| step | {plain} us | {invariant} us | costs |",
        "|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        times = row["us"]
        cells = [f"{times[name]:.1f}" if name in times else "-" for name in WAYS]
        cost = f"{times[invariant] / times[plain] - 1:+.0%}" if len(times) == len(WAYS) else "-"
        lines.append(f"| {row['row']} | {' | '.join([*cells, cost])} |")
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny steps, timed once: the figures mean nothing")
    args = report.arguments(parser, markdown)
    if args is None:
        return
    device = torch.device(args.device)
    rows: list[dict[str, Any]] = []
    result = {**report.stamp("batch-invariance", device), "quick": args.quick, "rows": rows}
    for row in measured(device, quick=args.quick):
        rows.append(row)
        report.save(result, args.json)
    report.finish(result, markdown, args.json)


if __name__ == "__main__":
    main()
