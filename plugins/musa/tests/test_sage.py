"""MATE's SageAttention: held to its accuracy class over an emulator, and what it is really called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn.errors import BackendUnavailableError
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn_musa import sage

from .emulators import sage as emulator

SAGE = Emulated("sage_attn", "mate", "musa:mp31")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


@pytest.mark.parametrize("case", SAGE.cases(per_row=8), ids=str)
def test_conformance(case: Case, library: Library) -> None:
    SAGE.passes(case, library)


def test_it_is_called_with_words_that_only_mate_knows(library: Library) -> None:
    q, k = torch.randn(1, 9, 4, 64).half(), torch.randn(1, 13, 2, 64).half()
    before = k.clone()
    SAGE.bind(dtype="float16", head_dim=64, heads=4, kv_heads=2, s_relation="fewer").forward(q, k, k)
    given = library.calls[-1].given
    assert (given["quant_recipe"], given["tensor_layout"]) == ((128, 16, -1, 1), "NHD")
    assert torch.equal(k, before), "keys are centred on a copy"


def test_the_package_for_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def sageattn_qk_int8_pv_fp8_cuda_sm90(q: Any, k: Any, v: Any, tensor_layout: str = "HND", **_: Any) -> None: ...

    library = Library("sageattention", "2.2.0", emulator.MODULE)
    library.add(emulator.MODULE, sageattn_qk_int8_pv_fp8_cuda_sm90=sageattn_qk_int8_pv_fp8_cuda_sm90)
    library.install(monkeypatch)
    with pytest.raises(BackendUnavailableError, match=r"takes no 'is_causal'.*wrappers/SageAttention of https"):
        SAGE.bind(head_dim=64)


PLANTED = {"layout": {"BSHD": "HND", "BHSD": "NHD"}}


def test_a_planted_error_is_found(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = SAGE.cases(per_row=8, dtypes=("bfloat16",))
    monkeypatch.setattr(sage, "_LAYOUT", PLANTED["layout"])
    assert next((found for case in cases for found in SAGE.caught([case])), "")
