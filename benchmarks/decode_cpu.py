"""polyattn's engine on a CPU beside transformers' `generate`: tokens per second of decoding, interleaved in one run.

    python benchmarks/decode_cpu.py [--layers 2 16] [--batch 8 32] [--rounds 9] [--backend NAME] [--json FILE]
    python benchmarks/decode_cpu.py --render FILE

A small Llama of random weights, prompts of one length, greedy, one thread. Both must give the same tokens, or nothing
is timed. The rate is that of tokens after the first: a run to the last of them less a run to the first, in CPU time of
this process. The two take turns, and the medians over the rounds are shown. The command ends with 1 where polyattn's
rate is below `BAR` of the other.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import report
import torch
import transformers
from engine import model_of, prompts_of
from transformers import LlamaForCausalLM

from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams

BAR = 0.8
SIZES = {"hidden": 256, "heads": 8, "kv_heads": 2, "intermediate": 512, "vocab": 1000}

Run = Callable[[int], list[list[int]]]
"""From a number of new tokens to those of each request."""


def ours(model: LlamaForCausalLM, prompts: list[list[int]], new: int, backend: str | None) -> tuple[Run, str]:
    """The engine's run, and who decodes."""
    most = len(prompts) * len(prompts[0])
    sizes: dict[str, Any] = {"max_requests": len(prompts), "max_tokens": len(prompts[0]) + new}
    config = EngineConfig(**sizes, max_batch_tokens=most, prefix_caching=False, backend=backend)
    engine = Engine(CausalLMRunner(model), config)

    def run(new: int) -> list[list[int]]:
        return [out.token_ids for out in engine.generate(prompts, SamplingParams(max_new_tokens=new))]

    return run, engine.backends["decode"]


def theirs(model: LlamaForCausalLM, prompts: list[list[int]]) -> Run:
    ids = torch.tensor(prompts)
    more: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def run(new: int) -> list[list[int]]:
        model.set_attn_implementation("sdpa")
        found: list[list[int]] = model.generate(ids, max_new_tokens=new, min_new_tokens=new, **more)[
            :, ids.shape[1] :
        ].tolist()
        return found

    return run


def measured(layers: int, batch: int, context: int, new: int, rounds: int, backend: str | None) -> dict[str, Any]:
    """One row: tokens per second of both, and their ratio."""
    model = model_of({**SIZES, "layers": layers}, context + new, torch.device("cpu"))
    prompts = prompts_of(batch, context, SIZES["vocab"])
    own, by = ours(model, prompts, new, backend)
    runs = {"polyattn": own, "generate": theirs(model, prompts)}
    if len({str(run(new)) for run in runs.values()}) > 1:
        raise SystemExit(f"{layers} layers, batch {batch}: the tokens differ; nothing is timed")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            marks = [time.process_time()]
            for count in (new, 1):
                run(count)
                marks.append(time.process_time())
            times[name].append((marks[1] - marks[0]) - (marks[2] - marks[1]))
    rates = {name: batch * (new - 1) / statistics.median(found) for name, found in times.items()}
    return {
        "layers": layers,
        "batch": batch,
        "backend": by,
        "tokens_per_second": {name: round(rate) for name, rate in rates.items()},
        "ratio": round(rates["polyattn"] / rates["generate"], 3),
    }


def markdown(result: dict[str, Any]) -> str:
    """A result file as a table."""
    lines = [
        f"{report.caption(result)}; prompts of {result['context']}, {result['new']} new tokens, one thread.",
        "",
        "| layers | batch | decodes | polyattn, tokens/s | `generate`, tokens/s | ratio | bar |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        rates = row["tokens_per_second"]
        lines.append(
            f"| {row['layers']} | {row['batch']} | {row['backend']} | {rates['polyattn']:,} | {rates['generate']:,} "
            f"| {row['ratio']:.2f} | {result['bar']} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=(2, 16))
    parser.add_argument("--batch", type=int, nargs="+", default=(8, 32))
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", help="polyattn's; without it the one it chooses")
    args = report.arguments(parser, markdown)
    if args is None:
        return 0
    torch.set_num_threads(1)
    sizes = (args.context, args.new, args.rounds, args.backend)
    rows = [measured(layers, batch, *sizes) for layers in args.layers for batch in args.batch]
    stamp = report.stamp("decode-cpu", transformers=transformers.__version__)
    result = {**stamp, "context": args.context, "new": args.new, "bar": BAR, "rows": rows}
    report.finish(result, markdown, args.json)
    return int(any(row["ratio"] < BAR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
