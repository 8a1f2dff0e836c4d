"""What a quantised KV cache costs in accuracy and saves in memory: attention outputs beside those of a bf16 cache.

    python benchmarks/kv_cache_accuracy.py [--layers 4] [--tokens 384] [--seed 0] [--json FILE]
    python benchmarks/kv_cache_accuracy.py --render FILE     # a result file as the table of docs/benchmarks.md

Layers shaped like Llama's (GQA 4, head dim 64, RoPE, RMSNorm, SwiGLU) and latent layers shaped like DeepSeek's
(D_c = 512, D_r = 64), with random weights. The residual stream is that of the bf16 cache, so that each layer's figure
is its own: relative L2 of its attention output, all tokens attending causally from a paged `KVPool`. Queries and
arithmetic are float32; only what the caches keep differs. Every cache is measured twice. "plain": weights as drawn.
"outliers": one pair of channels of every key head (one in 64 channels of the latents) is 16 times as large, as in
trained models, and what multiplies it is 16 times as small, so that the exact output is the same. Static scales are
calibrated: the largest real number of the layer (or head) over the largest of the dtype. CPU only; the figures depend
on the seed, not on the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import report
import torch
import torch.nn.functional as F
from torch import Tensor

import polyattn
from polyattn.serving.kv_cache.pool import KVPool
from polyattn.serving.kv_cache.storage import KVCacheConfig
from polyattn.serving.layer import AttentionLayer

HIDDEN, H_Q, H_KV, D = 512, 8, 2, 64
NOPE, D_C, D_R = 64, 512, 64
PAGE, OUTLIER = 16, 16.0

CACHES = (
    ("bf16", "bf16", ""),
    ("fp8_e4m3, by tensor", "fp8_e4m3", "tensor"),
    ("fp8_e4m3, by head", "fp8_e4m3", "head"),
    ("fp8_e4m3, by token and head", "fp8_e4m3", "token"),
    ("fp8_e5m2, by tensor", "fp8_e5m2", "tensor"),
    ("int8, by head", "int8", "head"),
    ("int8, by token and head", "int8", "token"),
    ("fp4_e2m1, by 16 numbers", "fp4_e2m1", "block16"),
)
LATENT = (("latent bf16", "bf16", ""), ("latent fp8_e4m3, by 128 numbers", "fp8_e4m3", "block128"))


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape) * shape[-1] ** -0.5


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def rope(x: Tensor) -> Tensor:
    """[T, H, D]: the halves of a row are rotated against each other."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def pair_of_channels() -> Tensor:
    """[D] factors: one pair that RoPE turns slowly is larger."""
    factors = torch.ones(D)
    factors[[D // 2 - 4, D - 4]] = OUTLIER
    return factors


def tables(tokens: int) -> dict[str, Any]:
    """One sequence in pages out of order, and its slots."""
    pages = torch.randperm(-(-tokens // PAGE)) + 1
    return {
        "page_table": pages.int()[None],
        "seq_lens": torch.tensor([tokens], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, tokens], dtype=torch.int32),
        "max_seqlen_q": tokens,
        "max_seqlen_k": tokens,
        "backend": "reference",
    }


def slots(call: dict[str, Any]) -> Tensor:
    token = torch.arange(call["max_seqlen_k"])
    return call["page_table"][0][token // PAGE].long() * PAGE + token % PAGE


def pool_of(layer: AttentionLayer, dtype: str, scales: str, tokens: int) -> KVPool:
    config = KVCacheConfig(dtype, PAGE, scales=scales)
    return KVPool((layer,), config, -(-tokens // PAGE) + 1, dtype=torch.bfloat16)


def calibrated(rows: Tensor, scales: str, dtype: torch.dtype) -> Tensor:
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    largest = rows.abs().amax() if scales == "tensor" else rows.abs().amax((0, 2))
    return largest.float() / limits.max


def attended(query: Tensor, key: Tensor, value: Tensor, dtype: str, scales: str) -> tuple[Tensor, int]:
    """(out [T, H_q, D], bytes of a token) through a cache."""
    pool = pool_of(AttentionLayer(0, H_Q, H_KV, D), dtype, scales, len(query))
    cache, call = pool.cache(0), tables(len(query))
    if scales in ("tensor", "head"):
        pool.set_scales(0, *(calibrated(rows, scales, cache.key_cache.dtype) for rows in (key, value)))
    pool.write(0, slots(call), key, value)
    out = polyattn.paged_attention(query, *cache.tensors, k_scale=cache.k_scale, v_scale=cache.v_scale, **call)
    return out, pool.bytes_per_token(0)


def attended_latent(query: Tensor, rows: Tensor, dtype: str, scales: str) -> tuple[Tensor, int]:
    """(out [T, H_q, D_c], bytes of a row) through a cache of latent rows."""
    scale = (NOPE + D_R) ** -0.5
    layer = AttentionLayer(0, H_Q, 1, D_C + D_R, v_head_dim=D_C, scale=scale, latent=True)
    pool = pool_of(layer, dtype, scales, len(query))
    cache, call = pool.cache(0).cache, tables(len(query))
    pool.write(0, slots(call), rows)
    cache = cache if cache.dtype == torch.uint8 else cache.to(query.dtype)
    return polyattn.mla_attention(query, cache, scale=scale, **call), pool.bytes_per_token(0)


def llama(layers: int, tokens: int, outliers: bool) -> Iterator[dict[str, tuple[Tensor, int]]]:
    """Layer by layer: cache -> (attention output, bytes of a token)."""
    x, factors = torch.randn(tokens, HIDDEN), pair_of_channels() if outliers else torch.ones(D)
    for _ in range(layers):
        h = normed(x)
        q, k, v = ((h @ weight(n * D, HIDDEN).T).view(tokens, n, D) for n in (H_Q, H_KV, H_KV))
        q, k = rope(q) / factors, (rope(k) * factors).bfloat16()
        found = {name: attended(q, k, v.bfloat16(), *kind) for name, *kind in CACHES}
        yield found
        x = x + found["bf16"][0].flatten(1) @ weight(HIDDEN, H_Q * D).T
        gate, up = (normed(x) @ weight(2 * HIDDEN, HIDDEN).T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ weight(HIDDEN, HIDDEN).T


def deepseek(layers: int, tokens: int, outliers: bool) -> Iterator[dict[str, tuple[Tensor, int]]]:
    """The same of latent layers; the outputs are those of the heads, after the values' up-projection."""
    x, factors = torch.randn(tokens, HIDDEN), torch.ones(D_C)
    factors[::64] = OUTLIER if outliers else 1.0
    for _ in range(layers):
        h = normed(x)
        q_nope, q_rope = (h @ weight(H_Q * (NOPE + D_R), HIDDEN).T).view(tokens, H_Q, -1).split([NOPE, D_R], -1)
        latent, k_rope = (h @ weight(D_C + D_R, HIDDEN).T).split([D_C, D_R], -1)
        w_uk, w_uv = (torch.randn(H_Q, n, D_C) * D_C**-0.5 / factors for n in (NOPE, D))
        query = torch.cat([torch.einsum("thd,hdc->thc", q_nope, w_uk), rope(q_rope)], -1)
        rows = torch.cat([normed(latent) * factors, rope(k_rope[:, None])[:, 0]], -1).bfloat16()
        found = {}
        for name, *kind in LATENT:
            out, size = attended_latent(query, rows, *kind)
            found[name] = torch.einsum("thc,hvc->thv", out, w_uv), size
        yield found
        x = x + found["latent bf16"][0].flatten(1) @ weight(HIDDEN, H_Q * D).T


def measure(layers: int, tokens: int, seed: int) -> dict[str, dict[str, Any]]:
    """cache -> bytes of a token in one layer, their share of bf16's, and relative L2 of each layer."""
    rows: dict[str, dict[str, Any]] = {}
    for model, base in ((llama, "bf16"), (deepseek, "latent bf16")):
        for kind in ("plain", "outliers"):
            torch.manual_seed(seed)
            for found in model(layers, tokens, kind == "outliers"):
                want, whole = found[base]
                for name, (out, size) in found.items():
                    if name == base:
                        continue
                    row = rows.setdefault(name, {"bytes": size, "of_bf16": size / whole, "plain": [], "outliers": []})
                    row[kind].append(float((out - want).norm() / want.norm()))
    return rows


def markdown(result: dict[str, Any]) -> str:
    """A result file as the table of docs/benchmarks.md."""
    run = f"{result['layers']} layers, {result['tokens']} tokens, seed {result['seed']}"
    lines = [
        f"{report.caption(result)}; {run}.",
        "",
        "| cache | bytes of a token and layer | of bf16 | relative L2, median layer | worst | with outliers | worst |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in result["rows"].items():
        figures = (f(row[kind]) for kind in ("plain", "outliers") for f in (statistics.median, max))
        cells = (f"{figure:.2%}" for figure in figures)
        lines.append(f"| {name} | {row['bytes']} | {row['of_bf16']:.1%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    args = report.arguments(parser, markdown)
    if args is None:
        return
    with torch.inference_mode():
        rows = measure(args.layers, args.tokens, args.seed)
    result = {
        **report.stamp("kv-cache-accuracy"),
        "layers": args.layers,
        "tokens": args.tokens,
        "seed": args.seed,
        "rows": rows,
    }
    report.finish(result, markdown, args.json)


if __name__ == "__main__":
    main()
