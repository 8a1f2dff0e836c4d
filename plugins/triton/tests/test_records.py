"""The records of polyattn-triton: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyattn import what_if
from polyattn.errors import PolyattnError
from polyattn.plugins import PluginManager
from polyattn.records import AttentionRequest, DeviceReport
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


def test_adapters_on_the_device(device: Callable[..., DeviceReport]) -> None:
    planned = sorted({b.name for b in BACKENDS if b.planned})
    found = device("cuda", "rocm", "xpu", "musa", "npu", what=f"the kernels of {', '.join(planned)}")
    built = sorted(b.id for b in BACKENDS if not b.planned)
    assert not built, f"built, and not checked here: {', '.join(built)}; run the conformance suite on them"
    pytest.skip(f"{found.detail} is here, but every adapter is planned, so nothing was run: {', '.join(planned)}")
