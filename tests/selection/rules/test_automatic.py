"""Automatic selection: one row per rule. What is installed is what the row names, and what PyTorch brings."""

from __future__ import annotations

from typing import Any

import pytest

from polyattn import what_if
from polyattn.contract import AttentionRequest

MHA: dict[str, Any] = {
    "family": "paged",
    "heads": 32,
    "kv_heads": 8,
    "phase": "extend",
    "s_relation": "fewer",
    "causal": "bottom_right",
    "page_size": 64,
    "save_kv_cache": True,
}
MLA: dict[str, Any] = {
    **MHA,
    "family": "mla",
    "save_kv_cache": None,
    "heads": 128,
    "kv_heads": 1,
    "head_dim": 576,
    "v_head_dim": 512,
    "scale": 192**-0.5,
}
WIDE_K = {"head_dim": 192, "v_head_dim": 128, "kv_heads": 32}
CHAIN = {"phase": "verify", "spec_topk": 1}
TREE = {"phase": "verify", "spec_topk": 4, "tree": True}
FA3, FA4, FLASHINFER = "flash-attn-3", "flash-attn-4", "flashinfer"

MHA_RULES = [
    ("hopper", "cuda:sm90@12.4", {}, (FA3, FLASHINFER), "fa3"),
    ("hopper, toolkit unknown", "cuda:sm90", {}, (FA3, FLASHINFER), "fa3"),
    ("hopper, CUDA 12.1", "cuda:sm90@12.1", {}, (FA3, FLASHINFER), "flashinfer"),
    ("hopper, FA3 from sgl-kernel", "cuda:sm90", {}, ("sgl-kernel", FLASHINFER), "fa3"),
    ("hopper, FA3 from vllm", "cuda:sm90", {}, ("vllm", FLASHINFER), "fa3"),
    ("hopper, topk 1", "cuda:sm90", CHAIN, (FA3, FLASHINFER), "fa3"),
    ("hopper, topk 4", "cuda:sm90", TREE, (FA3, FLASHINFER), "flashinfer"),
    ("hopper, topk 4, no flashinfer", "cuda:sm90", TREE, (FA3,), "triton"),
    ("hopper, no fa3", "cuda:sm90", {}, (FLASHINFER,), "flashinfer"),
    ("hopper, sinks", "cuda:sm90", {"sinks": True}, (FA3, FLASHINFER), "fa3"),
    ("blackwell", "cuda:sm100", {}, (FLASHINFER, FA4), "trtllm_mha"),
    ("blackwell ultra", "cuda:sm103", {}, (FLASHINFER, FA4), "trtllm_mha"),
    ("blackwell, topk 1", "cuda:sm100", CHAIN, (FLASHINFER, FA4), "trtllm_mha"),
    ("blackwell, topk 4", "cuda:sm100", TREE, (FLASHINFER, FA4), "flashinfer"),
    ("blackwell, K wider than V", "cuda:sm100", WIDE_K, (FLASHINFER, FA4), "fa4"),
    ("blackwell, K wider than V, no fa4", "cuda:sm100", WIDE_K, (FLASHINFER,), "flashinfer"),
    ("blackwell, sinks", "cuda:sm100", {"sinks": True}, (FLASHINFER, FA4), "trtllm_mha"),
    ("blackwell, page 1", "cuda:sm100", {"page_size": 1}, (FLASHINFER, FA4), "flashinfer"),
    ("ampere", "cuda:sm80", {}, (FLASHINFER,), "flashinfer"),
    ("ada", "cuda:sm89", {}, (FLASHINFER,), "flashinfer"),
    ("sm120", "cuda:sm120", {}, (FLASHINFER,), "flashinfer"),
    ("ampere, sinks", "cuda:sm80", {"sinks": True}, (FLASHINFER,), "triton"),
    ("ampere, nothing installed", "cuda:sm80", {}, (), "triton"),
    ("turing", "cuda:sm75", {}, (FLASHINFER,), "triton"),
    ("rocm", "rocm:gfx942", {}, ("amd-aiter",), "aiter"),
    ("rocm, MI200", "rocm:gfx90a", {}, ("amd-aiter",), "aiter"),
    ("rocm, MI350, page 64", "rocm:gfx950", {"page_size": 64}, ("amd-aiter",), "aiter"),
    ("rocm, RDNA 4, page 64", "rocm:gfx1201", {"page_size": 64}, ("amd-aiter",), "aiter"),
    ("rocm, RDNA 4, page 1", "rocm:gfx1201", {"page_size": 1}, ("amd-aiter",), "triton"),
    ("rocm, no aiter", "rocm:gfx942", {}, (), "triton"),
    ("musa, nothing installed", "musa", {}, (), "triton"),
    ("mps", "mps", {}, (), "torch_native"),
    ("npu", "npu", {"page_size": 128}, ("torch-npu",), "ascend"),
    ("xpu", "xpu", {}, ("sgl-kernel-xpu",), "intel_xpu"),
    ("xpu, vllm's kernels, page 16", "xpu:pvc", {"page_size": 16}, ("vllm-xpu-kernels",), "intel_xpu"),
    ("xpu, sgl-kernel is not for Ponte Vecchio", "xpu:pvc", {}, ("sgl-kernel-xpu",), "triton"),
    ("xpu, softcap, which its kernels ignore", "xpu", {"softcap": 30.0}, ("sgl-kernel-xpu",), "triton"),
    ("cpu with AMX", "cpu:amx", {}, ("sgl-kernel-cpu",), "intel_amx"),
    ("cpu with AMX, IPEX", "cpu:amx", {}, ("intel-extension-for-pytorch==2.8.0",), "torch_native"),
    ("cpu with AMX, no kernels", "cpu:amx", {}, (), "torch_native"),
    ("cpu without AMX", "cpu", {}, ("sgl-kernel-cpu",), "torch_native"),
]
MLA_RULES = [
    ("hopper", "cuda:sm90@12.8", {}, (FA3, FLASHINFER), "fa3"),
    ("hopper, CUDA 12.1", "cuda:sm90@12.1", {}, (FA3,), "triton"),
    ("hopper, no fa3", "cuda:sm90", {}, (FLASHINFER,), "triton"),
    ("blackwell", "cuda:sm100", {}, (FLASHINFER, FA3, FA4), "trtllm_mla"),
    ("blackwell, page 128", "cuda:sm100", {"page_size": 128}, (FLASHINFER,), "triton"),
    ("ampere", "cuda:sm80", {}, (FLASHINFER,), "triton"),
    ("rocm, 128 heads", "rocm:gfx942", {}, ("amd-aiter",), "aiter"),
    ("rocm, 16 heads", "rocm:gfx942", {"heads": 16}, ("amd-aiter",), "aiter"),
    ("rocm, 32 heads", "rocm:gfx942", {"heads": 32}, ("amd-aiter",), "triton"),
    ("rocm, MI350", "rocm:gfx950", {}, ("amd-aiter",), "aiter"),
    ("rocm, MI200", "rocm:gfx90a", {}, ("amd-aiter",), "triton"),
    ("rocm, RDNA 4", "rocm:gfx1201", {}, ("amd-aiter",), "triton"),
    ("npu", "npu", {"page_size": 128}, ("torch-npu",), "ascend"),
    ("xpu", "xpu", {}, ("sgl-kernel-xpu",), "intel_xpu"),
    ("cpu with AMX", "cpu:amx", {}, ("sgl-kernel-cpu",), "intel_amx"),
    ("cpu without AMX", "cpu", {}, ("sgl-kernel-cpu",), "torch_native"),
    ("mps", "mps", {}, (), "torch_native"),
]
DIFFUSION_RULES = [
    ("cuda, FA3", "cuda:sm90", {}, (FA3, "flash-attn"), "fa"),
    ("cuda, FA4 on blackwell", "cuda:sm100", {}, (FA4,), "fa"),
    ("cuda, FA2 on ampere", "cuda:sm80", {}, ("flash-attn",), "fa"),
    ("cuda, packed batch", "cuda:sm90", {"family": "varlen"}, (FA3,), "fa"),
    ("cuda, cross-attention", "cuda:sm90", {"cross": True, "s_relation": "more"}, (FA3,), "fa"),
    ("cuda, nothing installed", "cuda:sm90", {}, (), "torch_sdpa"),
    ("cuda, before SM80", "cuda:sm75", {}, ("flash-attn",), "torch_sdpa"),
    ("cuda, float32", "cuda:sm90", {"dtype": "float32"}, (FA3,), "torch_sdpa"),
    ("cuda, a mask", "cuda:sm90", {"mask": "bool"}, (FA3,), "torch_sdpa"),
    ("rocm", "rocm:gfx942", {}, ("amd-aiter",), "fa"),
    ("rocm, flash-attn", "rocm:gfx90a", {}, ("flash-attn",), "fa"),
    ("rocm, MI350", "rocm:gfx950", {}, ("amd-aiter",), "fa"),
    ("rocm, RDNA 4, flash-attn", "rocm:gfx1201", {}, ("flash-attn",), "fa"),
    ("rocm, RDNA 4, aiter alone", "rocm:gfx1201", {}, ("amd-aiter",), "torch_sdpa"),
    ("rocm, float32", "rocm:gfx942", {"dtype": "float32"}, ("amd-aiter",), "torch_sdpa"),
    ("rocm, softcap beside flash-attn", "rocm:gfx942", {"softcap": 30.0}, ("flash-attn",), "triton"),
    ("rocm, nothing installed", "rocm:gfx942", {}, (), "torch_sdpa"),
    ("xpu", "xpu", {}, ("sgl-kernel-xpu",), "fa"),
    ("xpu, vllm's kernels", "xpu", {}, ("vllm-xpu-kernels",), "fa"),
    *[(f"xpu, head dim {d}", "xpu", {"head_dim": d}, ("sgl-kernel-xpu",), "fa") for d in (64, 96, 192, 256)],
    ("xpu, head dim 80", "xpu", {"head_dim": 80}, ("sgl-kernel-xpu",), "torch_sdpa"),
    ("xpu, float32", "xpu", {"dtype": "float32"}, ("sgl-kernel-xpu",), "torch_sdpa"),
    ("xpu, nothing installed", "xpu", {}, (), "torch_sdpa"),
    ("xpu, sgl-kernel is not for Ponte Vecchio", "xpu:pvc", {}, ("sgl-kernel-xpu",), "torch_sdpa"),
    ("musa", "musa", {}, ("mate",), "fa"),
    ("musa, nothing installed", "musa", {}, (), "torch_sdpa"),
    ("mps", "mps", {}, (), "torch_sdpa"),
    ("npu", "npu", {}, ("torch-npu",), "torch_sdpa"),
    ("npu, ring", "npu", {"lse": True}, ("torch-npu",), "fa"),
    ("npu, packed ring", "npu", {"family": "varlen", "lse": True}, ("torch-npu",), "fa"),
    ("npu before the 910B", "npu:ascend310p", {}, ("torch-npu",), "torch_sdpa"),
    ("mps, whatever is installed", "mps", {"head_dim": 80}, ("flash-attn", "sageattention==2.2.0"), "torch_sdpa"),
    ("cpu", "cpu", {}, (), "torch_sdpa"),
    ("cpu, IPEX", "cpu:amx", {"family": "varlen"}, ("intel-extension-for-pytorch==2.8.0",), "torch_native"),
]
LINEAR_RULES = [
    # On CPUs Triton is interpreted, which is for tests.
    (f"{platform}, {method}", platform, {"family": "linear", "method": method}, ("triton-ascend",), who)
    for platform, who in (
        *((name, "triton") for name in ("cuda:sm90", "cuda:sm100", "rocm:gfx942", "xpu", "musa", "npu")),
        ("cpu", "torch_native"),
    )
    for method in ("gdn", "kda")
]


