"""Page sizes: emulated where a kernel reads one token per entry, refused with the sizes where they are fixed."""

from __future__ import annotations

from typing import Any

import pytest

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.errors import UnsupportedRequestError

MHA: dict[str, Any] = {"family": "paged", "heads": 32, "kv_heads": 8, "phase": "decode", "s_relation": "one"}
MLA: dict[str, Any] = {**MHA, "family": "mla", "heads": 128, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
ALL = ("flash-attn-3", "flash-attn-4", "flash-attn", "flashinfer", "sgl-kernel", "sgl-flash-mla", "hpc-ops")
TOKENS = "page_table_to_tokens"

# backend, platform, base, pages its kernel takes
FIXED = [
    ("trtllm_mha", "cuda:sm100", MHA, (16, 32, 64)),
    ("trtllm_mla", "cuda:sm100", MLA, (32, 64)),
    ("cutedsl_mla", "cuda:sm100", MLA, (32, 64)),
    ("tokenspeed_mla", "cuda:sm100", {**MLA, "kv_dtype": "fp8_e4m3"}, (32, 64)),
    ("cutlass_mla", "cuda:sm100", MLA, (128,)),
    ("flashmla", "cuda:sm90", MLA, (64,)),
    ("hpc_ops", "cuda:sm90", MHA, (64,)),
    ("fa4", "cuda:sm90", MHA, (128,)),
    ("ascend", "npu", MHA, (128,)),
    ("ascend", "npu", MLA, (128,)),
    ("intel_xpu", "xpu", MHA, (64, 128)),
]
NATIVE = [
    ("fa3", "cuda:sm90", MHA),
    ("fa3", "cuda:sm90", MLA),
    ("fa4", "cuda:sm100", MHA),
    ("flashinfer", "cuda:sm90", MHA),
    ("flashinfer_mla", "cuda:sm90", MLA),
    ("triton", "cuda:sm90", MHA),
    ("triton", "rocm:gfx942", MHA),
    ("triton", "cuda:sm90", MLA),
    ("aiter", "rocm:gfx942", MHA),
    ("aiter", "rocm:gfx942", MLA),
    ("wave", "rocm:gfx942", MHA),
    ("fa3", "musa", MHA),
    ("torch_native", "cpu", MHA),
]
EMULATED = [
    ("fa4", "cuda:sm100", MLA),
    ("intel_amx", "cpu:amx", MHA),
    ("intel_amx", "cpu:amx", MLA),
]
INSTALLED = (*ALL, "amd-aiter", "wave-lang", "sglang", "mate", "torch-npu", "sgl-kernel-xpu", "sgl-kernel-cpu")


def case(name: str, platform: str, base: dict[str, Any], *rest: Any) -> Any:
    return pytest.param(name, platform, base, *rest, id=f"{name}@{platform} {base['family']}")


def lowerings(name: str, platform: str, base: dict[str, Any], page: int) -> tuple[str, ...]:
    request = AttentionRequest(**base, page_size=page)
    selection = what_if(request, platform=platform, installed=INSTALLED, backend=name)
    assert selection.source == "argument"
    return selection.lowerings


@pytest.mark.parametrize(("name", "platform", "base", "sizes"), [case(*c) for c in FIXED])
def test_fixed_sizes(name: str, platform: str, base: dict[str, Any], sizes: tuple[int, ...]) -> None:
    for page in sizes:
        assert TOKENS not in lowerings(name, platform, base, page)
    for page in (1, 16, 32, 48, 64, 128, 256):
        if any(page % size == 0 for size in sizes):
            # Its own, or cut into its own by views.
            continue
        with pytest.raises(UnsupportedRequestError) as refusal:
            lowerings(name, platform, base, page)
        allowed = f"one of {', '.join(map(str, sizes))}" if len(sizes) > 1 else str(sizes[0])
        assert f"page_size={page} is not {allowed}" in str(refusal.value)


@pytest.mark.parametrize(("name", "platform", "base"), [case(*c) for c in NATIVE])
def test_sizes_in_the_kernel(name: str, platform: str, base: dict[str, Any]) -> None:
    for page in (1, 16, 64, 128):
        assert lowerings(name, platform, base, page) == ()


@pytest.mark.parametrize(("name", "platform", "base"), [case(*c) for c in EMULATED])
def test_emulated_sizes(name: str, platform: str, base: dict[str, Any]) -> None:
    assert lowerings(name, platform, base, 1) == ()
    for page in (16, 64, 100, 128):
        assert lowerings(name, platform, base, page) == (TOKENS,)


def test_fa2_takes_multiples_of_256() -> None:
    assert lowerings("fa2", "cuda:sm80", MHA, 512) == ()
    with pytest.raises(UnsupportedRequestError, match="page_size=128 is not >= 256, a multiple of 256"):
        lowerings("fa2", "cuda:sm80", MHA, 128)


def test_a_request_without_pages_is_not_served_from_a_cache() -> None:
    with pytest.raises(UnsupportedRequestError, match="page_size=0 is not >= 1"):
        lowerings("fa3", "cuda:sm90", MHA, 0)
