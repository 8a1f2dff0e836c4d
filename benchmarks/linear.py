"""Linear attention timed beside flash-linear-attention, in one run: prompts, decode, and gradients.

    python benchmarks/linear.py --out linear.json       # on a GPU
    python benchmarks/linear.py --small                 # on a CPU: that it runs

Calls of one size are timed in rounds, in another order each; a time is the median over rounds. Every output is compared
with the first row's: the root of the mean square of the difference over that of the output.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polyattn
from polyattn.errors import PolyattnError

BACKENDS = ("torch_native", "triton", "fla", "flashinfer")
SIZES = {
    "prompt B1 T8192": (1, 8192),
    "prompt B4 T2048": (4, 2048),
    "decode B64": (64, 1),
    "decode B256": (256, 1),
}
SMALL = {"prompt B1 T40": (1, 40), "decode B3": (3, 1)}
ROUNDS = 15
_BUSY = 1_000_000
"""Cycles, half a millisecond or so."""
Row = Callable[[], Any]


def tensors(method: str, B: int, T: int, heads: tuple[int, int], D: int, device: str) -> dict[str, Tensor]:
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    gates = (B, T, heads[1], D) if method == "kda" else (B, T, heads[1])
    return {
        "query": torch.randn(B, T, heads[0], D, **kind),
        "key": torch.nn.functional.normalize(torch.randn(B, T, heads[0], D, **kind), dim=-1),
        "value": torch.randn(B, T, heads[1], D, **kind),
        "gate": -torch.rand(gates, device=device) * 0.2,
        "beta": torch.rand(B, T, heads[1], **kind),
        "state": torch.randn(B, heads[1], D, D, device=device) * 0.1,
    }


def rows_of(method: str, given: dict[str, Tensor]) -> dict[str, Row]:
    """Everybody who serves this call here, by name."""
    found: dict[str, Row] = {}
    for name in BACKENDS:
        run = functools.partial(polyattn.linear_attention, **given, method=method, backend=name)
        try:
            run()
        except PolyattnError as refused:
            print(f"  {name}: {str(refused)[:120]}")
        else:
            found[f"polyattn/{name}"] = run
    by_hand = {"gdn": ("gated_delta_rule", "gated_delta_rule"), "kda": ("kda", "kda")}[method]
    try:
        module = importlib.import_module(f"fla.ops.{by_hand[0]}")
    except ImportError:
        return found
    one = given["query"].shape[1] == 1
    call = getattr(module, f"{'fused_recurrent' if one else 'chunk'}_{by_hand[1]}")
    q, k, v, g, b, s = (given[name] for name in ("query", "key", "value", "gate", "beta", "state"))
    found["fla"] = functools.partial(call, q, k, v, g=g, beta=b, initial_state=s, output_final_state=True)
    return found


def timed(run: Row, device: str) -> float:
    """Milliseconds of one call."""
    if device == "cpu":
        start = time.process_time()
        run()
        return 1000 * (time.process_time() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_BUSY)  # until the call is queued: what the host does before is no time of the kernels
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def measured(rows: dict[str, Row], device: str, rounds: int) -> dict[str, dict[str, float]]:
    right: Tensor | None = None
    apart = {}
    for name, run in rows.items():
        out = run()[0].float()
        right = out if right is None else right
        apart[name] = float((out - right).square().mean().sqrt() / right.square().mean().sqrt())
    times: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(rounds):
        order = list(rows)
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(timed(rows[name], device))
    return {name: {"ms": statistics.median(found), "rmse": apart[name]} for name, found in times.items()}


def trained(run: Row, leaves: list[Tensor]) -> Row:
    def both() -> Any:
        out, last = run()[:2]
        torch.autograd.grad((out, last), leaves, (torch.ones_like(out), torch.ones_like(last)), allow_unused=True)
        return out.detach(), last

    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes in seconds")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not asked.small else "cpu"
    heads, D, rounds = ((2, 4), 16, 3) if asked.small else ((16, 32), 128, ROUNDS)
    found: dict[str, Any] = {}
    for method in ("gdn", "kda"):
        for size, (B, T) in (SMALL if asked.small else SIZES).items():
            torch.manual_seed(0)
            given = tensors(method, B, T, heads, D, device)
            ways = {"forward": rows_of(method, given)}
            if T > 1:
                leaves = [tensor.requires_grad_() for tensor in given.values()]
                ways["forward and backward"] = {n: trained(run, leaves) for n, run in rows_of(method, given).items()}
            for way, rows in ways.items():
                grad = torch.enable_grad() if way != "forward" else torch.no_grad()
                with grad:
                    figures = measured(rows, device, rounds)
                found[f"{method} {size} {way}"] = figures
                print(f"{method} {size} {way}: " + ", ".join(f"{n} {f['ms']:.3f} ms" for n, f in figures.items()))
    if asked.out is not None:
        where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        asked.out.write_text(json.dumps({"device": where, "torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
