"""What HTTP costs: `polyattn serve`'s app beside its own engine, the same prompts, in one run.

    python benchmarks/http_serving.py [--device cuda] [--json FILE]   # the model of engine.py, 32 requests and one
    python benchmarks/http_serving.py --quick                         # a tiny one, on a CPU: does everything run?
    python benchmarks/http_serving.py --trace FILE                    # torch's profile of steps of one request instead
    python benchmarks/http_serving.py --render FILE                   # a result file as the table of docs/benchmarks.md

Two engines of one size share the model: one is called, one is the server's. Their runs alternate in rounds, and the
fastest of each counts. The client is a process of its own that streams every answer. Its texts must be those of the
engine that is called at one request, and in single precision. Else requests that arrive one by one are in other batches
than those that are called together, which moves the last bits of half precision: --batch-invariant holds for attention
alone, and products of weights have other bits at other numbers of rows.

Throughput is new tokens over the time from sending the requests to the last token, prefill included; the first token's
time is that of one request alone. A trace has a range for each layer that is called and for each step that is replayed,
which names phase, layer and backend.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import report

SHARE, LATER = 0.9, 0.005
"""Of the engine's throughput, at `FROM` requests or more; seconds that the first token may come later."""
FROM = 32
RANGES = "polyattn."
_SAID = {True: "yes", False: "no", None: "not compared"}


