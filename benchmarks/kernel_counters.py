"""What hardware counters say of the Triton package's kernels: rows of attention_kernels.yaml under Nsight Compute.

    ncu --profile-from-start off --clock-control none --csv --page raw --section WarpStateStats \\
        --metrics "$(python benchmarks/kernel_counters.py --metrics)" --log-file counters.csv \\
        python benchmarks/kernel_counters.py --json kernel-counters.json
    python benchmarks/kernel_counters.py --csv counters.csv --json kernel-counters.json
    python benchmarks/kernel_counters.py --render FILE     # a result file as the table of docs/kernels.md

Without `--csv` it calls the backend `triton` twice for each row: the first call compiles, the profiler sees the second.
It runs each kernel as often as it needs, with cold caches and at the clock that the device has then: shares count, and
times are no benchmark. The result file then says what ran; `--csv`, which needs no GPU, puts the counters in. Kernels
that take less than a twentieth of their row's time are left out.
"""

from __future__ import annotations

import csv
import gc
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import report
import torch

SHEET = Path(__file__).with_name("attention_kernels.yaml")
ROWS: dict[str, dict[str, Any]] = {
    "forward d128": {"family": "prefill_d128", "kv_heads": 8, "causal": True, "q_len": 4096},
    "forward d64": {"family": "prefill_d64", "kv_heads": 8, "causal": True, "q_len": 4096},
    "backward d128": {"family": "backward", "kv_heads": 8, "causal": True, "q_len": 4096},
    "decode": {"family": "decode", "batch": 64, "kv_len": 8192},
    "decode FP8": {"family": "decode_fp8", "kv_len": 8192},
    "latent, batch 128": {"family": "mla_batched", "batch": 128, "kv_len": 4096},
    "latent, batch 1": {"family": "mla_single", "kv_len": 4096},
    "cascade": {"family": "cascade"},
    "extend d128": {"family": "extend", "batch": 8},
    "block-sparse": {"family": "block_sparse", "block": 128, "density": 0.2},
}
"""By what they are called here: fields that pick one row of the sheet."""

METRICS = {
    "ns": "gpu__time_duration.sum",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exp2": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_active",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read": "dram__bytes_read.sum",
    "l2": "lts__t_bytes.sum",
    "registers": "launch__registers_per_thread",
    "shared": "launch__shared_mem_per_block",
}
"""By what a result file calls them. Bytes and ns are numbers, the five pipes and DRAM percent of their peak."""
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
MARK = "spin_kernel"
"""A kernel of torch's that no backend launches."""
LEAST = 0.05


def call_rows() -> None:
    """One call of each row where the profiler looks, `MARK` before it."""
    from polyattn.bench.cli_options import BenchOptions
    from polyattn.bench.entries import OWN, Seen, entries_of
    from polyattn.bench.workloads import inputs_of, workload

    plan, _ = BenchOptions(sheets=(str(SHEET),), candidates=("triton",), device="cuda").plan()
    for name, wanted in ROWS.items():
        (row,) = (row for row in plan.rows if all(getattr(row, field) == value for field, value in wanted.items()))
        asked = workload(row, plan.device)
        (entry,) = (
            one for one in entries_of(asked, plan.device, {}, ("triton",), Seen()) if one.name == f"{OWN}triton"
        )
        call = entry.prepare(inputs_of(row, asked, plan.device, 1))
        call(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)  # `MARK` begins a row
        call(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(name, flush=True)
        del call, entry
        gc.collect()
        torch.cuda.empty_cache()


def launches(lines: Iterable[str]) -> list[dict[str, str]]:
    """The table in what ncu wrote: one launch for each row, by the names of its columns."""
    head, *rows = csv.reader(line for line in lines if line.startswith('"'))
    return [dict(zip(head, row, strict=True)) for row in rows[1:]]  # the second row has units


def read(found: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Kernels of each of `ROWS`, with their counters.

    Raises:
        SystemExit: these are not the launches of `call_rows`.
    """
    groups: list[list[dict[str, str]]] = []
    for launch in found:
        if MARK in launch["Kernel Name"]:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
        else:
            raise SystemExit(f"the first launch is {launch['Kernel Name']}, not {MARK}, which begins a row")
    if len(groups) != len(ROWS):
        raise SystemExit(f"{len(groups)} rows are marked, not {len(ROWS)}: {', '.join(ROWS)}")
    rows = []
    for name, group in zip(ROWS, groups, strict=True):
        kernels = [counted(launch) for launch in group]
        whole = sum(kernel["ns"] for kernel in kernels)
        rows += [{"row": name, **kernel} for kernel in kernels if kernel["ns"] >= LEAST * whole]
    return rows


def number(text: str) -> float:
    """As ncu writes it, thousands apart; nothing where a counter was not read."""
    return float(text.replace(",", "") or 0)


def counted(launch: dict[str, str]) -> dict[str, Any]:
    """One launch: `METRICS`, and what its warps wait for, as shares of their time."""
    before, after = STALL.split("{}")
    waits = {
        key[len(before) : -len(after)]: number(text)
        for key, text in launch.items()
        if key.startswith(before) and key.endswith(after) and "not_issued" not in key
    }
    whole = sum(waits.values())
    waits.pop("selected", None)  # those issue
    first = sorted(waits, key=lambda one: -waits[one])[:3]
    return {
        "kernel": launch["Kernel Name"].partition("(")[0],
        **{name: number(launch[metric]) for name, metric in METRICS.items()},
        "waits": {one: round(100 * waits[one] / whole, 1) for one in first},
    }


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/kernels.md."""
    lines = [
        f"{report.caption(result)}.",
        "",
        "| row | kernel | us | tensor cores | exp2 | ALU | FMA | issue | DRAM | DRAM read, L2 | registers | waits |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        shares = [f"{row[name]:.0f} %" for name in ("tensor", "exp2", "alu", "fma", "issue", "dram")]
        read = f"{row['dram_read'] / 1e6:.0f}, {row['l2'] / 1e6:.0f} MB"
        waits = ", ".join(f"{name.replace('_', ' ')} {share:.0f} %" for name, share in row["waits"].items())
        cells = [row["row"], f"`{row['kernel']}`", f"{row['ns'] / 1e3:.0f}", *shares, read, f"{row['registers']:.0f}"]
        lines.append(f"| {' | '.join([*cells, waits])} |")
    return "\n".join(lines)


def filled(result: Path | None, counters: Path) -> dict[str, Any]:
    """The result file that the run wrote, with the counters that ncu wrote.

    Raises:
        SystemExit: there is no such file, or it is of something else.
    """
    if result is None or not result.is_file():
        raise SystemExit(f"--json {result}: the run under ncu writes this file first; give its path to both commands")
    head = json.loads(result.read_text(encoding="utf-8"))
    if head.get("benchmark") != "kernel-counters":
        raise SystemExit(f"--json {result}: this is a result of {head.get('benchmark')}, not of kernel-counters")
    with counters.open(encoding="utf-8", newline="") as file:
        return {**head, "rows": read(launches(file))}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--metrics", action="store_true", help="the list that ncu is given")
    parser.add_argument("--csv", type=Path, help="what ncu wrote")
    args = report.arguments(parser, markdown)
    if args is None:
        return
    if args.metrics:
        print(",".join(METRICS.values()))
    elif args.csv is None:
        call_rows()
        report.save({**report.stamp("kernel-counters", torch.device("cuda")), "rows": []}, args.json)
    else:
        report.finish(filled(args.json, args.csv), markdown, args.json)


if __name__ == "__main__":
    main()
