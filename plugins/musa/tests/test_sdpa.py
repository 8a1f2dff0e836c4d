"""Core's torch_sdpa on MUSA devices, where torch's SDPA is muDNN's: the kit over an emulator of torch_musa's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.backends import torch_sdpa
from polyattn.contract import AttentionRequest
from polyattn.errors import PolyattnError
from polyattn.testing import Case, OffChip, generate, run_case

from .emulators import sdpa

TARGET = OffChip("torch_sdpa", "musa")


def cases() -> list[Case]:
    found = generate(TARGET.rows, TARGET.facts, families=("dense",), dtypes=("float32", "bfloat16"), per_row=8)
    found += generate(TARGET.rows, TARGET.facts, families=("paged", "mla"), dtypes=("bfloat16",), per_row=1)
    return [c for c in found if c.check != "capture" and not c.request.large and not c.request.transform]


CASES = cases()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(torch_sdpa, "_sdpa", sdpa.scaled_dot_product_attention(made))
    return made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case: Case, calls: list[str]) -> None:
    outcome = run_case(TARGET, case)
    assert outcome.verdict == "passed", str(outcome)


def test_both_kernels_were_met(calls: list[str]) -> None:
    for dtype in ("bfloat16", "float32"):
        assert run_case(TARGET, next(c for c in CASES if c.request.dtype == dtype and not c.request.grad))
    assert set(calls) == {"flash", "math"}


def bound(**fields: Any) -> Callable[..., Tensor]:
    request = AttentionRequest(platform="musa", heads=4, kv_heads=4, head_dim=64, **fields).normalised()
    forward: Callable[..., Tensor] = torch_sdpa.TorchSDPA().bind(request).forward
    return forward


def test_a_scale_that_an_older_musa_does_not_know_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sdpa, "_sdpa", sdpa.scaled_dot_product_attention([], (4, 1)))
    q = torch.randn(2, 5, 4, 64)
    bound(dtype="float32")(q, q, q)
    with pytest.raises(RuntimeError, match="Not support explicit `scale` parameter"):
        bound(dtype="float32", scale=0.3)(q, q, q)


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 512, "mask": "bool", "grad": ("query", "mask")}, ""),
    ({"dtype": "float32", "causal": "bottom_right", "window": (8, 8), "s_relation": "more"}, ""),
    ({"lse": True}, "lse=True is not declared"),
    ({"softcap": 30.0}, "softcap=30.0 is not declared"),
    ({"deterministic": True, "grad": ("query",)}, "deterministic=True is not declared"),
    ({"dtype": "float64"}, "dtype='float64' is not one of"),
]


@pytest.mark.parametrize(("changes", "refusal"), LIMITS)
def test_limits(changes: dict[str, Any], refusal: str) -> None:
    request = AttentionRequest(**changes)
    if not refusal:
        assert what_if(request, platform="musa:mp31", backend="torch_sdpa").lowerings == ()
        return
    with pytest.raises(PolyattnError) as refused:
        what_if(request, platform="musa:mp31", backend="torch_sdpa")
    assert refusal in str(refused.value)


PLANTED: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "rows without keys are left as they are": (
        "s_relation=more",
        "open_empty_rows",
        lambda right: lambda mask: (mask, None),
    ),
    "causal from the upper left": ("causal=bottom_right", "position_kind", lambda right: lambda request: "flag"),
    "the mask inverted": ("mask=bool", "combined_mask", lambda right: lambda *given: ~right(*given)),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words, name, wrong = PLANTED[error]
    telling = [c for c in CASES if words in c.id and (c.request.s_relation != "equal" or "upper" not in error)]
    assert telling
    monkeypatch.setattr(torch_sdpa, name, wrong(getattr(torch_sdpa, name)))
    assert any(run_case(TARGET, case).verdict != "passed" for case in telling[:12])
