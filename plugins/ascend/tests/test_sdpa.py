"""Core's torch_sdpa on NPUs, where torch's SDPA is npu_fusion_attention: the kit over an emulator of torch_npu's."""

from __future__ import annotations

import pytest

from polyattn.testing import Case, OffChip, generate, run_case

from .emulators import sdpa, torch_npu

TARGET = OffChip("torch_sdpa", "npu")


def cases() -> list[Case]:
    found = generate(TARGET.rows, TARGET.facts, families=("dense",), dtypes=("float32", "bfloat16"), per_row=10)
    found += generate(TARGET.rows, TARGET.facts, families=("paged", "mla"), dtypes=("bfloat16",), per_row=1)
    return [c for c in found if c.check != "capture" and not c.request.large and not c.request.transform]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_conformance(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    instead = sdpa.scaled_dot_product_attention(torch_npu.library())
    monkeypatch.setattr("polyattn.backends.torch_sdpa._sdpa", instead)
    outcome = run_case(TARGET, case)
    assert outcome.verdict == "passed", str(outcome)
