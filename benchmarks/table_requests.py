"""The requests that a device's table of measurements should know, as a trace to tune from.

    python benchmarks/table_requests.py --device cuda > requests.jsonl
    polyattn tune --from requests.jsonl --seconds 3600
    polyattn tune --export table.json      # for a plugin: docs/tuning.md, "Measurements in a package"

A measurement serves requests like it (`polyattn.tuning.similarity`): twice or half as many query heads to a key head,
twice or half as wide heads, four times as much or as little of batch times key heads, of each length, page size and
window; a tree of drafts only those of its own size. So batches and lengths are up to sixteen times apart here, and
what makes for another kernel (masks, sinks, a softcap, the cache's dtype, gradients) is there by itself; head dims
and layouts are closer than they would have to be, for who is fast turns with them too. Shapes are those of language
models and DiTs, of no model in particular.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch

from polyattn.bench.measure import Workload
from polyattn.bench.rows import Row
from polyattn.bench.workloads import workload

KV_HEADS = {1: 32}
"""By group; 8 otherwise, as models have them."""
PAGE = 16
PROMPTS = ((1, 1024), (16, 1024), (2, 16384))
"""(batch, S): what has little to do at once, much in many sequences, and much in few."""
LONG = ((1, 65536),)
CACHES = ((1, 1024), (1, 16384), (16, 1024), (16, 16384), (128, 4096))
"""(batch, S_k) of a decode step."""
CHUNKS = ((4, 1024, 1024), (1, 1024, 16384), (16, 64, 2048), (16, 512, 16384), (16, 8, 4096))
"""(batch, S_q, S_k) of new tokens over a cache."""


def row(family: str, kind: str, group: int, head_dim: int, **fields: Any) -> Row:
    kv_heads = KV_HEADS.get(group, 8)
    return Row(family=family, kind=kind, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, **fields)


def dense() -> Iterator[Row]:
    """Calls with whole keys and values."""
    common = [(64, 1, False), (128, 1, False), (64, 1, True), (64, 4, True), (128, 1, True), (128, 4, True)]
    rare = [(72, 1, False), (80, 1, False), (96, 1, True), (128, 16, True), (256, 4, True)]
    sizes = [(c, PROMPTS + (LONG if c[0] == 128 else ())) for c in common] + [(r, PROMPTS[:2]) for r in rare]
    for (head_dim, group, causal), some in sizes:
        for batch, length in some:
            yield row("prompt", "dense", group, head_dim, batch=batch, q_len=length, causal=causal)
    for head_dim in (64, 128):
        for batch, length in CACHES[:4]:
            yield row("growing keys", "dense", 4, head_dim, batch=batch, q_len=1, kv_len=length, causal=False)
    for batch in (1, 16):
        yield row("latent prompt", "dense", 1, 192, v_head_dim=128, batch=batch, q_len=1024)
        yield row("cross", "dense", 1, 128, batch=batch, q_len=8192, kv_len=256, causal=False)
        yield row("cross", "dense", 1, 72, batch=batch, q_len=4096, kv_len=256, causal=False)
        yield row("softcap", "dense", 4, 128, batch=batch, q_len=4096, softcap=50.0)
        yield row("window", "dense", 4, 128, batch=batch, q_len=4096, window=(2047, -1))
        yield row("sinks", "dense", 8, 64, batch=batch, q_len=4096, sinks=True)
        yield row("sinks", "dense", 8, 64, batch=batch, q_len=4096, sinks=True, window=(127, -1))
        for head_dim, group, causal in ((64, 4, True), (128, 1, False), (128, 1, True), (128, 4, True)):
            yield row("training", "training", group, head_dim, batch=batch, q_len=2048, causal=causal)
    yield row("window", "dense", 4, 128, batch=1, q_len=32768, window=(2047, -1))
    yield row("window", "dense", 2, 128, batch=2, q_len=8192, window=(2047, -1), softcap=50.0)
    yield row("training", "training", 4, 128, batch=1, q_len=16384)
    yield row("training", "training", 1, 128, batch=1, q_len=16384, causal=False)


def packed() -> Iterator[Row]:
    """Sequences of several lengths, one behind another."""
    for lengths in ((256,) * 15 + (512,), (512,) * 7 + (4096,)):
        yield row("packed", "packed", 4, 128, lengths=lengths)
        yield row("packed", "packed", 1, 80, lengths=lengths, causal=False)


def served() -> Iterator[Row]:
    """Layers of an engine, over pages."""
    for head_dim, group in ((64, 4), (128, 4), (128, 1), (64, 1), (96, 1), (128, 16), (256, 4)):
        for batch, length in CACHES:
            yield row("decode", "paged", group, head_dim, batch=batch, q_len=1, kv_len=length)
    for batch, new, length in CHUNKS:
        for head_dim, group in ((64, 4), (128, 1), (128, 4), (256, 4)):
            yield row("extend", "paged", group, head_dim, batch=batch, q_len=new, kv_len=length)
    for batch, length in CACHES[2:]:
        yield row("fp8", "paged", 4, 128, batch=batch, q_len=1, kv_len=length, kv_dtype="fp8_e4m3")
        yield row("sinks", "paged", 8, 64, batch=batch, q_len=1, kv_len=length, sinks=True)
        yield row("sinks", "paged", 8, 64, batch=batch, q_len=1, kv_len=length, sinks=True, window=(127, -1))
        yield row("window", "paged", 4, 128, batch=batch, q_len=1, kv_len=length, window=(2047, -1))
        yield row("softcap", "paged", 4, 128, batch=batch, q_len=1, kv_len=length, softcap=50.0)
    for window in ((-1, -1), (127, -1)):
        yield row("sinks", "paged", 8, 64, batch=16, q_len=512, kv_len=4096, sinks=True, window=window)
    for batch in (4, 64):
        for drafts in (16, 64):
            yield row("verify", "paged", 4, 128, batch=batch, q_len=drafts, kv_len=4096, tree=True)


def latent() -> Iterator[Row]:
    """DeepSeek's rows of 576: all heads on one device, and an eighth of them."""
    for heads in (16, 128):
        fields = {"heads": heads, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "page_size": 64}
        for batch, length in CACHES:
            yield Row(family="latent", kind="latent", batch=batch, q_len=1, kv_len=length, **fields)


def workloads(device: torch.device) -> list[Workload]:
    """Everything, what is most common first: a run that is stopped has that, and another goes on."""
    found = [workload(dataclasses.replace(one, page_size=PAGE), device) for one in served()]
    found += [workload(one, device) for one in (*latent(), *packed())]
    calls = [workload(one, device) for one in dense()]
    swapped = [dataclasses.replace(one, request=dataclasses.replace(one.request, layout="BHSD")) for one in calls]
    return found + [one for both in zip(calls, swapped, strict=True) for one in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="whose requests they are")
    for one in workloads(parser.parse_args().device):
        print(json.dumps({**one.plain(), "count": 1, "backend": ""}))


if __name__ == "__main__":
    main()
