"""Linear attention timed beside flash-linear-attention and FlashInfer, in one run: prompts, decode, and gradients.

    python benchmarks/linear.py --json linear.json      # on a GPU
    python benchmarks/linear.py --small                 # on a CPU: that it runs

Calls of one size are timed in rounds, in another order each; a time is the median over rounds. Every output is compared
with the first row's: the root of the mean square of the difference over that of the output. FlashInfer's kernel of
single tokens writes over the state it is given, which is one of its own here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import report
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
_BUSY = 4_000_000
"""Cycles, two milliseconds or so."""
Row = Callable[[], Any]


def tensors(method: str, B: int, T: int, heads: tuple[int, int], D: int, device: torch.device) -> dict[str, Tensor]:
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
    gates = (B, T, heads[1], D) if method == "kda" else (B, T, heads[1])
    return {
        "query": torch.randn(B, T, heads[0], D, **kind),
        "key": torch.nn.functional.normalize(torch.randn(B, T, heads[0], D, **kind), dim=-1),
        "value": torch.randn(B, T, heads[1], D, **kind),
        "gate": -torch.rand(gates, device=device) * 0.2,
        "beta": torch.rand(B, T, heads[1], **kind),
        "state": torch.randn(B, heads[1], D, D, device=device) * 0.1,
    }


def rows_of(method: str, given: dict[str, Tensor], backends: list[str]) -> dict[str, Row]:
    """Everybody who serves this call here, by name."""
    found: dict[str, Row] = {}
    for name in backends:
        run = functools.partial(polyattn.linear_attention, **given, method=method, backend=name)
        try:
            run()
        except PolyattnError as refused:
            print(f"  {name}: {str(refused)[:120]}")
        else:
            found[f"polyattn/{name}"] = run
    for name, by_hand in (("fla", fla), ("flashinfer", flashinfer)):
        try:
            row = by_hand(method, given)
        except Exception as missing:  # noqa: BLE001 - whatever a library raises that is here in part: told, and no row
            print(f"  {name} by hand: {type(missing).__name__}: {str(missing)[:120]}")
        else:
            found |= {} if row is None else {name: row}
    return found


def fla(method: str, given: dict[str, Tensor]) -> Row:
    module, call = {"gdn": ("gated_delta_rule", "gated_delta_rule"), "kda": ("kda", "kda")}[method]
    one = given["query"].shape[1] == 1
    kernel = getattr(importlib.import_module(f"fla.ops.{module}"), f"{'fused_recurrent' if one else 'chunk'}_{call}")
    q, k, v, g, b, s = (given[name] for name in ("query", "key", "value", "gate", "beta", "state"))
    return functools.partial(kernel, q, k, v, g=g, beta=b, initial_state=s, output_final_state=True)


def flashinfer(method: str, given: dict[str, Tensor]) -> Row | None:
    """Of single tokens of gdn: prompts are those of our backend. The raw gates are those whose gates are given."""
    q, k, v, g, b, s = (given[name].detach() for name in ("query", "key", "value", "gate", "beta", "state"))
    if method != "gdn" or q.shape[1] > 1:
        return None
    kernel = importlib.import_module("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
    raw = {"a": (-g).expm1().log().to(q.dtype), "b": b.float().logit().to(q.dtype)}
    learned = {name: g.new_zeros(g.shape[2]) for name in ("A_log", "dt_bias")}
    run = functools.partial(kernel, q, k, v, s.mT.contiguous(), **raw, **learned, use_qk_l2norm=False)
    run()
    return functools.partial(kernel, q, k, v, s.mT.contiguous(), **raw, **learned, use_qk_l2norm=False)


def timed(run: Row, device: torch.device) -> float:
    """Milliseconds of one call."""
    if device.type == "cpu":
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


def measured(rows: dict[str, Row], device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    right: Tensor | None = None
    apart = {}
    for name, run in list(rows.items()):
        try:
            out = run()[0].float()
        except RuntimeError as refused:
            print(f"  {name}: {str(refused)[:120]}")
            del rows[name]
            continue
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


def markdown(result: dict[str, Any]) -> str:
    """Milliseconds of each call, and how far from the first."""
    names = list(dict.fromkeys(name for row in result["rows"].values() for name in row))
    lines = [f"{report.caption(result)}.", "", f"| ms | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for call, row in result["rows"].items():
        cells = [f"{row[name]['ms']:.3f}" if name in row else "-" for name in names]
        lines.append(f"| {call} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes in seconds")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"of polyattn (default: {','.join(BACKENDS)})")
    parser.add_argument("--only", default="", help="calls with this in their names, such as `kda` or `forward and`")
    asked = report.arguments(parser, markdown)
    if asked is None:
        return
    device = torch.device("cuda" if torch.cuda.is_available() and not asked.small else "cpu")
    heads, D, rounds = ((2, 4), 16, 3) if asked.small else ((16, 32), 128, ROUNDS)
    rows: dict[str, Any] = {}
    result = {**report.stamp("linear", device, **peers()), "rows": rows}
    for method, way, (size, (B, T)) in itertools.product(
        ("gdn", "kda"), ("forward", "forward and backward"), (SMALL if asked.small else SIZES).items()
    ):
        name, trains = f"{method} {size} {way}", way != "forward"
        if asked.only not in name or (trains and T == 1):
            continue
        torch.manual_seed(0)
        given = tensors(method, B, T, heads, D, device)
        leaves = [tensor.requires_grad_(trains) for tensor in given.values()]
        with torch.set_grad_enabled(trains):
            found = rows_of(method, given, asked.backends.split(","))
            found = {who: trained(run, leaves) for who, run in found.items()} if trains else found
            rows[name] = measured(found, device, rounds)
        print(f"{name}: " + ", ".join(f"{who} {f['ms']:.3f} ms" for who, f in rows[name].items()), flush=True)
        report.save(result, asked.json)
    report.finish(result, markdown, asked.json)


def peers() -> dict[str, str]:
    """Versions of the libraries beside us that are here."""
    found = {}
    for name in ("fla-core", "flashinfer-python"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    main()
