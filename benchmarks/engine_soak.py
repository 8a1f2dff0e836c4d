"""The engine under a full pool, with prefix caching on and off: CPU time, tokens and leaks.

    python benchmarks/engine_soak.py [--running 8 32 128 400] [--rounds 5] [--windows -1 63] [--json FILE]

As many requests run at a time as the pool has pages for, and twice as many more wait: each that ends leaves its pages
to the prefix cache, and each new page is taken from there. Nobody's prompt is like another's, so that the cache gains
nothing and costs what it costs. The model is one that does nothing: what is measured is the engine's own time, by the
clock of this process; both engines serve the same requests to their end, in turns, round after round. The command ends
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


def served(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> tuple[float, int, list[list[int]]]:
    """Seconds of CPU time until all are through, steps, and the tokens of each."""
    began, steps, found = time.process_time(), 0, {}
    ids = [engine.add(*request)[0] for request in requests]
    while engine.unfinished:
        steps += 1
        found.update((output.id, output.token_ids) for output in engine.step())
    spent = time.process_time() - began
    engine.check()
    return spent, steps, [found[i] for i in ids]


def leaked(engine: Engine) -> bool:
    """Whether pages are held when no request is left and nothing is cached."""
    if (prefixes := engine.memory.prefixes) is not None:
        prefixes.clear()
    return any(allocator.free != allocator.capacity for allocator in engine.memory.allocators)


def measured(running: int, rounds: int, windows: Sequence[int]) -> dict[str, Any]:
    """A row: seconds of both by round, and what is wrong."""
    engines = {caching: engine_of(running, caching=caching, windows=windows) for caching in (False, True)}
    requests = requests_of(3 * running)
    seconds: dict[bool, list[float]] = {caching: [] for caching in engines}
    steps, same = {}, True
    gc.collect()
    gc.freeze()  # a full collection of what torch imports takes as long as hundreds of steps, and hits either of them
    for number in range(rounds + 1):
        tokens = {}
        for caching in sorted(engines, reverse=bool(number % 2)):
            spent, steps[caching], tokens[caching] = served(engines[caching], requests)
            if number:  # the first round warms up
                seconds[caching].append(spent)
            if (prefixes := engines[caching].memory.prefixes) is not None:
                prefixes.clear()  # or the next round would find its prompts
        same &= tokens[False] == tokens[True]
    ratio = statistics.median(on / off for off, on in zip(seconds[False], seconds[True], strict=True))
    return {
        "running": running,
        "windows": list(windows),
        "ms_a_step": {
            "off" if not caching else "on": round(1000 * statistics.median(spent) / steps[caching], 3)
            for caching, spent in seconds.items()
        },
        "seconds": {"off": seconds[False], "on": seconds[True]},
        "ratio": round(ratio, 3),
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
    parser.add_argument("--windows", type=int, nargs="+", default=(-1,), help="of the layers; -1 = full attention")
    args = report.arguments(parser, markdown)
    if args is None:
        return 0
    with torch.inference_mode():
        rows = [measured(running, args.rounds, args.windows) for running in args.running]
    result = {**report.stamp("engine_soak", torch.device("cpu")), "rows": rows}
    report.finish(result, markdown, args.json)
    return int(any(map(wrong, rows)))


if __name__ == "__main__":
    sys.exit(main())
