"""The records of polyattn-cuda: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

import pytest

from polyattn import what_if
from polyattn.errors import PolyattnError
from polyattn.lowering import Planner
from polyattn.names import kind_of
from polyattn.platforms import parse_platform
from polyattn.plugins import PluginManager
from polyattn.records import Accepted, AttentionRequest, judge
from polyattn.testing import FAMILIES, generate
from polyattn.tuning import request_of, with_lengths
from polyattn_cuda.plugin import BACKENDS

NAMES = {
    "fa",
    "fa2",
    "fa3",
    "fa3_fp8",
    "fa4",
    "flashinfer",
    "flashinfer_mla",
    "flashinfer_cudnn",
    "trtllm_mha",
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
    "sage_sla_attn",
    "sparse_video_gen_2_attn",
    "cutedsl",
    "fla",
}
PAGED = {"family": "paged", "heads": 32, "kv_heads": 8, "page_size": 64, "phase": "decode", "s_relation": "one"}
MLA = {
    "family": "mla",
    "heads": 128,
    "head_dim": 576,
    "v_head_dim": 512,
    "scale": 192**-0.5,
    "page_size": 64,
    "phase": "decode",
    "s_relation": "one",
}
CASES = [
    pytest.param("cuda:sm80", "fa", {}, "", id="fa on Ampere"),
    pytest.param("cuda:sm75", "fa", {}, "arch='sm75' is not one of", id="fa before Ampere"),
    pytest.param("cuda:sm90", "fa", {"dtype": "float32"}, "dtype='float32' is not one of", id="fa in float32"),
    pytest.param("cuda:sm80", "fa2", PAGED, "page_size=64 is not >= 256", id="fa2 pages"),
    pytest.param("cuda:sm90@12.1", "fa3", PAGED, "toolkit=(12, 1) is not >= 12.3", id="fa3 toolkit"),
    pytest.param("cuda:sm90", "fa3", {**PAGED, "head_dim": 512}, "head_dim=512", id="fa3 head dim"),
    pytest.param("cuda:sm90", "hpc_ops", {**PAGED, "kv_heads": 32}, "group", id="hpc_ops group"),
    pytest.param("cuda:sm90", "flashmla", MLA, "", id="flashmla"),
    pytest.param("cuda:sm100", "cutlass_mla", {**MLA, "page_size": 64}, "page_size=64 is not 128", id="cutlass pages"),
    pytest.param("cuda:sm90", "dsa", MLA, "method", id="dsa wants its method"),
    pytest.param("cuda:sm120", "sage_attn_3", {"lse": True}, "lse=True is not declared", id="sage 3 LSE"),
]


def test_the_plugin_registers_every_name() -> None:
    manager = PluginManager(
        environ={"POLYATTN_PLUGINS": "cuda", "POLYATTN_EXTRA_PLUGINS": "polyattn_cuda.plugin"}
    ).load()
    report = manager.plugins["cuda"]
    assert report.state == "ready", report.traceback
    assert {b.partition("@")[0] for b in report.backends} == NAMES


def test_every_backend_says_what_it_needs_and_where_it_comes_from() -> None:
    lacking = [b.id for b in BACKENDS if not b.summary or not b.upstream]
    assert not lacking
    bare = [f"{b.id}: {p.name}" for b in BACKENDS for p in b.providers if not all(r.hint for r in p.requires)]
    assert not bare, "a requirement without the one thing to do when it is missing"


def test_approximate_methods_are_never_automatic() -> None:
    assert not [b.id for b in BACKENDS if b.lossy and (b.priority is not None or b.auto)]


@pytest.mark.parametrize(("platform", "name", "changes", "refusal"), CASES)
def test_limits(platform: str, name: str, changes: dict[str, Any], refusal: str) -> None:
    """Accepted where `refusal` is empty; otherwise refused with these words."""
    request = AttentionRequest(**changes)
    needs = {r.distribution for b in BACKENDS if b.name == name for p in b.providers for r in p.requires}
    if not refusal:
        assert what_if(request, platform=platform, installed=needs, backend=name).backend == name
        return
    try:
        selection = what_if(request, platform=platform, installed=needs, backend=name)
    except PolyattnError as error:
        said = str(error)
    else:
        said = "; ".join(selection.rejected[name])
    assert refusal in said


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
