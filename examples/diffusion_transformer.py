"""A small diffusion transformer on polyattn, with random weights: a program to record and to tune.

    polyattn trace -- python examples/diffusion_transformer.py
    polyattn tune --from trace.jsonl
    polyattn trace --compare -- python examples/diffusion_transformer.py

On a GPU the attention of a model of images at 1,024 pixels, text apart, on a CPU a tiny one.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

import polyattn

GPU = torch.cuda.is_available()
HEADS, HEAD_DIM, LAYERS = (38, 64, 12) if GPU else (2, 32, 2)
BATCH, PIXELS, TEXT, STEPS = (2, 4096, 333, 12) if GPU else (1, 96, 7, 4)
WIDTH = HEADS * HEAD_DIM


class Block(torch.nn.Module):
    """Attention over the image, then from the image to the text; scaled and shifted by the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shift = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.q, self.kv = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, image: Tensor, text: Tensor, step: Tensor) -> Tensor:
        """image: [B, S, WIDTH]. text: [B, S_k, WIDTH]. step: [B, 1, WIDTH]."""
        scale, shift = self.shift(step).chunk(2, -1)
        query, key, value = heads(self.qkv(self.norm(image) * scale + shift).chunk(3, -1))
        image = image + self.out(polyattn.attention(query, key, value).flatten(-2))
        (query,), (key, value) = heads([self.q(image)]), heads(self.kv(text).chunk(2, -1))
        return image + polyattn.attention(query, key, value).flatten(-2)


def heads(tensors: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    """[B, S, WIDTH] -> [B, S, H, D] of each."""
    return [one.unflatten(-1, (HEADS, HEAD_DIM)) for one in tensors]


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if GPU else torch.float32)
    with torch.device("cuda" if GPU else "cpu"), torch.no_grad():
        blocks = [Block() for _ in range(LAYERS)]
        noise, text = torch.randn(BATCH, PIXELS, WIDTH), torch.randn(BATCH, TEXT, WIDTH)
        for _ in range(3 if GPU else 1):  # on a GPU kernels are compiled in the first
            began, image = time.perf_counter(), noise
            for step in range(STEPS):
                at = torch.full((BATCH, 1, WIDTH), step / STEPS)
                for block in blocks:
                    image = image - 0.1 * block(image, text, at)
            print(f"{STEPS} steps in {time.perf_counter() - began:.3f} s; norm {image.float().norm().item():.4g}")


if __name__ == "__main__":
    main()
