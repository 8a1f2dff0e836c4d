"""polyattn's engine beside transformers' own continuous batching: tokens per second of one model, in one run.

    python benchmarks/engine.py [--device cuda] [--json FILE]     # a Llama of 1.2 billion random weights, context 4096
    python benchmarks/engine.py --json FILE --resume              # goes on with what is in the file
    python benchmarks/engine.py --join A --join B --json FILE     # rows that processes measured side by side
    python benchmarks/engine.py --quick                           # a tiny one, on a CPU: the figures mean nothing
    python benchmarks/engine.py --render FILE                     # a result file as the table of docs/benchmarks.md

Both serve the same prompts of random tokens, all of one length, greedily. The rate is that of decoding: tokens after
the first of each request, over the time that a run to the last of them takes longer than a run to the first. A run is
timed from when the requests are handed over: what transformers does before for each batch, seconds of recording graphs
among it, is not in it. Runs of all alternate in rounds, and the fastest of each kind counts: one in which somebody
still compiles or records is in no figure. transformers runs with each attention implementation that is named and works
here, and the best of them counts; --their-new has it make fewer new tokens, where it takes minutes for a batch. On a
device with graphs polyattn's decode steps are replayed, and one run has every wait of the host inside a replayed step
raise. Host time per step is measured apart, with a kernel that does nothing: serving_layer.py --device cuda. The file
is written after every run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import report
import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.utils import WorkloadHints

from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.registry.distributions import distribution_version
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams

BAR = 1.2
"""Times the best of transformers that is asked for, at the batches of `BAR_FROM` and more."""
BAR_FROM = 32
IMPLEMENTATIONS = ("sdpa", "flash_attention_4", "flash_attention_3", "flash_attention_2")
FULL = {"hidden": 2048, "heads": 32, "kv_heads": 8, "intermediate": 4096, "vocab": 32000, "layers": 32}
TINY = {"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocab": 256, "layers": 2}
OURS = "polyattn"
LIBRARIES = ("flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python", "vllm")
"""What may run in either; a result has the versions of those that are there."""
SAME = ("benchmark", "machine", "versions", "context", "parameters", "quick")
"""What the rows of one file have in common."""

Generate = Callable[[int], tuple[Sequence[Sequence[int]], float]]
"""From a number of new tokens to those of each request, and the seconds from handing these over."""


def libraries() -> dict[str, str]:
    """name -> version."""
    return {name: version for name in LIBRARIES if (version := distribution_version(name))}


def model_of(sizes: dict[str, int], context: int, device: torch.device) -> LlamaForCausalLM:
    """Random weights: what is measured is time."""
    config = LlamaConfig(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def prompts_of(count: int, length: int, vocab: int) -> list[list[int]]:
    """Random, so that no two share a prefix."""
    random = torch.Generator().manual_seed(1)
    found: list[list[int]] = torch.randint(3, vocab, (count, length), generator=random).tolist()
    return found


def ours(
    model: LlamaForCausalLM, prompts: list[list[int]], context: int, backend: str | None
) -> tuple[Generate, Engine]:
    config = EngineConfig(
        max_requests=len(prompts), max_tokens=context, max_batch_tokens=8192, prefix_caching=False, backend=backend
    )
    engine = Engine(CausalLMRunner(model), config)

    def generate(new: int) -> tuple[list[list[int]], float]:
        began = time.perf_counter()
        found = engine.generate(prompts, SamplingParams(max_new_tokens=new))
        return [out.token_ids for out in found], time.perf_counter() - began

    return generate, engine


def theirs(
    model: LlamaForCausalLM, prompts: list[list[int]], implementation: str, new: int, more: dict[str, Any]
) -> Generate:
    """What `generate_batch` does. new: most tokens of a request. more: keywords of its context manager."""
    hints = WorkloadHints(max_prompt_length=len(prompts[0]), max_generated_length=new, num_requests=len(prompts))

    def generate(new: int) -> tuple[list[list[int]], float]:
        model.set_attn_implementation(implementation)  # all runs share the model
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with model.continuous_batching_context_manager(config, timeout=5, workload_hints=hints, **more) as manager:
            began, found = time.perf_counter(), {}
            names = manager.add_requests(prompts, max_new_tokens=new)
            while len(found) < len(names):
                out = manager.get_result(timeout=1)
                if out is not None and out.is_finished():
                    found[out.request_id] = list(out.generated_tokens)
                elif out is None and not manager.is_running():
                    raise RuntimeError(f"its thread ended after {len(found)} of {len(names)} requests")
            took = time.perf_counter() - began
        return [found[name] for name in names], took

    return generate


def small() -> dict[str, Any]:
    """For a CPU, where transformers would take a share of the memory for its cache, and minutes for that."""
    return {"continuous_batching_config": transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=128)}


def without_waiting(generate: Generate, engine: Engine) -> bool:
    """Whether decode steps are replayed; a wait of the host inside one of them is an error here."""
    graphs = engine.memory.graphs
    if graphs is None or engine.memory.device.type != "cuda":
        return False
    inner, count = graphs.run, 0

    def run(*args: Any) -> Any:
        nonlocal count
        count += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return inner(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    graphs.run = run  # type: ignore[method-assign]
    try:
        generate(4)
    finally:
        graphs.run = inner  # type: ignore[method-assign]
    return count > 0


def seconds_of(generate: Generate, new: int, count: int) -> float:
    found, took = generate(new)
    if [len(tokens) for tokens in found] != [new] * count:
        raise RuntimeError(
            f"{new} tokens of each of {count} requests are wanted; got {[len(t) for t in found][:8]} ..."
        )
    return round(took, 3)


def begun(count: int, new: int, theirs: int) -> dict[str, Any]:
    """A row before it is measured. new, theirs: new tokens of polyattn and of transformers."""
    tokens = {"new_tokens": new, "their_new_tokens": theirs}
    return {"requests": count, **tokens, "failed": {}, "seconds": {}, "tokens_per_second": {}}


def new_tokens(row: Mapping[str, Any], name: str) -> int:
    """Of each request, by who serves."""
    found: int = row["new_tokens" if name == OURS else "their_new_tokens"]
    return found


def measured(model: LlamaForCausalLM, row: dict[str, Any], args: argparse.Namespace) -> Iterator[None]:
    """One batch size: into `row` go, run after run, seconds to the first and to the last token, tokens per second of
    everybody, or why there are none. Runs that are there already are not made again."""
    count, new, more = row["requests"], row["new_tokens"], small() if args.quick else {}
    names = (OURS, *(f"transformers {name}" for name in args.implementations))
    if all(name in row["failed"] or len(row["seconds"].get(name, ())) >= args.rounds for name in names):
        return
    prompts = prompts_of(count, args.context - new, model.config.vocab_size)
    generate, engine = ours(model, prompts, args.context, args.backend)
    runs = dict(
        zip(
            names,
            (generate, *(theirs(model, prompts, name, row["their_new_tokens"], more) for name in args.implementations)),
            strict=True,
        )
    )
    row["backends"] = dict(engine.backends)
    # Graphs are recorded, kernels compiled, for all lengths that come: seconds for polyattn, a round for transformers.
    seconds_of(generate, new, count)
    row["replayed"] = without_waiting(generate, engine)
    yield
    for number in range(args.rounds):
        for name, run in runs.items():
            taken = row["seconds"].setdefault(name, [])
            if len(taken) > number or name in row["failed"]:
                continue
            try:
                taken.append([seconds_of(run, 1, count), seconds_of(run, new_tokens(row, name), count)])
            except Exception as exc:  # an implementation may not be here, or fail in any way
                if name == OURS:
                    raise
                row["failed"][name] = " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
            row["tokens_per_second"] = rates(row)
            yield
    for name in (name for name, taken in row["seconds"].items() if taken and name not in row["tokens_per_second"]):
        row["failed"][name] = "its runs to the last token took no longer than those to the first"
    yield


def rates(row: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per second by who serves, from the fastest runs to the first and to the last token."""
    fastest = {
        name: [min(runs) for runs in zip(*taken, strict=True)] for name, taken in row["seconds"].items() if taken
    }
    return {
        name: round(row["requests"] * (new_tokens(row, name) - 1) / (all_ - first), 1)
        for name, (first, all_) in fastest.items()
        if all_ > first
    }


