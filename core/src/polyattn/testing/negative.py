"""Negative controls: results that are wrong in ways kernels are wrong. A gate that lets one pass proves nothing.

Each is computed in float64 and rounded once, so that it is a perfect kernel but for its one fault. Both gates of
`polyattn.testing.tolerances` must reject each of them, in every dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from ..contract import Accuracy, AttentionRequest
from ..semantics.merge_lse import merge
from .plain import plain_attention, reference_attention
from .tolerances import Measure, compare_class, measure

__all__ = ["Control", "controls"]

BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Control:
    """Describes one wrong result (or, with `fault` false, the right one) and what the gates said of it."""

    name: str
    measure: Measure
    fault: bool = True
    by_class: bool = False

    @property
    def rejected_by(self) -> tuple[str, ...]:
        """The gates that rejected it: `rule` (FlashAttention's), `relative` (L2)."""
        m = self.measure
        gates = {"rule": m.worst > m.worst_allowed, "relative": m.relative > m.relative_allowed}
        return tuple(name for name, rejects in gates.items() if rejects)

    @property
    def held(self) -> bool:
        """Every gate did its work: both rejected a fault (float64 has one gate), none the right result."""
        gates = 1 if self.by_class or self.measure.worst_allowed == float("inf") else 2
        return len(self.rejected_by) == (gates if self.fault else 0)


def controls(dtype: torch.dtype, device: torch.device, accuracy: Accuracy | None = None) -> list[Control]:
    """Run every control in one dtype on one device; for a class, those that its bounds must reject."""
    if accuracy is not None:
        return list(_by_class(dtype, device, accuracy))
    return [*_forward(dtype, device), *_block_map(dtype, device), *_lse(dtype, device), *_merged(dtype, device)]


def _by_class(dtype: torch.dtype, device: torch.device, accuracy: Accuracy) -> Iterator[Control]:
    """1024 keys: short enough that even the widest class notices a lost block, which is 6 % of them."""
    q, k, v = _draw(dtype, device, BLOCK, 1024, 64)
    right, lse = reference_attention(q, k, v, None, None, AttentionRequest(head_dim=64))
    lost = reference_attention(q, k[:, :, BLOCK:], v[:, :, BLOCK:], None, None, AttentionRequest(head_dim=64))[0]
    shifted = reference_attention(q, k, v.roll(BLOCK, 2), None, None, AttentionRequest(head_dim=64))[0]
    wrong = {
        "zeros": torch.zeros_like(right),
        "one 64-key block dropped": lost,
        "values shifted by one block": shifted,
        "heads swapped": right.flip(1),
        "half of it": right / 2,
    }

    def control(name: str, result: Tensor, of: Tensor, fault: bool) -> Control:
        kept = compare_class("lse" if of is lse else "out", result, of, dtype, accuracy, "lse" if of is lse else "out")
        measured = Measure(0.0, float("inf"), kept[1] if kept[0] is None else max(kept[1], 1.0 + 1e-9), 1.0)
        return Control(f"its class: {name}", measured, fault, by_class=True)

    yield control("the right result", right.to(dtype), right, fault=False)
    yield from (control(name, result.to(dtype), right, fault=True) for name, result in wrong.items())
    yield control("LSE in log2", (lse / 0.6931471805599453).float(), lse, fault=True)


def _draw(dtype: torch.dtype, device: torch.device, s_q: int, s_k: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value [1, 2, S, D], rounded to `dtype`, in float64."""
    generator = torch.Generator().manual_seed(s_q * s_k)
    q, k, v = (torch.randn(1, 2, s, d, generator=generator).to(dtype).to(device).double() for s in (s_q, s_k, s_k))
    return q, k, v


class _Judge:
    """Measures results of one problem against its reference and plain solution, by heads-first (out, lse) pairs."""

    def __init__(self, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> None:
        self.dtype, self.request = dtype, AttentionRequest(head_dim=q.shape[-1])
        self.right = reference_attention(q, k, v, mask, None, self.request)
        self.plain = plain_attention(q.to(dtype), k.to(dtype), v.to(dtype), mask, None, self.request)

    def __call__(self, name: str, result: Tensor, fault: bool = True) -> Control:
        found = measure(result.to(self.dtype), self.right[0], self.plain[0], self.dtype)
        return Control(name, found, fault)


def _forward(dtype: torch.dtype, device: torch.device) -> Iterator[Control]:
    """4096 keys: long enough that a lost block is 1.6 % of them."""
    q, k, v = _draw(dtype, device, BLOCK, 4096, 128)
    judge = _Judge(dtype, q, k, v)
    yield judge("the right result", judge.right[0], fault=False)
    yield judge("zeros", torch.zeros_like(judge.right[0]))
    kept = torch.ones(1, 1, BLOCK, 4096, dtype=torch.bool, device=device)
    kept[..., 1024 : 1024 + BLOCK] = False
    yield judge("one 64-key block dropped", reference_attention(q, k, v, kept, None, judge.request)[0])
    off = dataclasses.replace(judge.request, scale=1.02 * 128**-0.5)
    yield judge("scale off by 2 %", reference_attention(q, k, v, None, None, off)[0])


def _block_map(dtype: torch.dtype, device: torch.device) -> Iterator[Control]:
    """Make a map in which each block of queries sees two blocks of keys; the fault reads the map one block further."""
    q, k, v = _draw(dtype, device, 8 * BLOCK, 8 * BLOCK, 64)
    block = torch.arange(8 * BLOCK, device=device) // BLOCK
    distance = (block[None, :] - block[:, None]) % 8
    judge = _Judge(dtype, q, k, v, (distance < 2)[None, None])
    shifted = ((distance - 1) % 8 < 2)[None, None]
    yield judge("map shifted by one block", reference_attention(q, k, v, shifted, None, judge.request)[0])


def _lse(dtype: torch.dtype, device: torch.device) -> Iterator[Control]:
    q, k, v = _draw(dtype, device, BLOCK, 256, 64)
    judge = _Judge(dtype, q, k, v)
    right, plain = judge.right[1], judge.plain[1]
    sink = torch.full_like(right, 2.0)
    faults = {"LSE in log2": right / 0.6931471805599453, "LSE with the sink in it": torch.logaddexp(right, sink)}
    single = torch.promote_types(dtype, torch.float32)
    yield Control("the right LSE", measure(right.to(single), right, plain, dtype, kind="lse"), fault=False)
    for name, lse in faults.items():
        yield Control(name, measure(lse.to(single), right, plain, dtype, kind="lse"))


def _merged(dtype: torch.dtype, device: torch.device) -> Iterator[Control]:
    """Keys in two halves, merged: with a detached LSE the output is right and the gradients of Q and K are not."""
    drawn = _draw(dtype, device, BLOCK, 2 * BLOCK, 64)
    request = AttentionRequest(head_dim=64)
    upstream = torch.randn(drawn[0].shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)

    def gradients(kind: torch.dtype, how: str) -> tuple[Tensor, ...]:
        q, k, v = (t.to(kind).detach().requires_grad_() for t in drawn)
        if how in ("reference", "plain"):
            method = reference_attention if how == "reference" else plain_attention
            out = method(q, k, v, None, None, request)[0]
        else:
            halves = (slice(0, BLOCK), slice(BLOCK, 2 * BLOCK))
            parts = [reference_attention(q, k[:, :, half], v[:, :, half], None, None, request) for half in halves]
            outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
            out = merge(outs, lses, layout="BHSD")[0] if how == "attached" else _merged_detached(outs, lses)
        return torch.autograd.grad(out, (q, k, v), upstream.to(out.dtype))

    right, plain = gradients(torch.float64, "reference"), gradients(dtype, "plain")
    for how, fault in (("attached", False), ("detached", True)):
        found = gradients(torch.float64, how)
        for i, name in enumerate(("query", "key")):
            said = measure(found[i].to(dtype), right[i], plain[i], dtype, kind="grad")
            yield Control(f"gradient of {name}, merged with {how} LSEs", said, fault)


def _merged_detached(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """Merge without gradients through the LSE, which `merge` refuses to do."""
    shares = torch.softmax(torch.stack(lses).detach(), 0)
    return (shares.unsqueeze(-1) * torch.stack(outs)).sum(0)
