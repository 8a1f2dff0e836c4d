"""Calls of one problem beside each other: each is compared with the right result first, and those that agree are timed
by turns in one run, as a graph where the device records it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import report
import torch
from torch import Tensor

from polyattn.bench.measure import Clock, interleaved
from polyattn.errors import PolyattnError

__all__ = ["beside", "error", "run", "spread", "times_as_fast"]


def run(
    name: str,
    doc: str | None,
    markdown: Callable[[dict[str, Any]], str],
    measure: Callable[[Any, Clock], Iterable[dict[str, Any]]],
    sizes: tuple[Any, Any],
) -> None:
    """A benchmark of rows, as a program. sizes: small ones, for a CPU, and the full ones. What there is so far is
    written after every row."""
    parser = report.parser(doc)
    parser.add_argument("--small", action="store_true", help="tiny, on the CPU: the figures mean nothing")
    args = report.arguments(parser, markdown)
    if args is None:
        return
    if not args.small and not torch.cuda.is_available():
        parser.error("no CUDA device is here; --small tries the program on the CPU")
    device = torch.device("cpu" if args.small else "cuda")
    rows: list[dict[str, Any]] = []
    result = {**report.stamp(name, device), "small": args.small, "rows": rows}
    for row in measure(sizes[not args.small], Clock(device)):
        rows.append(row)
        report.save(result, args.json)
    report.finish(result, markdown, args.json)


def error(found: Tensor, right: Tensor) -> float:
    """The norm of the difference over that of the right result."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def beside(
    calls: Mapping[str, Callable[[], Any]],
    right: Tensor | Callable[[Any], float] | None,
    most: float | Mapping[str, float],
    clock: Clock,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Of each call its microseconds, spread and error, or why it is not timed.

    Args:
        calls: whose result, or the first of it, is compared. right: what it should be, or what tells how far a result
            is from that; None = the calls are parts, which somebody else has compared. most: error, of each or of all.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in calls}
    timings = {}
    for name, call in calls.items():
        limit = most[name] if isinstance(most, Mapping) else most
        try:
            with torch.no_grad():
                result = call()
                out = result[0] if isinstance(result, (tuple, list)) else result
                if right is not None:
                    far = right(out) if callable(right) else error(out, right)
                    found[name]["error"] = float(f"{far:.2e}")
                    if not far <= limit:
                        found[name]["not_timed"] = f"its error is {far:.3g}, more than {limit:g}"
                        continue
                timings[name] = timing(call, clock, found[name])
        except (PolyattnError, RuntimeError) as exc:  # a device out of memory is a RuntimeError
            found[name]["not_timed"] = f"{type(exc).__name__}: {str(exc).splitlines()[0]}"
    for name, time in interleaved(timings, rounds).items():
        found[name] |= {"us": round(time.seconds * 1e6, 2), "spread": round(time.spread, 3)}
    return found


def timing(call: Callable[[], Any], clock: Clock, said: dict[str, Any]) -> Any:
    """What times a call: replays of a graph; one by one where it cannot be recorded, which `said` tells."""
    with contextlib.suppress(RuntimeError):
        return clock.graph([call])[0]
    clock.synchronise()
    said["recorded"] = False
    return lambda: clock.calls([call])


def times_as_fast(found: Mapping[str, Mapping[str, Any]], one: str, *others: str) -> float | None:
    """How many times as fast one call is as the fastest of others, None where one of the two has no time."""
    times = [found[name]["us"] for name in others if "us" in found.get(name, {})]
    own = found.get(one, {}).get("us")
    return None if own is None or not times else min(times) / own


def spread(rows: int, tokens: int, page_size: int, device: torch.device) -> dict[str, Any]:
    """A decode step of rows with so many tokens each, whose pages lie in random order."""
    pages = -(-tokens // page_size)
    table = torch.randperm(rows * pages, device=device).to(torch.int32).view(rows, pages)
    return {
        "page_table": table,
        "seq_lens": torch.full((rows,), tokens, dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.arange(rows + 1, dtype=torch.int32, device=device),
        "max_seqlen_q": 1,
        "max_seqlen_k": tokens,
    }
