"""Core's torch_sdpa on NPUs, where torch's SDPA is npu_fusion_attention: the kit over an emulator of torch_npu's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyattn.backends import torch_sdpa
from polyattn.testing import Case, OffChip, generate, run_case

from .emulators import sdpa, torch_npu

TARGET = OffChip("torch_sdpa", "npu")


def cases() -> list[Case]:
    found = generate(TARGET.rows, TARGET.facts, families=("dense",), dtypes=("float32", "bfloat16"), per_row=10)
    found += generate(TARGET.rows, TARGET.facts, families=("paged", "mla"), dtypes=("bfloat16",), per_row=1)
    return [c for c in found if c.check != "capture" and not c.request.large and not c.request.transform]


CASES = cases()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sdpa, "_sdpa", sdpa.scaled_dot_product_attention(torch_npu.library()))


@pytest.mark.slow(keep=65)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("fused")
def test_conformance(case: Case) -> None:
    outcome = run_case(TARGET, case)
    assert outcome.verdict == "passed", str(outcome)


PLANTED: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "no elements go to the fused operator": ("zero_size", "_beyond", lambda right: lambda request: False),
    "causal from the upper left": ("causal=bottom_right", "position_kind", lambda right: lambda request: "flag"),
}


@pytest.mark.parametrize("error", PLANTED)
@pytest.mark.usefixtures("fused")
def test_a_planted_error_is_found(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, name, wrong = PLANTED[error]
    telling = [c for c in CASES if words in c.id and (c.request.s_relation != "equal" or "upper" not in error)]
    assert telling
    monkeypatch.setattr(torch_sdpa, name, wrong(getattr(torch_sdpa, name)))
    assert any(run_case(TARGET, case).verdict != "passed" for case in telling[:12])
