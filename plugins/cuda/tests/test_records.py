"""The records of polyattn-cuda: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

import importlib.resources
import json

import pytest

from polyattn import what_if
from polyattn.contract import Accepted, AttentionRequest, judge
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.lowering import Planner
from polyattn.registry.platforms import parse_platform
from polyattn.selection.aliases import kind_of
from polyattn.testing import FAMILIES, Asked, AttentionRecords, generate
from polyattn.tuning import request_of, with_lengths
from polyattn_cuda.plugin import BACKENDS

PAGED, MLA = AttentionRecords.paged_decode, AttentionRecords.latent_decode


class TestRecords(AttentionRecords):
    plugin = "polyattn_cuda.plugin"
    names = (
        "fa",
        "fa4_block_sparse",
        "fa2",
        "fa3",
        "fa3_fp8",
        "fa4",
        "flashinfer",
        "flashinfer_block_sparse",
        "flashinfer_mla",
        "flashinfer_cudnn",
        "trtllm_mha",
        "tokenspeed_mla",
        "trtllm_mla",
        "cutedsl_mla",
        "cutlass_mla",
        "flashmla",
        "hpc_ops",
        "dsa",
        "dual_chunk_flash_attn",
        "sage_attn",
        "sage_attn_3",
        "sparge_attn",
        "cudnn",
        "sliding_tile_attn",
        "video_sparse_attn",
        "vmoba_attn",
        "sla_attn",
        "fastvideo",
        "sage_sla_attn",
        "sparse_video_gen_2_attn",
        "cutedsl",
        "fla",
    )
    asked = (
        Asked("fa on Ampere", "cuda:sm80", "fa", {}),
        Asked("fa before Ampere", "cuda:sm75", "fa", {}, "arch='sm75' is not one of"),
        Asked("fa in float32", "cuda:sm90", "fa", {"dtype": "float32"}, "dtype='float32' is not one of"),
        Asked("fa2 pages", "cuda:sm80", "fa2", PAGED, "page_size=64 is not >= 256"),
        Asked("fa3 toolkit", "cuda:sm90@12.1", "fa3", PAGED, "toolkit=(12, 1) is not >= 12.3"),
        Asked("fa3 head dim", "cuda:sm90", "fa3", {**PAGED, "head_dim": 512}, "head_dim=512"),
        Asked("hpc_ops group", "cuda:sm90", "hpc_ops", {**PAGED, "kv_heads": 32}, "group"),
        Asked("flashmla", "cuda:sm90", "flashmla", MLA),
        Asked("cutlass pages", "cuda:sm100", "cutlass_mla", {**MLA, "page_size": 64}, "page_size=64 is not 128"),
        Asked("dsa wants lists", "cuda:sm90", "dsa", MLA, "token_topk"),
        Asked(
            "fa4, 256 wide on Blackwell, the same bits in any batch",
            "cuda:sm100",
            "fa4",
            {**PAGED, "head_dim": 256, "page_size": 128, "batch_invariant": True},
            "head_dim=256 is not 16 to 128",
        ),
        Asked("sage 3 LSE", "cuda:sm120", "sage_attn_3", {"lse": True}, "lse=True is not declared"),
    )


@pytest.mark.parametrize("chip", ["cuda:sm90@12.8", "cuda:sm100@13.0"])
def test_a_rewrite_that_a_row_names_leads_to_what_its_provider_takes(chip: str) -> None:
    """Of each provider alone, as where the others are not installed; the kit takes what a row names as declared."""
    facts = parse_platform(chip)._asdict()
    lost = []
    for info in BACKENDS:
        for provider in (provider for provider in info.providers if not provider.planned):
            rows = [row for row in provider.rows if row.lowered]
            made = generate(rows, facts, families=tuple(FAMILIES), dtypes=("bfloat16",), per_row=6)
            for request in dict.fromkeys(case.request.normalised() for case in made):
                verdict = judge(provider.rows, request)
                if not isinstance(verdict, Accepted) or not verdict.lowerings:
                    continue
                planner = Planner(provider.rows, only=verdict.lowerings, helper=lambda request: "some other backend")
                if planner.plan(request) is None:
                    lost.append(f"{info.name}, {provider.name}, {verdict.lowerings}: {request.summary()}")
    assert not lost


def test_aliases_tell_kernels_apart_and_packages_do_not():
    named = {info.name: info for info in BACKENDS}
    kinds = {provider.name: kind_of(named["fa"], provider.name) for provider in named["fa"].providers}
    assert set(kinds.values()) == {"fa2", "fa3", "fa4"}
    assert all(name.startswith(kind) for name, kind in kinds.items())
    assert {kind_of(named["fa3"], provider.name) for provider in named["fa3"].providers} == {""}


TABLE = json.loads(
    importlib.resources.files("polyattn_cuda").joinpath("measurements/nvidia-h200.json").read_text(encoding="utf-8")
)["measurements"]


def test_the_shipped_table_says_whose_kernels_it_measured():
    """Those that the libraries of a row lead to."""
    fa = next(info for info in BACKENDS if info.name == "fa")
    found = []
    for one in (one for one in TABLE if "fa" in one["value"]["times"]):
        request = request_of(one["key"]["request"])
        installed = [f"{name}=={one['versions'][name]}" for name in ("vllm", "flash-attn-4") if name in one["versions"]]
        served = what_if(request, platform="cuda:sm90", installed=installed, backend="fa")
        found.append(kind_of(fa, served.provider))
        assert one["value"]["by"] == {"fa": found[-1]}, one["key"]
    assert {*found} == {"fa3", "fa4"}
    assert all(one["value"].get("by", {}) in ({}, {"fa": "fa3"}, {"fa": "fa4"}) for one in TABLE)


@pytest.mark.parametrize(
    "installed, chosen", [("flash-attn-3", "fa, "), ("vllm", "fa, "), ("flash-attn==2.8.3", "triton, ")]
)
def test_what_was_measured_with_fa3_says_nothing_of_fa2(installed, chosen):
    request = AttentionRequest(
        dtype="bfloat16", head_dim=128, v_head_dim=128, heads=32, kv_heads=8, causal="bottom_right"
    )
    long = with_lengths(request, 1, 16384, 16384)
    found = what_if(long, platform="cuda:sm90", installed=[installed])
    assert found.backend == "fa", "by rule"
    (note,) = [note for note in found.notes if note.startswith("on NVIDIA H200: ")]
    assert note.startswith(f"on NVIDIA H200: {chosen}")
    assert " with fa3" in note, "it, or what it is beside"


@pytest.mark.parametrize(
    ("name", "able", "other", "page"),
    [
        ("trtllm_mla", "flashinfer-python==0.7.1", "flashinfer-python==0.7.0", 64),
        ("cutlass_mla", "sglang-kernel==0.4.6", "sglang-kernel==0.4.7", 128),
    ],
)
def test_a_version_that_lacks_what_is_called_is_refused_before_it_is_chosen(
    name: str, able: str, other: str, page: int
) -> None:
    latent = {"family": "mla", "heads": 128, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "page_size": page}
    request = AttentionRequest(**latent, phase="decode", s_relation="one")
    assert what_if(request, platform="cuda:sm100", installed=[able], backend=name).backend == name
    with pytest.raises(BackendUnavailableError, match=r"is installed, .* is needed"):
        what_if(request, platform="cuda:sm100", installed=[other], backend=name)
    assert what_if(request, platform="cuda:sm100", installed=[other, "polyattn-triton"]).backend != name


def test_flashinfer_named_for_a_latent_cache_is_its_latent_kernels() -> None:
    """SGLang's one name starts DeepSeek's models too."""
    machine = {"platform": "cuda:sm90", "installed": ["flashinfer-python"], "backend": "flashinfer"}
    found = what_if(AttentionRequest(**MLA), **machine)
    assert (found.backend, found.source) == ("flashinfer_mla", "fallback from flashinfer")
    with pytest.raises(UnsupportedRequestError, match="ask for flashinfer_mla"):
        what_if(AttentionRequest(**MLA), **machine, strict=True)


def test_a_pair_of_latent_backends_is_judged_by_causal_prompts() -> None:
    """A decoding step needs no mask; the prompts before it do."""
    machine = {"platform": "cuda:sm100", "installed": ["flashinfer-python"]}
    decode = AttentionRequest(**{**MLA, "page_size": 64, "causal": "none"})
    found = what_if(decode, **machine, prefill_backend="trtllm_mla", decode_backend="cutedsl_mla")
    assert found.backend == "cutedsl_mla"
