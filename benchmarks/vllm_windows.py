"""How often vLLM's build of FlashAttention 3 is wrong under a window, called by itself, and whether we know where.

    python benchmarks/vllm_windows.py [--json FILE] [--calls 20000] [--seed 1]
    python benchmarks/vllm_windows.py --render FILE     # a result file as a table

Random calls in bfloat16 of 100 to 3,000 keys, with windows, go straight to
`vllm.vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func(fa_version=3)` and are compared with torch's math in
float32. A call counts as wrong above the relative L2 error that conformance allows. The calls are told apart by the
defects that `polyattn_cuda` has written down for that library: a right table of defects has every wrong call on its
side. Not every call there is wrong: where the tiles lie well, it comes out right.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import report
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from polyattn.contract import AttentionRequest
from polyattn.contract.capability import holds
from polyattn.contract.request import relation
from polyattn.registry.distributions import distribution_version
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn_cuda.records.defects import VLLM_FA3_DENSE

DTYPE = torch.bfloat16
SHOWN = 20
"""Calls that a result file names, of those that the defects did not foresee."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A call: one sequence, S_q queries at the end of S_k keys. `window`: (left, right) keys beside the query's own."""

    S_q: int
    S_k: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: tuple[int, int]

    @property
    def known(self) -> bool:
        """Whether a defect names it."""
        request = AttentionRequest(
            family="dense",
            platform="cuda",
            arch="sm90",
            dtype="bfloat16",
            head_dim=self.head_dim,
            heads=self.heads,
            kv_heads=self.kv_heads,
            causal="bottom_right" if self.causal else "none",
            window=(self.window[0], -1) if self.causal else self.window,
            s_relation=relation(self.S_q, self.S_k),
        )
        return any(holds(defect.when, request) for defect in VLLM_FA3_DENSE)


def draw(rng: random.Random) -> Drawn:
    kv_heads = rng.choice((1, 2, 4))
    S_q = rng.randint(100, 3000)
    S_k = S_q if rng.random() < 0.6 else rng.randint(S_q, 3000)
    causal = rng.random() < 0.6
    left = rng.choice((rng.randint(0, S_k), rng.choice((63, 64, 127, 128, 129, 300, 512, 1024))))
    right = 0 if causal else rng.choice((-1, 0, rng.randint(0, 600)))
    heads, head_dim = kv_heads * rng.choice((1, 1, 2, 3, 4)), rng.choice((64, 96, 128, 128, 192, 256))
    return Drawn(S_q, S_k, heads, kv_heads, head_dim, causal, (left, right))


def allowed(call: Drawn, device: torch.device) -> Tensor:
    """[S_q, S_k] bool."""
    at = torch.arange(call.S_q, device=device)[:, None] + call.S_k - call.S_q
    key = torch.arange(call.S_k, device=device)[None]
    left, right = call.window
    seen = key >= at - left
    return seen & (key <= at + right) if right >= 0 else seen


def error(call: Drawn, function: Any, draw: torch.Generator) -> float:
    """The relative L2 error of a call."""
    device = draw.device

    def make(length: int, heads: int) -> Tensor:
        return torch.randn(length, heads, call.head_dim, device=device, generator=draw).to(DTYPE)

    def offsets(length: int) -> Tensor:
        return torch.tensor([0, length], dtype=torch.int32, device=device)

    query, key, value = make(call.S_q, call.heads), make(call.S_k, call.kv_heads), make(call.S_k, call.kv_heads)
    out = function(
        query,
        key,
        value,
        max_seqlen_q=call.S_q,
        cu_seqlens_q=offsets(call.S_q),
        max_seqlen_k=call.S_k,
        cu_seqlens_k=offsets(call.S_k),
        causal=call.causal,
        window_size=list(call.window),
        fa_version=3,
    )
    with sdpa_kernel(SDPBackend.MATH):
        exact = scaled_dot_product_attention(
            *(x.float().transpose(0, 1)[None] for x in (query, key, value)),
            attn_mask=allowed(call, device),
            enable_gqa=True,
        )
    right = exact[0].transpose(0, 1)
    return float((out.float() - right).norm() / right.norm())


def measured(calls: int, seed: int, device: torch.device) -> dict[str, Any]:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    rng, draws = random.Random(seed), torch.Generator(device=device).manual_seed(seed)
    counts = {name: {"calls": 0, "wrong": 0} for name in ("foreseen", "others")}
    missed, worst = [], 0.0
    for _ in range(calls):
        call = draw(rng)
        found = error(call, flash_attn_varlen_func, draws)
        count = counts["foreseen" if call.known else "others"]
        count["calls"] += 1
        if not found < RELATIVE_L2[DTYPE]:
            count["wrong"] += 1
            worst = max(worst, found)
            if not call.known:
                missed.append({**dataclasses.asdict(call), "error": found})
    return {"bound": RELATIVE_L2[DTYPE], "worst": worst, **counts, "missed": missed[:SHOWN]}


def markdown(result: dict[str, Any]) -> str:
    """A result file as a table."""
    lines = [f"{report.caption(result)}.", "", "| calls | drawn | wrong |", "|---|---:|---:|"]
    names = {"foreseen": "that a known defect names", "others": "others with a window"}
    for name, said in names.items():
        lines.append(f"| {said} | {result[name]['calls']:,} | {result[name]['wrong']:,} |")
    return "\n".join(lines)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    args = report.arguments(parser, markdown)
    if args is None:
        return 0
    device = torch.device("cuda")
    version = distribution_version("vllm") or "unknown"
    result = report.stamp("vllm_windows", device, vllm=version)
    result |= measured(args.calls, args.seed, device)
    report.finish(result, markdown, args.json)
    return 1 if result["others"]["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
