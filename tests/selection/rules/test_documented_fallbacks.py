"""The documented fallbacks: taken when a backend was asked for by name, said aloud, and an error in strict mode; and
the rules by which a backend leaves calls to others, which are none of that."""

from __future__ import annotations

from typing import Any

import pytest

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.errors import BackendUnavailableError, PolyattnError, UnsupportedRequestError
from polyattn.registry.manager import get_manager

PAGED: dict[str, Any] = {"family": "paged", "page_size": 64, "phase": "decode", "s_relation": "one"}
CROSS: dict[str, Any] = {"cross": True, "s_relation": "more"}
SAGE2 = "sageattention==2.2.0"

# id, platform, asked for, request, installed, served by
TAKEN = [
    ("fa, nothing installed", "cuda:sm90", "fa", {}, (), "torch_sdpa"),
    ("fa, float32", "cuda:sm90", "fa", {"dtype": "float32"}, ("flash-attn-3",), "torch_sdpa"),
    ("fa, before SM80", "cuda:sm75", "fa", {}, ("flash-attn",), "torch_sdpa"),
    ("fa, head dim 512", "cuda:sm90", "fa", {"head_dim": 512}, ("flash-attn-3",), "torch_sdpa"),
    ("fa3 never becomes FA2", "cuda:sm90", "fa3", {}, ("flash-attn",), "torch_sdpa"),
    ("fa4 never becomes FA3", "cuda:sm90", "fa4", {}, ("flash-attn-3",), "torch_sdpa"),
    ("fa on rocm", "rocm:gfx942", "fa", {}, (), "torch_sdpa"),
    ("fa on xpu", "xpu", "fa", {"dtype": "float32"}, ("sgl-kernel-xpu",), "torch_sdpa"),
    ("fa on xpu, a mask", "xpu", "fa", {"mask": "bool"}, ("vllm-xpu-kernels",), "torch_sdpa"),
    ("fa on musa", "musa", "fa", {}, (), "torch_sdpa"),
    ("fa on npu", "npu", "fa", {}, (), "torch_sdpa"),
    ("sage_attn missing", "cuda:sm90", "sage_attn", {}, ("flash-attn-3",), "fa"),
    ("sage_attn, head dim 256", "cuda:sm90", "sage_attn", {"head_dim": 256}, (SAGE2, "flash-attn-3"), "fa"),
    ("sage_attn and fa missing", "cuda:sm90", "sage_attn", {}, (), "torch_sdpa"),
    ("sage_attn on musa", "musa", "sage_attn", {"head_dim": 256}, ("mate",), "fa"),
    ("intel_amx without AMX", "cpu", "intel_amx", PAGED, ("sgl-kernel-cpu",), "torch_native"),
    ("mps, fa", "mps", "fa", {}, (), "torch_sdpa"),
    ("mps, sage_attn", "mps", "sage_attn", {}, (), "torch_sdpa"),
    ("mps, torch_native", "mps", "torch_native", {}, (), "torch_sdpa"),
]
taken = pytest.mark.parametrize(
    ("platform", "name", "changes", "installed", "served"), [pytest.param(*case[1:], id=case[0]) for case in TAKEN]
)


@taken
def test_taken_and_said(
    platform: str, name: str, changes: dict[str, Any], installed: tuple[str, ...], served: str
) -> None:
    selection = what_if(AttentionRequest(**changes), platform=platform, installed=installed, backend=name)
    assert selection.backend == served
    assert selection.source.startswith("fallback from")
    assert any(f"replaced by {selection.backend}" in note or "replaced by" in note for note in selection.notes)
    assert selection.why


@taken
def test_an_error_in_strict_mode(
    platform: str, name: str, changes: dict[str, Any], installed: tuple[str, ...], served: str
) -> None:
    with pytest.raises(UnsupportedRequestError, match="documented fallback"):
        what_if(AttentionRequest(**changes), platform=platform, installed=installed, backend=name, strict=True)


