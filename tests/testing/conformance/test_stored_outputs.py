"""Gradients of logits far from 0: what FlashAttention's algorithm makes of them passes, and what is wrong does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest
from polyattn.testing.cases import Case
from polyattn.testing.checks.notes import Notes
from polyattn.testing.checks.one_call import Result, against
from polyattn.testing.plain import in_float64, plainly
from polyattn.testing.problems import Problem, build


def flash(problem: Problem, delta_off: float = 0.0) -> Result:
    """Forward and backward as FlashAttention's: sums are exact, what is stored or multiplied is in the case's dtype,
    and delta, the row sums of dO * O, is taken from the stored output."""
    dtype, scale = problem.dtype, problem.request.softmax_scale
    inputs = (problem.tensors[name].detach() for name in ("query", "key", "value"))
    q, k, v, dout = (t.double().transpose(1, 2) for t in (*inputs, problem.dout))
    weights = torch.softmax(q @ k.mT * scale, -1)

    def stored(tensor: Tensor) -> Tensor:
        return tensor.to(dtype)

    out = stored(stored(weights).double() @ v)
    delta = (dout * out.double()).sum(-1, keepdim=True) * (1 + delta_off)
    dlogits = stored(weights * (dout @ v.mT - delta)).double()
    grads = {
        "query": stored(dlogits @ k * scale),
        "key": stored(dlogits.mT @ q * scale),
        "value": stored(stored(weights).double().mT @ dout),
    }
    return Result(out.transpose(1, 2), None, {name: grad.transpose(1, 2) for name, grad in grads.items()})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("logits", ["low", "high", "usual"])
@pytest.mark.parametrize("keys", [128, 320])
def test_what_every_flash_kernel_does_passes(dtype: str, logits: str, keys: int) -> None:
    """Keys on one side of 0 do not average away what is stored: the yardstick rounds dS as kernels do."""
    assert not found(dtype, logits, keys)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("logits", ["low", "high"])
def test_a_delta_that_is_off_by_a_twentieth_does_not(dtype: str, logits: str) -> None:
    assert any("grad query" in finding for finding in found(dtype, logits, 128, delta_off=0.05))


def found(dtype: str, logits: str, keys: int, delta_off: float = 0.0) -> list[str]:
    request = AttentionRequest(
        family="dense", dtype=dtype, head_dim=64, v_head_dim=24, heads=2, kv_heads=2, grad=("query", "key", "value")
    )
    problem = build(Case(request=request, lengths=((keys, keys),), logits=logits), torch.device("cpu"))
    notes = Notes(problem.case, problem.dtype, None)
    against(problem, flash(problem, delta_off), in_float64(problem), plainly(problem), notes)
    return [str(finding) for finding in notes.findings]
