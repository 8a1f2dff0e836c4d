"""Derivatives of drawn calls: transforms, second derivatives, inputs that change before the backward."""

from __future__ import annotations

import pytest
import torch

from polyattn.contract import AttentionRequest
from polyattn.semantics import autograd
from polyattn.testing import Case
from polyattn.testing.fuzz import Drawn, draw, exit_code, judge, script
from polyattn.testing.fuzz.deriving import CHANGED, WAYS
from polyattn.testing.fuzz.drawing import settled

CPU = torch.device("cpu")


def case(**request):
    asked = AttentionRequest(dtype="float64", head_dim=8, v_head_dim=8, heads=2, kv_heads=2, **request)
    return settled(Case(request=asked, lengths=((5, 5),)))


def test_every_way_is_drawn():
    assert {draw(7, n).way for n in range(1500)} == {"", CHANGED, *WAYS}


@pytest.mark.slow(keep=27)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("request_", [{}, {"sinks": True}, {"lse": True}, {"mask": "bool"}], ids=str)
@pytest.mark.parametrize("way", [*WAYS, CHANGED])
def test_what_is_right_agrees_or_is_refused(way, request_):
    for backend in (None, "reference", "torch_sdpa", "flex_attention"):
        verdict = judge(Drawn(case(**request_), way=way), backend, CPU)
        assert verdict.word in ("agreed", "refused"), (backend, verdict)


def test_a_second_derivative_of_zero_is_found(monkeypatch):
    def silent(*given):
        raise RuntimeError("derivative of nobody")

    monkeypatch.setattr(autograd, "refuse_second", silent)
    drawn = Drawn(case(lse=True), way="second")
    verdict = judge(drawn, None, CPU)
    assert verdict.word == "failed"
    assert verdict.failure.check == "call"


def test_a_mask_that_is_not_saved_is_found(monkeypatch):
    real = autograd._Attention.forward

    def forgetful(ctx, bound, axis, extra, *tensors):
        out = real(ctx, bound, axis, extra, *tensors)
        ctx.save_for_backward(*tensors[:3], *out, tensors[3])
        ctx.names, ctx.host = [], dict(extra)
        return out

    monkeypatch.setattr(autograd._Attention, "forward", staticmethod(forgetful))
    drawn = Drawn(case(mask="bool", lse=True), way=CHANGED)
    verdict = judge(drawn, None, CPU)
    assert verdict.failure is not None
    assert verdict.failure.check == f"derivative {CHANGED}"
    assert exit_code(script(drawn, verdict.failure, None, CPU, "a test")) == 1
    monkeypatch.undo()
    assert exit_code(script(drawn, verdict.failure, None, CPU, "a test")) == 0
