"""Decode over quantised caches, by the name of a backend: FP8 keys and values, and every format of latent rows.

    python benchmarks/quantised_caches.py [--json FILE]     # on a GPU
    python benchmarks/quantised_caches.py --small           # tiny, on the CPU: that it runs. No figure counts
    python benchmarks/quantised_caches.py --render FILE     # a result file as the table of docs/benchmarks.md

32 requests of 32k tokens with 32 query and 8 key heads of 128, or latent rows of 576 with 128 heads, pages of 64 in
random order. Bandwidth is that of the bytes a cache has for these tokens. Each call is compared with attention in
float32 over the numbers that the cache holds; what the cache itself lost, beside the numbers that went in, is told
apart. `strict` is a backend whose own kernel has to read the cache, or to turn its pages into the queries' dtype first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import report
import torch
from beside import beside, error, run, spread
from torch import Tensor

import polyattn
from polyattn.bench.measure import Clock
from polyattn.semantics.kv_quant import LATENT_FORMATS, mla_pack, mla_unpack

BACKENDS = ("triton", "fa3")
LATENT = ("triton", "flashmla", "fa3")
DIMS, SCALE, PAGE = (576, 512), 192**-0.5, 64
READ, DEQUANTISED = 0.6, 0.15
"""Shares of the bandwidth of the backend's own bfloat16: where its kernel reads FP8, and where pages are turned."""
MOST, ROUNDED = 0.02, 0.06
"""Errors of kernels in 16 bits, and of those that round queries and weights to FP8."""


class Size(NamedTuple):
    rows: int
    tokens: int
    heads: tuple[int, int]
    head_dim: int
    latent_heads: int
    rounds: int