def rows(base: dict[str, Any], rules: list[tuple[str, str, dict[str, Any], tuple[str, ...], str]]) -> list[Any]:
    return [pytest.param({**base, **c}, p, i, b, id=f"{name} -> {b}") for name, p, c, i, b in rules]


def check(changes: dict[str, Any], platform: str, installed: tuple[str, ...], backend: str) -> None:
    selection = what_if(AttentionRequest(**changes), platform=platform, installed=installed)
    assert selection.backend == backend, str(selection)
    assert selection.source in ("platform rule", "priority")
    assert selection.why


@pytest.mark.parametrize(("changes", "platform", "installed", "backend"), rows(MHA, MHA_RULES))
def test_serving_mha(changes: dict[str, Any], platform: str, installed: tuple[str, ...], backend: str) -> None:
    check(changes, platform, installed, backend)


@pytest.mark.parametrize(("changes", "platform", "installed", "backend"), rows(MLA, MLA_RULES))
def test_serving_mla(changes: dict[str, Any], platform: str, installed: tuple[str, ...], backend: str) -> None:
    check(changes, platform, installed, backend)


@pytest.mark.parametrize(("changes", "platform", "installed", "backend"), rows({}, DIFFUSION_RULES))
def test_diffusion(changes: dict[str, Any], platform: str, installed: tuple[str, ...], backend: str) -> None:
    check(changes, platform, installed, backend)