def ratio(row: dict[str, Any]) -> tuple[float, str] | None:
    """(how many times as fast polyattn's engine is as the best of transformers, which that is)."""
    rates = dict(row["tokens_per_second"])
    own = rates.pop(OURS, None)
    best = max(rates, key=lambda name: rates[name], default=None)
    return None if best is None or own is None else (own / rates[best], best)


def by_round(row: Mapping[str, Any], name: str) -> str:
    """The least and the most that the ratio to `name` is with single rounds of both, in words; "" of one round."""
    own, theirs = (
        [(new_tokens(row, who) - 1) / (all_ - first) for first, all_ in row["seconds"].get(who, ()) if all_ > first]
        for who in (OURS, name)
    )
    if len(own) < 2 or len(theirs) < 2:
        return ""
    return f", by round {min(own) / max(theirs):.2f} to {max(own) / min(theirs):.2f}"


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["tokens_per_second"]))
    lines = [
        f"{report.caption(result)}; {result['parameters'] / 1e9:.2g} billion weights, context {result['context']}.",
        "",
        f"| requests | new tokens, theirs | {' | '.join(names)} | over the best | asked | replayed without a wait |",
        f"|---:|---:|{'---:|' * len(names)}---|---:|---|",
    ]
    for row in result["rows"]:
        found = ratio(row)
        cells = [f"{row['tokens_per_second'][name]:.0f}" if name in row["tokens_per_second"] else "-" for name in names]
        best = f"{found[0]:.2f} x {found[1]}{by_round(row, found[1])}" if found else ""
        asked = f"{BAR:g}" if row["requests"] >= BAR_FROM else ""
        lines.append(
            f"| {row['requests']} | {row['new_tokens']}, {row['their_new_tokens']} | {' | '.join(cells)} | {best} "
            f"| {asked} | {'yes' if row['replayed'] else 'no'} |"
        )
    reasons = dict.fromkeys(f"- {name}: {why}" for row in result["rows"] for name, why in row["failed"].items())
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def before(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """A result file of the same machine, versions and model.

    Raises:
        SystemExit: it is of another.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if other := [name for name in SAME if found.get(name) != head[name]]:
        sys.exit(f"{path} is of another {', '.join(other)}: rows measured apart are not put into one file")
    return found


def joined(paths: Sequence[Path]) -> dict[str, Any]:
    """The rows of several processes as one result."""
    head: dict[str, Any] = json.loads(paths[0].read_text(encoding="utf-8"))
    parts = [before(path, head) for path in paths]
    rows = {row["requests"]: row for part in parts for row in part["rows"]}
    commands = dict.fromkeys(part["command"] for part in parts)
    return {**head, "command": "; ".join(commands), "rows": [rows[count] for count in sorted(rows)]}


def run(result: dict[str, Any], model: LlamaForCausalLM, args: argparse.Namespace) -> None:
    """Measure what the result lacks; what there is so far is written after every run."""
    known = {row["requests"]: row for row in result["rows"]}
    for count in args.requests:
        row = known.setdefault(count, begun(count, args.new, args.their_new or args.new))
        result["rows"] = [known[each] for each in sorted(known)]
        for _ in measured(model, row, args):
            report.save(result, args.json)
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    report.finish(result, markdown, args.json)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, nargs="+", default=(1, 32, 128), metavar="N")
    parser.add_argument("--context", type=int, default=4096, help="prompt and new tokens")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--their-new", type=int, metavar="N", help="the same of transformers, where it is slow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", help="polyattn's; without it the one it chooses")
    parser.add_argument("--implementations", nargs="*", default=IMPLEMENTATIONS, metavar="NAME", help="of transformers")
    parser.add_argument("--quick", action="store_true", help="a tiny model and a batch of 2: does everything run?")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --json")
    parser.add_argument("--join", type=Path, action="append", metavar="FILE", help="measure nothing; may be repeated")
    args = report.arguments(parser, markdown)
    if args is None:
        return
    if args.join:
        report.finish(joined(args.join), markdown, args.json)
        return
    if args.quick:
        args.requests, args.context, args.new, args.rounds, args.implementations = (2,), 64, 24, 1, ("sdpa",)
    device = torch.device(args.device)
    model = model_of(TINY if args.quick else FULL, args.context, device)
    result = {
        **report.stamp("engine", device, transformers=transformers.__version__, **libraries()),
        "context": args.context,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "quick": args.quick,
        "rows": [],
    }
    if args.resume and args.json and args.json.exists():
        result["rows"] = before(args.json, result)["rows"]
    run(result, model, args)


if __name__ == "__main__":
    main()