async def _asked(host: str, port: int, prompt: str, new: int) -> tuple[float, float, str]:
    """Stream one answer: seconds to its first text, to its end, and the text."""
    began, first, text = time.perf_counter(), 0.0, []
    reader, writer = await asyncio.open_connection(host, port, limit=2**24)
    body = json.dumps({"prompt": prompt, "max_tokens": new, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(chunk["error"])
        if part := chunk["choices"][0].get("text"):
            first = first or time.perf_counter() - began
            text.append(part)
    writer.close()
    return first, time.perf_counter() - began, "".join(text)


def client(address: str) -> None:
    """Answer lines of {"prompts", "new"} with lines of {"first", "seconds", "texts"}, until there are no more."""
    host, _, port = address.rpartition(":")

    async def together(prompts: list[str], new: int) -> list[tuple[float, float, str]]:
        return await asyncio.gather(*(_asked(host, int(port), prompt, new) for prompt in prompts))

    for line in sys.stdin:
        asked = json.loads(line)
        found = asyncio.run(together(asked["prompts"], asked["new"]))
        first, ends, texts = zip(*found, strict=True)
        print(json.dumps({"first": min(first), "seconds": max(ends), "texts": texts}), flush=True)


def tokenizer_of(vocab: int) -> Any:
    """A word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocab)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0")


class Served:
    """A server over an engine on a thread of this process, and a client of it in another process."""

    def __init__(self, engine: Any, model: Any, tokenizer: Any) -> None:
        import uvicorn

        from polyattn.integrations.transformers.server import build_app

        app = build_app(engine, model, tokenizer, "m", drain=10)
        self._server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error", lifespan="on"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self._client = subprocess.Popen(
            [sys.executable, __file__, "--client", f"127.0.0.1:{port}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def ask(self, prompts: list[str], new: int) -> dict[str, Any]:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._client.stdin.flush()
        found: dict[str, Any] = json.loads(self._client.stdout.readline())
        return found

    def close(self) -> None:
        self._client.communicate()
        self._server.should_exit = True
        self._thread.join()


def measured(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fill the rows of a result."""
    import engine as models
    import torch

    from polyattn.integrations.transformers.serving import CausalLMRunner
    from polyattn.serving.engine import Engine, EngineConfig, SamplingParams

    sizes = models.TINY if args.quick else models.FULL
    model = models.model_of(sizes, args.context, torch.device(args.device))
    result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    config = EngineConfig(
        max_requests=max(args.requests), max_tokens=args.context, max_batch_tokens=8192, prefix_caching=False,
        backend=args.backend, batch_invariant=args.batch_invariant,
    )  # fmt: skip
    called = Engine(CausalLMRunner(model), config)
    result["backends"] = dict(called.backends)
    prompts = models.prompts_of(max(args.requests), args.context - args.new, sizes["vocab"])
    if args.trace:
        traced(called, prompts[0], args.trace)
        return
    exact = next(model.parameters()).dtype == torch.float32
    tokenizer = tokenizer_of(sizes["vocab"])
    texts = [" ".join(f"t{token}" for token in prompt) for prompt in prompts]
    served = Served(Engine(CausalLMRunner(model), config), model, tokenizer)
    try:
        for count in args.requests:
            row: dict[str, Any] = {"requests": count, "new_tokens": args.new, "engine": [], "http": [], "alike": None}
            result["rows"].append(row)
            for number in range(1 + args.rounds):
                began = time.perf_counter()
                called.generate(prompts[:count], SamplingParams(1))
                first = time.perf_counter() - began
                began = time.perf_counter()
                out = called.generate(prompts[:count], SamplingParams(args.new))
                ours = [first, time.perf_counter() - began]
                answer = served.ask(texts[:count], args.new)
                if count == 1 or exact:
                    same = answer["texts"] == [tokenizer.decode(one.token_ids) for one in out]
                    row["alike"] = same and row["alike"] is not False
                if number:  # the first round records graphs and compiles
                    row["engine"].append(ours)
                    row["http"].append([answer["first"], answer["seconds"]])
            report.save(result, args.json)
    finally:
        served.close()


def traced(engine: Any, prompt: list[int], path: Path) -> None:
    """Write a profile of a request's steps, and say which ranges it has."""
    import torch

    from polyattn.serving.engine import SamplingParams

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if engine.memory.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    engine.generate([prompt], SamplingParams(4))
    with torch.profiler.profile(activities=kinds) as found:
        engine.generate([prompt], SamplingParams(4))
    found.export_chrome_trace(str(path))
    for name in dict.fromkeys(event.name for event in found.events() if event.name.startswith(RANGES)):
        print(name)


def figures(row: dict[str, Any]) -> tuple[float, float, float]:
    """The engine's tokens per second, those over HTTP, and how many seconds later the first token is there."""
    first, whole = ([min(taken[at] for taken in row[who]) for who in ("engine", "http")] for at in (0, 1))
    tokens = row["requests"] * row["new_tokens"]
    return tokens / whole[0], tokens / whole[1], first[1] - first[0]


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    by = " and ".join(f"{phase} by {backend}" for phase, backend in result["backends"].items())
    model = f"{result['parameters'] / 1e9:.2g} billion weights, context {result['context']}"
    lines = [
        f"{report.caption(result)}; {model}, {by}.",
        "",
        "| requests | new tokens | engine, tokens/s | over HTTP | share | asked | first token | asked | same text |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        engine, http, later = figures(row)
        alone = row["requests"] == 1
        lines.append(
            f"| {row['requests']} | {row['new_tokens']} | {engine:.0f} | {http:.0f} | {http / engine:.2f} "
            f"| {SHARE if row['requests'] >= FROM else ''} | {f'{later * 1e3:+.1f} ms' if alone else ''} "
            f"| {f'{LATER * 1e3:.0f} ms' if alone else ''} | {_SAID[row['alike']]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--device", help="without it a GPU where there is one")
    parser.add_argument("--requests", type=int, nargs="+", default=(1, 32), metavar="N")
    parser.add_argument("--context", type=int, default=4096, help="prompt and new tokens")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", help="polyattn's; without it the one it chooses")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="attention of a row has the same bits in every batch"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model: does everything run?")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write torch's profile there, and time nothing")
    parser.add_argument("--client", metavar="HOST:PORT", help=argparse.SUPPRESS)
    args = report.arguments(parser, markdown)
    if args is None:
        return
    if args.client:
        client(args.client)
        return
    import torch
    import transformers

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.quick:
        args.requests, args.context, args.new, args.rounds = (1, 4), 64, 24, 2
    result = {
        **report.stamp("http-serving", torch.device(args.device), transformers=transformers.__version__),
        "context": args.context,
        "batch_invariant": args.batch_invariant,
        "quick": args.quick,
        "rows": [],
    }
    measured(args, result)
    if not args.trace:
        report.finish(result, markdown, args.json)


if __name__ == "__main__":
    main()