@pytest.mark.parametrize(("changes", "platform", "installed", "backend"), rows({}, LINEAR_RULES))
def test_linear(changes: dict[str, Any], platform: str, installed: tuple[str, ...], backend: str) -> None:
    check(changes, platform, installed, backend)


def test_rules_win_over_priority() -> None:
    """flashinfer has the lower priority of the two, and no rule names fa2."""
    request = AttentionRequest(**{**MHA, "page_size": 256})
    selection = what_if(request, platform="cuda:sm80", installed=("flash-attn", FLASHINFER))
    assert (selection.backend, selection.source) == ("flashinfer", "platform rule")


METHODS = ("sage_attn", "sage_attn_3", "sparge_attn", "sliding_tile_attn", "video_sparse_attn", "sla_attn")


@pytest.mark.parametrize("backend", METHODS)
def test_approximate_methods_wait_to_be_asked_for(backend: str) -> None:
    everything = ("sageattention==2.2", "sageattn3", "spas-sage-attn", "fastvideo-kernel", "polyattn-triton")
    for changes in ({}, {"family": "block_sparse", "method": "sta"}, {"family": "block_sparse", "block_map": True}):
        request = AttentionRequest(**changes)
        try:
            chosen = what_if(request, platform="cuda:sm120", installed=everything).backend
        except NotImplementedError:
            continue
        assert chosen != backend


