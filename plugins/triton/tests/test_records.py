"""The records of polyattn-triton: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyattn import what_if
from polyattn.errors import PolyattnError
from polyattn.evidence import read_evidence
from polyattn.plugins import PluginManager
from polyattn.records import AttentionRequest, DeviceReport
from polyattn_triton import plugin
from polyattn_triton.plugin import BACKENDS

NAMES = {
    "triton",
    "dsa",
    "dual_chunk_flash_attn",
    "sliding_tile_attn",
    "video_sparse_attn",
    "vmoba_attn",
    "sla_attn",
    "sparse_video_gen_2_attn",
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
LINEAR = {"family": "linear", "method": "gdn", "phase": "verify", "s_relation": "fewer"}
CASES = [
    pytest.param("cpu", "triton", {"softcap": 30.0, "sinks": True, "window": (127, 0)}, "", id="dense"),
    pytest.param("cuda:sm80", "triton", {**PAGED, "spec_topk": 4}, "", id="a tree on pages"),
    pytest.param("cuda:sm80", "triton", {**MLA, "spec_topk": 4}, "", id="a tree on latent pages"),
    pytest.param("rocm:gfx942", "triton", LINEAR, "", id="linear verification"),
    pytest.param("npu", "triton", LINEAR, "phase='verify' is not one of", id="none on NPUs"),
    pytest.param("xpu", "dsa", {**MLA, "method": "dsa"}, "", id="dsa"),
]


def test_the_plugin_registers_every_name() -> None:
    manager = PluginManager(
        environ={"POLYATTN_PLUGINS": "triton", "POLYATTN_EXTRA_PLUGINS": "polyattn_triton.plugin"}
    ).load()
    report = manager.plugins["triton"]
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


def test_the_softmax_kernels_were_shown_to_work_on_cuda() -> None:
    """So selection may choose them there, and only there, by itself."""
    origin = plugin.__file__
    assert origin is not None
    shown = {b.platform: read_evidence(origin, b.name, b.platform) for b in BACKENDS if b.name == "triton"}
    found = shown.pop("cuda")
    assert (found.level, found.xfailed) == ("hardware", 0)
    assert found.passed > 1900
    assert all(family in found.note for family in ("dense", "varlen", "paged", "mla", "block_sparse"))
    assert {platform for platform, evidence in shown.items() if evidence.level == "hardware"} == set()


@pytest.mark.parametrize(
    ("changes", "also", "chosen"),
    [
        ({}, (), "torch_sdpa"),
        ({"softcap": 30.0, "sinks": True}, (), "triton"),
        ({"family": "varlen"}, (), "triton"),
        ({"family": "varlen"}, ("flash-attn",), "fa"),
        (PAGED, (), "triton"),
        (PAGED, ("flashinfer-python",), "flashinfer"),
        ({**PAGED, "dtype": "float32", "sinks": True, "window": (3, -1), "graph_capture": True}, (), "triton"),
        (MLA, (), "triton"),
        ({"family": "block_sparse", "block_map": True, "block_shape": (128, 128), "head_dim": 128}, (), "triton"),
    ],
    ids=lambda x: "",
)
def test_on_cuda_it_is_chosen_after_the_libraries(changes: dict[str, Any], also: tuple[str, ...], chosen: str) -> None:
    selection = what_if(AttentionRequest(**changes), platform="cuda:sm90", installed={"triton", *also})
    assert selection.backend == chosen


def test_adapters_on_the_device(device: Callable[..., DeviceReport]) -> None:
    planned = sorted({b.name for b in BACKENDS if b.planned})
    found = device("cuda", "rocm", "xpu", "musa", "npu", what=f"the kernels of {', '.join(planned)}")
    built = sorted(b.id for b in BACKENDS if not b.planned)
    assert not built, f"built, and not checked here: {', '.join(built)}; run the conformance suite on them"
    pytest.skip(f"{found.detail} is here, but every adapter is planned, so nothing was run: {', '.join(planned)}")
