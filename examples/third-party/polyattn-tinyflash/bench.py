"""tinyflash beside torch's own CPU kernels, as a table: `python bench.py`.

Each call is first compared with the float64 reference, for both backends: what is not right is not timed. The two are
timed in turns. On one thread, the default, it is the processor's time that counts, so a busy machine can be used; on
more threads it is the time of day, and nothing else should run.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

import polyattn
from polyattn.testing import RELATIVE_L2

OURS = "tinyflash"


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        label: what a reader calls it, B = 1. other: the backend of torch that it is compared with.
        lengths: (S_q, S_k), or the lengths of the sequences of a packed batch.
        heads: (H_q, H_kv). options: keywords of the call. train: with the backward.
    """

    label: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    options: dict[str, Any]
    train: bool = False
    packed: bool = False

    @property
    def other(self) -> str:
        return "torch_native" if self.packed else "torch_sdpa"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


PACKED = (37, 500, 128, 65, 300, 9, 411, 222)
CASES = (
    Case("causal, S 1024, H 8, D 64", (1024, 1024), (8, 8), 64, torch.float32, {"causal": True}),
    Case("causal, S 1024, H 8, D 64", (1024, 1024), (8, 8), 64, torch.bfloat16, {"causal": True}),
    Case("causal, S 1024, H 8/2, D 128", (1024, 1024), (8, 2), 128, torch.bfloat16, {"causal": True}),
    Case("no mask, S 1024, H 8, D 64", (1024, 1024), (8, 8), 64, torch.float32, {}),
    Case(
        "window 127, S 2048, H 8, D 64", (2048, 2048), (8, 8), 64, torch.float32, {"causal": True, "window": (127, 0)}
    ),
    Case("one query, S_k 4096, H 32/8, D 128", (1, 4096), (32, 8), 128, torch.bfloat16, {}),
    Case("training, causal, S 1024, H 8, D 64", (1024, 1024), (8, 8), 64, torch.float32, {"causal": True}, train=True),
    Case("packed, N 8, T 1672, H 8, D 64", PACKED, (8, 8), 64, torch.float32, {"causal": True}, packed=True),
)


def problem(case: Case) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """(the call, query, key and value)."""
    torch.manual_seed(0)
    (H_q, H_kv), D = case.heads, case.head_dim
    if case.packed:
        starts, longest = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32), max(case.lengths)
        lens = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        shapes = [(sum(case.lengths), heads, D) for heads in (H_q, H_kv, H_kv)]
    else:
        S_q, S_k = case.lengths
        shapes, lens = [(1, S_q, H_q, D), (1, S_k, H_kv, D), (1, S_k, H_kv, D)], {}

    def call(backend: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The output, and the gradients where the case trains."""
        attention = polyattn.varlen_attention if case.packed else polyattn.attention
        out = attention(*tensors, **lens, **case.options, backend=backend)
        return [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))] if case.train else [out]

    return call, [torch.randn(shape).to(case.dtype).requires_grad_(case.train) for shape in shapes]


def error(call: Callable[..., Any], backend: str, tensors: list[torch.Tensor]) -> float:
    """The largest relative L2 error of a backend's results against the float64 reference."""
    right = call("reference", [t.detach().double().requires_grad_(t.requires_grad) for t in tensors])
    found = call(backend, tensors)
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(found, right, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def milliseconds(
    call: Callable[..., Any], backends: tuple[str, ...], tensors: list[torch.Tensor], seconds: float
) -> list[float]:
    """Median time of a call by each backend, in five turns."""
    clock = {"timer": time.process_time} if torch.get_num_threads() == 1 else {}
    given = [{"call": call, "backend": backend, "tensors": tensors} for backend in backends]
    timers = [
        Timer("call(backend, tensors)", globals=names, num_threads=torch.get_num_threads(), **clock) for names in given
    ]
    turns = [[timer.blocked_autorange(min_run_time=seconds / 5).median for timer in timers] for _ in range(5)]
    return [1e3 * statistics.median(times) for times in zip(*turns, strict=True)]


def machine() -> str:
    """The processor's name where the system tells it, and the vectors that torch uses on it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.machine()])[0]} ({torch.backends.cpu.get_cpu_capability()})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each figure (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a call (default 1)")
    parser.add_argument("--only", default="", help="only calls with this in their name")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print("| call | dtype | tinyflash, ms | torch, ms | by | tinyflash / torch |")
    print("|---|---|---|---|---|---|")
    for case in (case for case in CASES if given.only in case.label):
        call, tensors = problem(case)
        for backend in (OURS, case.other):
            if (wrong := error(call, backend, tensors)) > RELATIVE_L2[case.dtype]:
                print(f"{case.label}: {backend} is wrong by {wrong:.2g}, nothing is timed", file=sys.stderr)
                return 1
        ours, other = milliseconds(call, (OURS, case.other), tensors, given.seconds)
        figures = f"{ours:.2f} | {other:.2f} | `{case.other}` | {ours / other:.1f}"
        print(f"| {case.label} | {case.dtype_name} | {figures} |", flush=True)
    print(f"\n{machine()}, {given.threads} thread{'s' * (given.threads > 1)}, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
