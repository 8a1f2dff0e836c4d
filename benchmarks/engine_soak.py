"""The engine under a full pool, with prefix caching on and off: CPU time, tokens and leaks.

    python benchmarks/engine_soak.py [--running 8 32 128 400] [--rounds 5] [--json FILE]
    python benchmarks/engine_soak.py --render FILE     # a result file as the table of docs/benchmarks.md

As many requests run at a time as the pool has pages for, and twice as many more wait: each that ends leaves its pages
to the prefix cache, and each new page is taken from there. Nobody's prompt is like another's, so that the cache gains
nothing and costs what it costs. The model is one that does nothing: what is measured is the engine's own time, by the
clock of this process; both engines serve the same requests to their end, step after step in turns. The command ends
with 1 where an engine with prefix caching takes more than 1.1 times as long as one without, gives other tokens, or
loses a page.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import report
import torch
from idle_model import VOCAB, IdleModel

from polyattn.serving import KVCacheConfig
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams

MOST = 1.1
"""Times the engine without prefix caching that one with it may take."""
PAGE, PROMPT, NEW = 16, 512, 128
MODELS = ((-1,), (-1, 63))
"""Windows of their layers, -1 = full attention: each has pages of its own."""


def engine_of(running: int, *, caching: bool, windows: Sequence[int] = (-1,)) -> Engine:
    """An engine whose pool is full with so many requests of `PROMPT` and `NEW` tokens."""
    longest = PROMPT + NEW
    config = EngineConfig(
        KVCacheConfig(page_size=PAGE),
        pages=1 + running * (longest // PAGE),
        max_requests=running,
        max_tokens=longest,
        prefix_caching=caching,
        backend="torch_native",
        graphs=False,
    )
    return Engine(IdleModel(windows), config)


def requests_of(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that have no beginning in common, and lengths that differ."""
    chance = random.Random(0)
    return [
        (
            [number % VOCAB, number // VOCAB % VOCAB, *chance.choices(range(VOCAB), k=PROMPT - 2)],
            SamplingParams(max_new_tokens=chance.randrange(NEW // 2, NEW)),
        )
        for number in range(count)
    ]


def served(
    engines: Mapping[str, Engine], requests: Sequence[tuple[list[int], SamplingParams]]
) -> tuple[dict[str, float], dict[str, int], dict[str, list[list[int]]]]:
    """Serve the requests with each engine, step after step in turns: seconds of CPU time until all are through, steps,
    and the tokens of each request."""
    seconds, steps = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
    found: dict[str, dict[int, list[int]]] = {name: {} for name in engines}
    ids = {name: [engine.add(*request)[0] for request in requests] for name, engine in engines.items()}
    while any(engine.unfinished for engine in engines.values()):
        for name, engine in engines.items():
            if engine.unfinished:
                began = time.process_time()
                outputs = engine.step()
                seconds[name] += time.process_time() - began
                steps[name] += 1
                found[name].update((output.id, output.token_ids) for output in outputs)
    for engine in engines.values():
        engine.check()
    return seconds, steps, {name: [found[name][i] for i in ids[name]] for name in engines}


def leaked(engine: Engine) -> bool:
    """Whether pages are held when no request is left and nothing is cached."""
    return any(allocator.free != allocator.capacity for allocator in engine.memory.allocators)


def measured(running: int, rounds: int, windows: Sequence[int]) -> dict[str, Any]:
    """A row: seconds of both by round, and what is wrong."""
    engines = {name: engine_of(running, caching=name == "on", windows=windows) for name in ("off", "on")}
    requests, rows, same = requests_of(3 * running), [], True
    gc.collect()
    gc.freeze()  # a full collection of what torch imports takes as long as hundreds of steps, and hits either of them
    for number in range(rounds + 1):
        seconds, steps, tokens = served(engines, requests)
        if number:  # the first round warms up
            rows.append(seconds)
        same &= tokens["off"] == tokens["on"]
        assert engines["on"].memory.prefixes is not None
        engines["on"].memory.prefixes.clear()  # or the next round would find its prompts
    gc.unfreeze()
    return {
        "running": running,
        "windows": list(windows),
        "ms_a_step": {
            name: round(1000 * statistics.median(row[name] for row in rows) / steps[name], 3) for name in engines
        },
        "seconds": {name: [round(row[name], 4) for row in rows] for name in engines},
        "ratio": round(statistics.median(row["on"] / row["off"] for row in rows), 3),
        "same_tokens": same,
        "leaked": any(map(leaked, engines.values())),
    }


def wrong(row: Mapping[str, Any]) -> list[str]:
    """What a row must not have."""
    found = [f"{row['ratio']} times as long, {MOST} are allowed"] if row["ratio"] > MOST else []
    found += [] if row["same_tokens"] else ["other tokens"]
    return found + (["pages are lost"] if row["leaked"] else [])


def markdown(result: Mapping[str, Any]) -> str:
    """A result file as a table."""
    lines = [
        report.caption(result) + ".",
        "",
        "| running requests | windows | off, ms a step | on, ms a step | on / off | |",
        "|---:|---|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        ms, windows = row["ms_a_step"], ", ".join("full" if w < 0 else str(w) for w in row["windows"])
        said = "; ".join(wrong(row)) or "same tokens, no page lost"
        lines.append(
            f"| {row['running']} | {windows} | {ms['off']:.2f} | {ms['on']:.2f} | {row['ratio']:.2f} | {said} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=(8, 32, 128, 400), metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    args = report.arguments(parser, markdown)
    if args is None:
        return 0
    with torch.inference_mode():
        rows = [measured(running, args.rounds, windows) for windows in MODELS for running in args.running]
    result = {**report.stamp("engine-soak"), "rows": rows}
    report.finish(result, markdown, args.json)
    return int(any(map(wrong, rows)))


if __name__ == "__main__":
    sys.exit(main())
