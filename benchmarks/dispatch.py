"""What a call costs beyond its kernel: added microseconds over direct SDPA, all dispatchers interleaved in one process.

    python benchmarks/dispatch.py [--rounds 41] [--calls 3000] [--json FILE]
    python benchmarks/dispatch.py --render FILE     # a result file as the table of docs/benchmarks.md

The baseline is `torch.nn.functional.scaled_dot_product_attention(q, k, v)` on [1, 8, 1, 64], fp32, one thread,
inference mode, in the kernel's own layout (BHSD); diffusers and the BSHD row add the views their layout needs. Each
dispatcher's output is compared with the baseline's before anything is timed. Medians over rounds; `spread` is the
interquartile range of the added cost. `miss` is the first call of a new signature, selection and binding included.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import report
import torch
import torch.nn.functional as F
from host_time import added, interleaved

import polyattn
from polyattn.nn import LocalAttention

BASE = "direct SDPA"
BUDGETS = {"bind": 1.5, "layer": 1.5, "functional": 2.5, "miss": 300.0}
"""Microseconds; the layer row is the module's own cost plus torch.nn.Module.__call__, so `bind` is the one judged."""


def candidates(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """name -> call, for what is installed. q, k, v: [1, H, S, D]."""
    site = polyattn.bind(layout="BHSD")
    layer = LocalAttention(layout="BHSD").eval()
    forward = layer.forward
    calls: dict[str, Callable[[], Any]] = {
        "direct SDPA": lambda: F.scaled_dot_product_attention(q, k, v),
        "bind": lambda: site(q, k, v),
        "layer": lambda: forward(q, k, v),
        "layer through nn.Module.__call__": lambda: layer(q, k, v),
        "functional": lambda: polyattn.attention(q, k, v, layout="BHSD"),
        "scaled_dot_product_attention": lambda: polyattn.scaled_dot_product_attention(q, k, v),
    }
    calls.update(_transformers(q, k, v))
    calls.update(_diffusers(q, k, v))
    return calls


def _transformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:
        return {}
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = False, 1
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    found: dict[str, Callable[[], Any]] = {
        "transformers sdpa": lambda: sdpa(module, q, k, v, None, dropout=0.0, scaling=0.125, is_causal=False)[0]
    }
    try:
        from polyattn.integrations.transformers import install
    except ImportError:
        return found
    install()
    ours = ALL_ATTENTION_FUNCTIONS["polyattn"]
    found["transformers polyattn"] = lambda: ours(module, q, k, v, None, dropout=0.0, scaling=0.125, is_causal=False)[0]
    return found


def _diffusers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
    except ImportError:
        return {}
    from polyattn.integrations.diffusers import install

    install()
    bshd = [t.transpose(1, 2) for t in (q, k, v)]
    ours = AttentionBackendName("polyattn")
    return {
        "four views, no dispatcher": lambda: F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in bshd)
        ).transpose(1, 2),
        "diffusers native": lambda: dispatch_attention_fn(*bshd),
        "diffusers polyattn": lambda: dispatch_attention_fn(*bshd, backend=ours),
        "functional, BSHD": lambda: polyattn.attention(*bshd),
    }


def check(calls: dict[str, Callable[[], Any]]) -> None:
    """Nothing is timed that does not compute the same thing."""
    want = calls["direct SDPA"]()
    for name, call in calls.items():
        got = call()
        got = got if got.shape == want.shape else got.transpose(1, 2)
        error = (got.reshape(want.shape) - want).norm() / want.norm()
        if not error < 1e-5:
            raise SystemExit(f"{name} differs from direct SDPA by {error:.1e}; nothing is timed")


def varying_lengths(name: str, masked: bool, rounds: int, count: int) -> dict[str, list[float]]:
    """The same for a decode loop whose key length grows at each call, as without a static cache."""
    q = torch.randn(1, 8, 1, 64)
    given = [(torch.randn(1, 8, n, 64), torch.randn(1, 8, n, 64)) for n in range(2, 34)]
    masks = [(torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool),) if masked else () for k, _ in given]

    def loop(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            for pair, mask in zip(given, masks, strict=True):
                call(q, *pair, *mask)

        return run

    calls = {BASE: loop(F.scaled_dot_product_attention), name: loop(polyattn.bind(layout="BHSD"))}
    times = interleaved(calls, rounds, max(count // len(given), 1))
    return {name: [t / len(given) for t in values] for name, values in times.items()}


def misses(count: int = 200) -> list[float]:
    """Microseconds added by the first call of a new signature, its kernel's own time taken off."""
    found = []
    for d in range(8, 8 + count):
        q = torch.randn(1, 8, 1, d)
        start = time.perf_counter_ns()
        F.scaled_dot_product_attention(q, q, q)
        middle = time.perf_counter_ns()
        polyattn.attention(q, q, q, layout="BHSD")
        found.append((time.perf_counter_ns() - middle - (middle - start)) / 1000)
    return found[10:]


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    lines = [
        f"{report.caption(result)}; one thread.",
        "",
        "| call | us | added us | budget |",
        "|---|---:|---:|---|",
    ]
    for name, row in result["rows"].items():
        call = "" if row["call"] is None else f"{row['call']:.2f}"
        budget = f"{result['budgets'][name]:g}" if name in result["budgets"] else ""
        lines.append(f"| {name} | {call} | {row['added']:.2f} | {budget} |")
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=3000)
    args = report.arguments(parser, markdown)
    if args is None:
        return
    torch.set_num_threads(1)
    with torch.inference_mode():
        q, k, v = (torch.randn(1, 8, 1, 64) for _ in range(3))
        calls = candidates(q, k, v)
        check(calls)
        rows = added(interleaved(calls, args.rounds, args.calls), BASE)
        for name, masked in (("bind, growing keys", False), ("bind, growing keys and mask", True)):
            rows[name] = added(varying_lengths(name, masked, args.rounds, args.calls), BASE)[name]
        first = misses()
    low, _, high = statistics.quantiles(first, n=4)
    rows["miss"] = {"call": None, "added": statistics.median(first), "spread": high - low}
    result = {
        **report.stamp("dispatch", **_hosts()),
        "rounds": args.rounds,
        "calls": args.calls,
        "rows": rows,
        "budgets": BUDGETS,
    }
    report.finish(result, markdown, args.json)


def _hosts() -> dict[str, str]:
    """Versions of the libraries that are called beside polyattn, where they are installed."""
    found = {}
    for name in ("transformers", "diffusers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    main()
