"""Whether a job of several ranks computes what one device does, before it is timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import polyattn

from .job import D, Job

__all__ = ["FAR", "checked"]

FAR = {torch.bfloat16: 1.2e-2, torch.float32: 1e-5}
"""The relative error that a result of ranks may have beside that of one device."""


def checked(job: Job) -> dict[str, float]:
    """The largest relative error of each mesh beside one device.

    Raises:
        SystemExit: it is more than `FAR`.
    """
    part, words, found = (48 if job.rank else 80), 24, {}
    lengths = [80, *[48] * (job.world - 1)]
    begin = sum(lengths[: job.rank])
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if job.cuda else torch.float32

    def made(tokens: int, heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, D, generator=generator).to(job.device, dtype)

    for case in ("no text", "front", "back", "8:1"):
        text = 0 if case == "no text" else words
        heads = (8, 1 if case == "8:1" else 8, 1 if case == "8:1" else 8, 8)
        video = [made(sum(lengths), h) for h in heads]
        said = [made(text, h) for h in heads]
        order = (lambda a, b: (b, a)) if case == "back" else (lambda a, b: (a, b))
        whole = [torch.cat(order(t, v), 1) for t, v in zip(said, video, strict=True)]
        at = 0 if case == "back" else text
        inputs = [t.clone().requires_grad_() for t in whole[:3]]
        right = polyattn.attention(*inputs)
        grads = torch.autograd.grad(right, inputs, whole[3])
        copying = [(name, layer) for name, layer in job.layers(transfers="copy").items() if job.sizes[name][0] > 1]
        for name, layer in [*job.layers(transfers="send").items(), *copying]:
            own = [t[:, begin : begin + part].clone().requires_grad_() for t in video[:3]]
            leaves = [t.clone().requires_grad_() for t in said[:3]] if text else []
            given: dict[str, Any] = {}
            if text:
                given = {"text": tuple(leaves), "text_at": "back" if case == "back" else "front"}
            out = layer(*own, **given)
            outs = list(out) if text else [out]
            douts = [video[3][:, begin : begin + part], said[3]][: len(outs)]
            mine = torch.autograd.grad(outs, own + leaves, douts)
            here = slice(at + begin, at + begin + part)
            there = slice(sum(lengths), None) if case == "back" else slice(0, text)
            pairs = [(outs[0], right[:, here])] + [(g, w[:, here]) for g, w in zip(mine[:3], grads, strict=True)]
            if text:
                pairs += [(outs[1], right[:, there])]
                pairs += [(g, w[:, there]) for g, w in zip(mine[3:], grads, strict=True)]
            far = max(_far(a.detach().double(), b.detach().double()) for a, b in pairs)
            found[name] = max(found.get(name, 0.0), far)
            if far > FAR[dtype]:
                raise SystemExit(f"{name}, {case}: {far:.1e} from one device, more than {FAR[dtype]}: nothing is timed")
    return found


def _far(got: Tensor, right: Tensor) -> float:
    return float((got - right).norm() / right.norm())
