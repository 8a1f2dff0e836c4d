"""FlexAttention compiled, as on an accelerator: one program per request. Forward only, which is what torch compiles on
a CPU, without an LSE and without sinks (its CPU template has none)."""

from __future__ import annotations

import pytest

from polyattn.contract import AttentionRequest
from polyattn.testing import Case, OffChip, run_case

# Torch imports modules of its own when it first compiles that warn of their age.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

COMPILED = OffChip("flex_attention", "cpu", (("compile", "always"),))
DENSE = AttentionRequest(dtype="float32", head_dim=64, v_head_dim=64, heads=8, kv_heads=2)
SIGNATURES = {
    "plain": {},
    "causal with more keys": {"causal": "bottom_right", "s_relation": "fewer"},
    "window and softcap": {"causal": "bottom_right", "window": (17, -1), "softcap": 2.0},
    "bool mask": {"mask": "bool"},
    "additive mask": {"mask": "additive", "dtype": "bfloat16"},
    "paged": {"family": "paged", "causal": "bottom_right", "layout": "THD", "s_relation": "fewer", "page_size": 16},
    "packed": {"family": "varlen", "causal": "bottom_right", "layout": "THD", "s_relation": "more"},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    import torch

    compiled = []
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kw: compiled.append(args) or whole(*args, **kw))
    request = dataclasses.replace(DENSE, **SIGNATURES[name])
    lengths = ((63, 100), (1, 7), (0, 5)) if request.family == "varlen" else ((63, 100),) * 2
    if request.family == "paged":
        lengths = ((33, 100), (1, 7), (1, 0))
    if request.s_relation == "equal":
        lengths = ((100, 100),) * 2
    outcome = run_case(COMPILED, Case(request=request, lengths=lengths, closed_rows="mask" in name))
    assert outcome.verdict == "passed", str(outcome)
    assert compiled, "nothing was compiled: this is not what the test is about"
