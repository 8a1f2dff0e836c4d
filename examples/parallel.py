"""A block of a diffusion transformer whose tokens lie on several ranks, trained one step, and checked against one rank.

    torchrun --nproc-per-node 2 examples/parallel.py

With one process it runs too. On GPUs, give each rank its own: torch.cuda.set_device(rank), and "nccl".
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import polyattn
from polyattn.distributed import init_mesh

B, S, T, H, D = 1, 37, 5, 5, 16  # neither tokens nor heads divide by two


class Block(nn.Module):
    """Joint attention of text and video. `attend` is the only line that knows of ranks."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(H * D, 3 * H * D)
        self.out = nn.Linear(H * D, H * D)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).unbind(2)
        return q, k, v

    def forward(self, video: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        out, words = self.attend(*self.heads(video), text=self.heads(text), text_at="front")
        return self.out(out.flatten(2)), self.out(words.flatten(2))


def main() -> None:
    """Train a step of the block on all ranks, and compare with the whole."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group(
        "gloo", rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1))
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    video, text = torch.randn(B, S, H * D), torch.randn(B, T, H * D)
    # Shares of the text's gradient: the gradients of all weights are then summed over the ranks.
    block = Block(polyattn.nn.UlyssesAttention(init_mesh(ulysses=world)["ulysses"], text_grad="share"))

    mine = video.tensor_split(world, 1)[rank]
    out, words = block(mine, text)
    loss = out.square().sum() + words.square().sum() / world
    loss.backward()
    for weight in block.parameters():
        dist.all_reduce(weight.grad)

    q, k, v = (torch.cat(pair, 1) for pair in zip(block.heads(text), block.heads(video), strict=True))
    whole = block.out(polyattn.attention(q, k, v).flatten(2))
    right = torch.autograd.grad(whole.square().sum(), tuple(block.parameters()))
    torch.testing.assert_close(words, whole[:, :T])
    torch.testing.assert_close(out, whole[:, T:].tensor_split(world, 1)[rank])
    for weight, grad in zip(block.parameters(), right, strict=True):
        torch.testing.assert_close(weight.grad, grad, rtol=1e-4, atol=1e-3)
    if rank == 0:
        sizes = [len(part) for part in torch.arange(S).tensor_split(world)]
        print(f"ranks with {sizes} tokens and {H} heads: as one rank, forward and backward")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
