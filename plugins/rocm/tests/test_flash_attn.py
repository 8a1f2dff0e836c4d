"""flash-attn on ROCm: the kit over emulators of its three sets of kernels, on Instinct and RDNA chips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn.errors import BackendUnavailableError
from polyattn.registry.distributions import availability, distribution_version
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated
from polyattn_rocm import flash_attention

from .emulators import flash_attn as emulator

CK, TRITON = "fa2/flash-attn", "fa2/flash-attn-triton"
TARGETS = {
    "ck": Emulated("fa", CK, "rocm:gfx1201"),
    "released": Emulated("fa", TRITON, "rocm:gfx942"),
    "aiter": Emulated("fa", TRITON, "rocm:gfx942"),
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


@pytest.mark.slow(keep=72)
def test_conformance(build: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    TARGETS[build].passes(case, emulator.library(build).install(monkeypatch))


def test_what_the_rows_refuse_would_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the refusal of softcaps and windows is for."""
    q, k = torch.randn(2, 1, 9, 2, 64, dtype=torch.bfloat16)
    dropped = []
    for build in TARGETS:
        library = emulator.library(build).install(monkeypatch)
        function = library.modules["flash_attn.flash_attn_interface"].flash_attn_func
        plain = function(q, k, k)
        if torch.equal(function(q, k, k, window_size=(2, 0)), plain):
            dropped.append((build, "window"))
        if build == "aiter":
            with pytest.raises(NotImplementedError, match="softcap is not supported"):
                function(q, k, k, softcap=1.0)
        elif torch.equal(function(q, k, k, softcap=1.0), plain):
            dropped.append((build, "softcap"))
    assert dropped == [("ck", "softcap"), ("released", "window"), ("released", "softcap")]


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


def test_a_build_for_composable_kernel_that_runs_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.library("released").install(monkeypatch)
    with pytest.raises(
        BackendUnavailableError, match="which drops windows, softcaps and more: unset FLASH_ATTENTION_TR"
    ):
        TARGETS["ck"].bind(head_dim=64)


@pytest.mark.parametrize("extension", [True, False])
def test_the_build_is_told_by_its_files(extension: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    for name in ("flash_attn/__init__.py", "flash_attn/flash_attn_interface.py"):
        (tmp_path / name).touch()
    if extension:
        (tmp_path / "flash_attn_2_cuda.py").touch()
    (tmp_path / "flash_attn-2.8.3.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n"
    (tmp_path / "flash_attn-2.8.3.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    distribution_version.cache_clear()
    try:
        found = {name: availability(TARGETS[build].provider) for name, build in ((CK, "ck"), (TRITON, "released"))}
    finally:
        distribution_version.cache_clear()
    assert (found[CK].ok, found[TRITON].ok) == (extension, True)
    assert extension or found[CK].reason == "the installed flash-attn 2.8.3 is flash-attn without flash_attn_2_cuda"


# id, build, words of the cases, what is replaced, by what of what it was
PLANTED: list[tuple[str, str, str, str, Any]] = [
    ("causal dropped", "ck", "causal=bottom_right", "_options", lambda right: lambda r: {**right(r), "causal": False}),
    ("window dropped", "ck", "window=", "_options", lambda right: lambda r: {**right(r), "window_size": (-1, -1)}),
    ("scale dropped", "ck", "scale=", "_options", lambda right: lambda r: {**right(r), "softmax_scale": None}),
    ("scale dropped", "aiter", "scale=", "_options", lambda right: lambda r: {**right(r), "softmax_scale": None}),
    ("taken for AITER's", "released", "varlen", "_RELEASED_TRITON", lambda right: "AITER's"),
    ("strided gradients", "released", "gapped", "_RELEASED_TRITON", lambda right: "AITER's"),
]


@pytest.mark.parametrize(
    ("build", "words", "name", "wrong"), [pytest.param(*p[1:], id=f"{p[1]}-{p[0]}") for p in PLANTED]
)
def test_a_planted_error_is_found(
    build: str, words: str, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.library(build).install(monkeypatch)
    monkeypatch.setattr(flash_attention, name, wrong(getattr(flash_attention, name)))
    target = TARGETS[build]
    assert target.caught([c for c in target.cases(8, dtypes=("bfloat16",)) if words in c.id][:6])


def test_a_planted_lse_of_zero_for_rows_without_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.library("released").install(monkeypatch)
    blind = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(flash_attention._Kernels, "_empties", blind, raising=False)
    target = TARGETS["released"]
    made = target.cases(12, families=("dense",), dtypes=("bfloat16",))
    assert target.caught([c for c in made if "s_relation=more" in c.id and c.request.lse][:4])
