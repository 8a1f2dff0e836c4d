"""flash-attn on ROCm: the kit over emulators of both builds, on an Instinct and on an RDNA chip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn.testing import Case
from polyattn.testing.emulators import Emulated
from polyattn_rocm import flash_attention

from .emulators import flash_attn as emulator

TARGETS = {
    "ck": Emulated("fa", "fa2/flash-attn", "rocm:gfx1201"),
    "triton": Emulated("fa", "fa2/flash-attn", "rocm:gfx942"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    full = metafunc.config.getoption("--polyattn-full")
    given: dict[str, Any] = {"per_row": 24} if full else {"per_row": 2, "dtypes": ("bfloat16",)}
    metafunc.parametrize(
        ("build", "case"),
        [
            pytest.param(build, case, id=f"{build}-{case.id}")
            for build, target in TARGETS.items()
            for case in target.cases(**given)
        ],
    )


def test_conformance(build: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    TARGETS[build].passes(case, emulator.library(build).install(monkeypatch))


@pytest.mark.parametrize("build", TARGETS)
def test_a_softcap_would_not_come_back(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the refusal of the rows is for."""
    library = emulator.library(build).install(monkeypatch)
    function = library.modules["flash_attn.flash_attn_interface"].flash_attn_func
    q = torch.randn(1, 4, 2, 64, dtype=torch.bfloat16) * 4
    if build == "triton":
        with pytest.raises(NotImplementedError, match="softcap is not supported"):
            function(q, q, q, softcap=1.0)
    else:
        assert torch.equal(function(q, q, q, softcap=1.0), function(q, q, q))


def test_the_lse_of_rows_without_keys_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for build, target in TARGETS.items():
        emulator.library(build).install(monkeypatch)
        fields: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_dim": 64, "causal": "bottom_right"}
        bound = target.bind(**fields, s_relation="more", lse=True)
        q, k = torch.zeros(1, 300, 2, 64).bfloat16(), torch.zeros(1, 2, 2, 64).bfloat16()
        out, lse = bound.forward(q, k, k)
        assert bool((lse[0, :298] == -torch.inf).all())
        # Equal weights of one key, and of two: their LSE is 0 and ln 2.
        assert torch.allclose(lse[0, 298:, 0], torch.tensor([0.0, 2.0]).where(torch.tensor([True, False]), 0.6931472))
        assert not bool(out[0, :298].any())


PLANTED = [
    ("ck", "causal=bottom_right", "_options", lambda right: lambda request: {**right(request), "causal": False}),
    ("triton", "window=", "_options", lambda right: lambda request: {**right(request), "window_size": (-1, -1)}),
    ("ck", "scale=", "_options", lambda right: lambda request: {**right(request), "softmax_scale": None}),
]


@pytest.mark.parametrize(("build", "words", "name", "wrong"), PLANTED)
def test_a_planted_error_is_found(
    build: str, words: str, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.library(build).install(monkeypatch)
    monkeypatch.setattr(flash_attention, name, wrong(getattr(flash_attention, name)))
    target = TARGETS[build]
    assert target.caught([c for c in target.cases(2, dtypes=("bfloat16",)) if words in c.id][:3])


def test_an_lse_of_zero_for_rows_without_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.library("triton").install(monkeypatch)
    blind = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(flash_attention._Kernels, "_empties", blind, raising=False)
    target = TARGETS["triton"]
    made = target.cases(2, families=("varlen",), dtypes=("bfloat16",))
    assert target.caught([c for c in made if "s_relation=more" in c.id and c.request.lse][:1])