FULL, SMALL = Size(32, 32768, (32, 8), 128, 128, 9), Size(2, 128, (4, 2), 64, 4, 1)


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Of one token, in float32: query [H, D], keys [S, H_kv, D], values [S, H_kv, D_v]."""
    heads = query.view(keys.shape[1], -1, query.shape[1]).float()
    weights = (heads @ keys.permute(1, 2, 0).float() * scale).softmax(-1)
    return (weights @ values.transpose(0, 1).float()).flatten(0, 1)


def exact(query: Tensor, caches: tuple[Tensor, Tensor], table: Tensor, scale: float) -> Tensor:
    outs = []
    for one, pages in zip(query, table.long(), strict=True):
        keys, values = (mla_unpack(cache[pages]).float().flatten(0, 1) for cache in caches)
        if keys.ndim == 2:
            keys, values = keys[:, None], values[:, None, : DIMS[1]]
        outs.append(attention(one, keys, values, scale))
    return torch.stack(outs)


def keys_and_values(size: Size, clock: Clock) -> Iterator[dict[str, Any]]:
    """FP8 caches by name, beside bfloat16."""
    device, (heads, kv_heads), D = clock.device, size.heads, size.head_dim
    torch.manual_seed(0)
    dtype = torch.bfloat16 if clock.on_gpu else torch.float32
    step = spread(size.rows, size.tokens, PAGE, device)
    query = torch.randn(size.rows, heads, D, dtype=dtype, device=device)
    shape = (step["page_table"].numel(), PAGE, kv_heads, D)
    plain = (torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device))
    packed = (plain[0].to(torch.float8_e4m3fn), plain[1].to(torch.float8_e4m3fn))
    one = torch.ones(1, device=device)
    wanted = {"plain": exact(query, plain, step["page_table"], D**-0.5)}
    wanted["fp8"] = exact(query, packed, step["page_table"], D**-0.5)
    lost = error(wanted["fp8"], wanted["plain"])
    for name in BACKENDS if clock.on_gpu else ("torch_native",):
        found: dict[str, Any] = {}
        for kind in ("plain", "fp8", "fp8, strict"):
            caches = plain if kind == "plain" else packed
            scales = {} if kind == "plain" else {"k_scale": one, "v_scale": one}
            call = functools.partial(polyattn.paged_attention, query, *caches, backend=name, **scales, **step)
            polyattn.configure(strict="strict" in kind)
            right = wanted["plain" if kind == "plain" else "fp8"]
            found[kind] = beside({name: call}, right, ROUNDED, clock, size.rounds)[name]
            if "us" in found[kind]:
                found[kind]["gb_s"] = round(1e-3 * sum(cache.nbytes for cache in caches) / found[kind]["us"], 1)
        polyattn.configure(strict=False)
        row = {"what": "keys and values", "backend": name, "cache_error": float(f"{lost:.2e}"), "calls": found}
        yield row | shares(found)


def shares(found: dict[str, Any]) -> dict[str, Any]:
    """Of the bandwidth of its own bfloat16, and what is asked."""
    own = found["plain"].get("gb_s")
    said = {}
    for kind, one in found.items():
        if own and kind != "plain" and "gb_s" in one:
            must = DEQUANTISED if "strict" in kind else READ
            said[kind] = {"share": round(one["gb_s"] / own, 3), "must": must}
    return {"shares": said} if said else {}


def latent_rows(size: Size, clock: Clock) -> Iterator[dict[str, Any]]:
    """Every format of latent rows, by every backend that serves it here."""
    device = clock.device
    torch.manual_seed(0)
    dtype = torch.bfloat16 if clock.on_gpu else torch.float32
    step = spread(size.rows, size.tokens, PAGE, device)
    query = torch.randn(size.rows, size.latent_heads, DIMS[0], dtype=dtype, device=device)
    rows = torch.randn(step["page_table"].numel(), PAGE, DIMS[0], dtype=dtype, device=device)
    whole = exact(query, (rows, rows), step["page_table"], SCALE)
    formats = {str(dtype)[6:]: rows}
    for one in LATENT_FORMATS:
        parts = [mla_pack(part, one.kv_dtype, one.kv_scales) for part in rows.split(512)]
        formats[f"{one.kv_dtype} {one.kv_scales}".strip()] = torch.cat(parts)
    for name, cache in formats.items():
        right = whole if cache is rows else exact(query, (cache, cache), step["page_table"], SCALE)
        calls = {
            one: functools.partial(polyattn.mla_attention, query, cache, scale=SCALE, backend=one, **step)
            for one in (LATENT if clock.on_gpu else ("torch_native",))
        }
        found = beside(calls, right, MOST, clock, size.rounds)
        for one in found.values():
            if "us" in one:
                one["gb_s"] = round(1e-3 * cache.nbytes / one["us"], 1)
        lost = error(right, whole)
        yield {
            "what": f"latent rows, {name}",
            "bytes": cache[0, 0].nbytes,
            "cache_error": float(f"{lost:.2e}"),
            "calls": found,
        }


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    lines = [
        f"{report.caption(result)}.",
        "",
        "| cache | backend | us | GB/s | of own bfloat16 | error of the call | error of the cache |",
        "|---|---|---:|---:|---|---:|---:|",
    ]
    reasons = []
    for row in result["rows"]:
        for name, one in row["calls"].items():
            cache, who = (name, row["backend"]) if "backend" in row else (row["what"], name)
            said = row.get("shares", {}).get(name)
            share = "-"
            if said is not None:
                reached = "met" if said["share"] >= said["must"] else "missed"
                share = f"{said['share']:.0%}, asked {said['must']:.0%}: {reached}"
            times = (f"{one['us']:.1f}", f"{one['gb_s']:.0f}") if "us" in one else ("-", "-")
            far = f"{one['error']:.1e}" if "error" in one else "-"
            kept = "-" if name == "plain" or not row["cache_error"] else f"{row['cache_error']:.3f}"
            lines.append(f"| {cache} | `{who}` | {' | '.join(times)} | {share} | {far} | {kept} |")
            if "not_timed" in one:
                reasons.append(f"- {cache}, `{who}`, is not timed: {one['not_timed']}")
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def measure(size: Size, clock: Clock) -> Iterator[dict[str, Any]]:
    yield from keys_and_values(size, clock)
    yield from latent_rows(size, clock)


def main() -> None:
    run("quantised-caches", __doc__, markdown, measure, (SMALL, FULL))


if __name__ == "__main__":
    main()
