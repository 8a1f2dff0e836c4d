"""The records of polyattn-triton: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyattn import what_if
from polyattn.contract import AttentionRequest, DeviceReport
from polyattn.registry.evidence import read_evidence
from polyattn.testing import Asked, AttentionRecords
from polyattn_triton import plugin
from polyattn_triton.plugin import BACKENDS

PAGED, MLA = AttentionRecords.paged_decode, AttentionRecords.latent_decode
LINEAR = {"family": "linear", "method": "gdn", "phase": "verify", "s_relation": "fewer"}


class TestRecords(AttentionRecords):
    plugin = "polyattn_triton.plugin"
    names = (
        "triton",
        "dsa",
        "dual_chunk_flash_attn",
        "sage_sla_attn",
    )
    asked = (
        Asked("dense", "cpu", "triton", {"softcap": 30.0, "sinks": True, "window": (127, 0)}),
        Asked("a tree on pages", "cuda:sm80", "triton", {**PAGED, "spec_topk": 4}),
        Asked("a tree on latent pages", "cuda:sm80", "triton", {**MLA, "spec_topk": 4}),
        Asked("linear verification", "rocm:gfx942", "triton", LINEAR),
        Asked("none on NPUs", "npu", "triton", LINEAR, "phase='verify' is not one of"),
        Asked("dsa", "xpu", "dsa", {**MLA, "token_topk": 64}),
    )


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
