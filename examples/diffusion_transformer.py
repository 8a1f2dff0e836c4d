"""A small diffusion transformer on polyattn, with random weights: a program to record and to tune.

    polyattn trace -- python examples/diffusion_transformer.py
    polyattn tune --from trace.jsonl
    polyattn trace --compare -- python examples/diffusion_transformer.py

On a GPU the attention of a model of images at 1,024 pixels, text apart, on a CPU a tiny one. Its tokens also lie on the
grid of a video, of which each layer says its place, so that sparse methods serve it:

    python examples/diffusion_transformer.py --attention-backend video_sparse_attn
    python examples/diffusion_transformer.py --attention-backend vmoba_attn --attention-backend-config '{"st_topk": 4}'
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polyattn
from polyattn.video import Run, place

GPU = torch.cuda.is_available()
HEADS, HEAD_DIM, LAYERS = (38, 64, 12) if GPU else (2, 32, 2)
BATCH, GRID, TEXT, STEPS = (2, (4, 32, 32), 333, 12) if GPU else (1, (4, 4, 6), 7, 4)
WIDTH = HEADS * HEAD_DIM
OPTIONS: dict[str, dict[str, Any]] = {
    "video_sparse_attn": {"sparsity": 0.5},
    "sla_attn": {"topk_ratio": 0.5, "BLKQ": 64},
    "sage_sla_attn": {"topk_ratio": 0.5, "BLKQ": 64},
    "sliding_tile_attn": {"sta_tile": [2, 2, 2], "skip_time_steps": 1},
    "vmoba_attn": {
        "temporal_chunk_size": 1,
        "temporal_topk": 2,
        "spatial_chunk_size": [2, 2],
        "spatial_topk": 2,
        "st_chunk_size": [2, 2, 2],
        "st_topk": 3,
        "moba_select_mode": "topk",
        "first_full_step": 1,
    },
    "sparse_video_gen_2_attn": {"svg2_num_q_centroids": 8, "svg2_num_k_centroids": 16},
}
"""Options for grids as small as these; models come with their own."""


class Block(torch.nn.Module):
    """Attention over the image, then from the image to the text; scaled and shifted by the time."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer(
            "number", torch.tensor(number), persistent=False
        )  # a tensor: blocks share what is compiled
        self.norm, self.shift = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.q, self.kv = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)
        # What a model learns for video_sparse_attn and for sla_attn.
        self.to_gate_compress, self.proj_l = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(HEAD_DIM, HEAD_DIM)

    def forward(self, image: Tensor, text: Tensor, step: Tensor) -> Tensor:
        """image: [B, S, WIDTH]. text: [B, S_k, WIDTH]. step: [B, 1, WIDTH]."""
        scale, shift = self.shift(step).chunk(2, -1)
        hidden = self.norm(image) * scale + shift
        query, key, value = heads(self.qkv(hidden).chunk(3, -1))
        (gate,) = heads([self.to_gate_compress(hidden)])
        learned = {f"proj_l.{name}": tensor for name, tensor in self.proj_l.named_parameters()}
        here = place(layer=self.number, gate=gate, tensors=learned)
        image = image + self.out(polyattn.attention(query, key, value, place=here).flatten(-2))
        (query,), (key, value) = heads([self.q(image)]), heads(self.kv(text).chunk(2, -1))
        # Keys of another sequence: sparse methods leave this to dense attention.
        return image + polyattn.attention(query, key, value, place=place(role="cross")).flatten(-2)


def heads(tensors: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    """[B, S, WIDTH] -> [B, S, H, D] of each."""
    return [one.unflatten(-1, (HEADS, HEAD_DIM)) for one in tensors]


def configure(method: str, options: dict[str, Any], folder: Path) -> None:
    """Name a backend for all calls, with its options."""
    used = {**OPTIONS.get(method, {}), **options}
    if method == "sliding_tile_attn" and "mask_strategy_file_path" not in used:
        windows = {f"{t}_{n}_{h}": [1, 1, 3] for t, n, h in itertools.product(*map(range, (STEPS, LAYERS, HEADS)))}
        (folder / "windows.json").write_text(json.dumps(windows))
        used["mask_strategy_file_path"] = str(folder / "windows.json")
    polyattn.configure(attention_backend=method, attention_backend_config={method: used} if used else None)


def denoise(blocks: list[Block], noise: Tensor, text: Tensor) -> tuple[Tensor, Run]:
    """One run, from noise to an image."""
    image = noise
    with Run(steps=STEPS, layers=LAYERS) as run:
        for step in range(STEPS):
            at = torch.full((BATCH, 1, WIDTH), step / STEPS)
            with run.at(grid=GRID, step=step):
                for block in blocks:
                    image = image - 0.1 * block(image, text, at)
    return image, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention-backend", metavar="NAME", default="")
    parser.add_argument("--attention-backend-config", metavar="JSON", type=json.loads, default={})
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if GPU else torch.float32)
    tokens = GRID[0] * GRID[1] * GRID[2]
    with tempfile.TemporaryDirectory() as folder, torch.device("cuda" if GPU else "cpu"), torch.no_grad():
        if args.attention_backend:
            configure(args.attention_backend, args.attention_backend_config, Path(folder))
        blocks = [Block(number) for number in range(LAYERS)]
        noise, text = torch.randn(BATCH, tokens, WIDTH), torch.randn(BATCH, TEXT, WIDTH)
        for _ in range(3 if GPU else 1):  # on a GPU kernels are compiled in the first
            began = time.perf_counter()
            image, run = denoise(blocks, noise, text)
            print(f"{STEPS} steps in {time.perf_counter() - began:.3f} s; norm {image.float().norm().item():.4g}")
        if args.attention_backend:
            print(run.explain())


if __name__ == "__main__":
    main()