def test_musa_takes_sage_when_asked() -> None:
    selection = what_if(AttentionRequest(), platform="musa", installed=("mate", "sageattention"), backend="sage_attn")
    assert (selection.backend, selection.source) == ("sage_attn", "argument")
    assert any("approximate" in note for note in selection.notes)


def test_choices_of_today_are_not_planned() -> None:
    selection = what_if(AttentionRequest(**MHA), platform="cuda:sm90", installed=(FA3,))
    assert not selection.planned
    assert selection.evidence == "emulator"


@pytest.mark.parametrize(
    ("backend", "platform", "level"),
    [
        ("triton", "cuda:sm90", "hardware"),
        ("triton", "cuda:sm80", "interpreter"),
        ("triton", "rocm:gfx942", "declared"),
        ("trtllm_mha", "cuda:sm100", "emulator"),
        ("fa4", "cuda:sm100", "emulator"),
        ("torch_sdpa", "cuda:sm80", "vendor code"),
    ],
)
def test_what_ran_on_one_chip_shows_nothing_of_another(backend: str, platform: str, level: str) -> None:
    request = AttentionRequest(**{**MHA, "phase": "decode", "s_relation": "one", "causal": "none"})
    selection = what_if(request, platform=platform, installed=(FLASHINFER, FA4), backend=backend)
    assert (selection.backend, selection.evidence.removesuffix(", stale")) == (backend, level)


def test_what_if_says_where_a_machine_would_choose_otherwise():
    """It judges as if everybody had evidence; nobody chooses by itself what is only declared."""
    request = AttentionRequest(**{**MHA, "page_size": 8})
    selection = what_if(request, platform="rocm:gfx1100", installed=())
    assert (selection.backend, selection.evidence) == ("triton", "declared")
    (note,) = [note for note in selection.notes if note.startswith("declared: ")]
    assert "so torch_sdpa@rocm is chosen there until `polyattn conform triton` has passed" in note
    by_name = what_if(request, platform="rocm:gfx1100", installed=(), backend="triton")
    assert not [note for note in by_name.notes if note.startswith("declared: ")]
    proven = what_if(request, platform="cuda:sm90", installed=())
    assert not [note for note in proven.notes if note.startswith("declared: ")]
