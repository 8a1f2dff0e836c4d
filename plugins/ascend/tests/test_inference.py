"""`ascend`: the kit over an emulator of npu_fused_infer_attention_score_v2, and what it is really given."""

from __future__ import annotations

import pytest

from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library

from .emulators import torch_npu

TARGET = Emulated("ascend", "torch-npu", "npu:ascend910b@8.5")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return torch_npu.library().install(monkeypatch)


@pytest.mark.parametrize("case", TARGET.cases(per_row=3), ids=str)
def test_conformance(case: Case, library: Library) -> None:
    TARGET.passes(case, library)
