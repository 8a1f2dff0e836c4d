"""Compiling ahead, in several processes: what is made at its first call is made before anything is measured."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

from ..errors import BackendUnavailableError, UnsupportedRequestError
from .cli_options import BenchOptions
from .entries import Entry, Seen, entries_of
from .rows import Row
from .running import Plan
from .workloads import inputs_of, workload

__all__ = ["SECONDS", "SHARE", "compile_all", "compile_share", "shares"]

SECONDS, SHARE = 240, 0.3
"""How long it may take, and of a run's limit; what is not compiled by then is compiled when it is needed."""

_ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


def compile_all(asked: BenchOptions, processes: int, tell: Callable[[str], None]) -> None:
    """Have processes compile their shares of what is asked for."""
    began, most = time.monotonic(), min(SECONDS, SHARE * asked.limit)
    alone = {**os.environ, **_ONE_THREAD}
    words = json.dumps(asked.plain())
    workers = [
        subprocess.Popen([sys.executable, "-m", __name__, words, str(number), str(processes)], env=alone)
        for number in range(processes)
    ]
    stopped = 0
    for worker in workers:
        try:
            worker.wait(max(most - (time.monotonic() - began), 0.1))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
            stopped += 1
    late = f", {stopped} of {processes} processes were stopped" if stopped else ""
    tell(f"compiled ahead in {time.monotonic() - began:.0f} s{late}")


def shares(plan: Plan, share: int, of: int) -> Iterator[tuple[Row, Entry]]:
    """Return what one of the processes calls: entries that are likely to share kernels are in one process."""
    for row in plan.rows:
        small = plan.sized(row)
        try:
            entries = entries_of(workload(small, plan.device), plan.device, plan.peers, plan.candidates, Seen())
        except (UnsupportedRequestError, BackendUnavailableError):
            continue
        same = (
            row.kind, row.dims, row.causal, row.page_size, row.kv_dtype, row.heads // row.kv_heads,
            row.window != (-1, -1), row.softcap, row.sinks, row.tree,
        )  # fmt: skip
        for one in entries:
            digest = hashlib.sha256(repr((one.name, same)).encode()).hexdigest()
            if one.compiles and int(digest, 16) % of == share:
                yield small, one


def compile_share(plan: Plan, share: int, of: int) -> None:
    """Call each entry of a share once, on one set of inputs. What fails is met again, and reported, when it is
    measured."""
    for row, one in shares(plan, share, of):
        try:
            _call(plan, row, one)
        except Exception as exc:  # noqa: BLE001 - a library may raise anything
            print(f"   ahead, {row.id}, {one.name}: {type(exc).__name__}: {exc}"[:300], flush=True)
        gc.collect()
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()


def _call(plan: Plan, row: Row, one: Entry) -> None:
    inputs = inputs_of(row, workload(row, plan.device), plan.device, sets=1)
    one.prepare(inputs)(0)
    if plan.device.type == "cuda":
        torch.cuda.synchronize(plan.device)


if __name__ == "__main__":
    compile_share(BenchOptions.of(json.loads(sys.argv[1])).plan()[0], int(sys.argv[2]), int(sys.argv[3]))