def test_the_reference_is_itself_on_mps() -> None:
    """It is what others are compared with, and the only one there with a softcap: selection names it."""
    softcap = AttentionRequest(softcap=30.0)
    with pytest.raises(UnsupportedRequestError, match="By name these can: reference"):
        what_if(softcap, platform="mps")
    selection = what_if(softcap, platform="mps", backend="reference", strict=True)
    assert (selection.backend, selection.fallback) == ("reference", False)


# Divisions of labour: id, platform, asked for, installed, served by. A method that is here leaves such calls to others,
# so it is no failure, not even in strict mode; where FlashAttention is absent, whoever is chosen without a name serves.
RULED = [
    ("sliding_tile_attn", "cuda:sm90", "sliding_tile_attn", ("st-attn", "flash-attn-3"), "fa"),
    ("video_sparse_attn", "cuda:sm90", "video_sparse_attn", ("vsa", "flash-attn-3"), "fa"),
    ("vmoba_attn", "cuda:sm90", "vmoba_attn", ("polyattn-triton", "flash-attn-3"), "fa"),
    ("sla_attn", "cuda:sm90", "sla_attn", ("polyattn-triton", "flash-attn-3"), "fa"),
    ("sage_sla_attn", "cuda:sm90", "sage_sla_attn", ("spas-sage-attn", "flash-attn-3"), "fa"),
    ("sparse_video_gen_2_attn", "cuda:sm90", "sparse_video_gen_2_attn", ("flash-attn-3",), "fa"),
    ("no FlashAttention", "cuda:sm90", "sliding_tile_attn", ("st-attn",), "torch_sdpa"),
    ("sliding_tile_attn on rocm", "rocm:gfx942", "sliding_tile_attn", ("amd-aiter",), "fa"),
    ("sla_attn on cpu", "cpu", "sla_attn", ("triton",), "torch_sdpa"),
    ("sliding_tile_attn on cpu", "cpu", "sliding_tile_attn", (), "torch_sdpa"),
    ("video_sparse_attn on cpu", "cpu", "video_sparse_attn", (), "torch_sdpa"),
    ("video_sparse_attn on cuda", "cuda:sm90", "video_sparse_attn", ("flash-attn-3",), "fa"),
    ("window_video_attn on cpu", "cpu", "window_video_attn", (), "torch_sdpa"),
    ("window_video_attn on cuda", "cuda:sm90", "window_video_attn", ("flash-attn-3",), "fa"),
]
CASES = {
    "cross-attention": ({**CROSS, "place": True}, "never serve cross-attention"),
    "cross-attention without a place": (CROSS, "never serve cross-attention"),
    "no place": ({}, "this one has none"),
    "no place, other lengths": ({"s_relation": "fewer"}, "this one has none"),
    "no place, packed": ({"family": "varlen"}, "this one has none"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("platform", "name", "installed", "served"), [pytest.param(*case[1:], id=case[0]) for case in RULED]
)
@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
def test_a_rule_is_recorded_and_no_fallback(
    case: str, platform: str, name: str, installed: tuple[str, ...], served: str, strict: bool
) -> None:
    changes, why = CASES[case]
    request = AttentionRequest(**changes)
    selection = what_if(request, platform=platform, installed=installed, backend=name, strict=strict)
    if request.family == "varlen" and "flash-attn-3" not in installed:
        served = selection.backend  # that of packed calls here
    assert selection.backend == served != name
    assert (selection.fallback, selection.rule) == (False, name)
    assert selection.source == f"rule of {name}"
    assert why in selection.why
    assert f"leaves this call to {served}" in selection.notes[0]
    assert name in selection.rejected
    assert not selection.request.place
    assert selection.request.family == request.family


def test_a_method_serves_what_has_a_place() -> None:
    placed = AttentionRequest(place=True)
    selection = what_if(
        placed, platform="cuda:sm90", installed=("st-attn", "flash-attn-3"), backend="sliding_tile_attn"
    )
    assert (selection.backend, selection.rule, selection.request.place) == ("sliding_tile_attn", "", True)


def test_a_place_says_nothing_to_exact_attention() -> None:
    placed = AttentionRequest(place=True)
    for backend in (None, "fa", "torch_sdpa"):
        selection = what_if(placed, platform="cuda:sm90", installed=("flash-attn-3",), backend=backend)
        assert not selection.request.place
        assert selection.source != "rule of fa"


def test_a_method_that_is_not_here_leaves_nothing_to_others() -> None:
    for changes, _ in CASES.values():
        with pytest.raises(PolyattnError, match="sage_sla_attn, asked for by argument, "):
            what_if(AttentionRequest(**changes), platform="npu", backend="sage_sla_attn")


REFUSED = [
    ("fa3 in serving", "cuda:sm90", "fa3", PAGED, ("flash-attn",), BackendUnavailableError, "flash-attn-3"),
    ("fa3 is no name on rocm", "rocm:gfx942", "fa3", {}, ("amd-aiter",), BackendUnavailableError, "no backend on rocm"),
    ("fa3 is no name on npu", "npu", "fa3", {}, ("torch-npu",), BackendUnavailableError, "no backend on npu"),
    ("sage_attn_3", "cuda:sm90", "sage_attn_3", {}, ("sageattn3",), UnsupportedRequestError, "is not sm120"),
    ("aiter is no CUDA backend", "cuda:sm90", "aiter", {}, (), BackendUnavailableError, "known on rocm"),
    (
        *("sparse self-attention with a mask", "cuda:sm90", "vmoba_attn", {"place": True, "mask": "bool"}),
        *(("polyattn-triton",), UnsupportedRequestError, "mask='bool'"),
    ),
    (
        *("a map is no method's", "cuda:sm90", "vmoba_attn", {"family": "block_sparse", "block_map": True}),
        *(("polyattn-triton",), UnsupportedRequestError, "family='block_sparse' is not dense"),
    ),
    ("intel_amx without kernels", "cpu:amx", "intel_amx", PAGED, (), BackendUnavailableError, "sgl-kernel-cpu"),
    ("trtllm_mha", "cuda:sm80", "trtllm_mha", PAGED, ("flashinfer",), UnsupportedRequestError, "arch='sm80'"),
]


@pytest.mark.parametrize(
    ("platform", "name", "changes", "installed", "error", "words"), [pytest.param(*c[1:], id=c[0]) for c in REFUSED]
)
def test_no_other_replacement(
    platform: str, name: str, changes: dict[str, Any], installed: tuple[str, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        what_if(AttentionRequest(**changes), platform=platform, installed=installed, backend=name)


def test_the_list_of_fallbacks_is_complete() -> None:
    """A fallback that somebody adds has to be documented here first."""
    sparse = {
        "sliding_tile_attn",
        "video_sparse_attn",
        "vmoba_attn",
        "sla_attn",
        "sage_sla_attn",
        "sparse_video_gen_2_attn",
    }
    documented = {
        ("fa", "torch_sdpa"),
        ("sage_attn", "fa"),
        ("intel_amx", "torch_native"),
        ("flashinfer", "flashinfer_mla"),
    }
    ruled = {(name, "fa") for name in sparse} | {(name, "") for name in ("window_video_attn", *sparse)}
    found = [(b.name, f) for b in get_manager().backends.values() for f in b.fallbacks]
    assert {(name, f.to) for name, f in found if not f.rule and not f.first} == documented
    assert {(name, f.to) for name, f in found if f.first} == {("fa3", "fa3_fp8")}
    assert {(name, f.to) for name, f in found if f.rule} == ruled
    assert {p.name: p.fallback for p in get_manager().platforms.values() if p.fallback} == {"mps": "torch_sdpa"}
