"""The records of polyattn-ascend: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

from typing import Any

import pytest

from polyattn import what_if
from polyattn.errors import PolyattnError
from polyattn.plugins import PluginManager
from polyattn.records import AttentionRequest
from polyattn_ascend.plugin import BACKENDS

NAMES = {"ascend", "fa"}
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
    pytest.param("npu", "fa", {"mask": "bool", "lse": True}, "", id="fa"),
    pytest.param("npu", "fa", {"softcap": 30.0}, "softcap=30.0 is not declared", id="fa softcap"),
    pytest.param("npu", "ascend", {**PAGED, "page_size": 128}, "", id="ascend"),
    pytest.param("npu", "ascend", PAGED, "page_size=64 is not 128", id="ascend pages"),
    pytest.param("npu", "ascend", {**PAGED, "page_size": 128, "kv_heads": 32, "head_dim": 100}, "head_dim=100", id="D"),
    pytest.param("npu:ascend310p", "fa", {}, "arch='ascend310p' is not the 910B or later", id="fa on 310P"),
    pytest.param(
        "npu:ascend910", "ascend", {**PAGED, "page_size": 128}, "arch='ascend910' is not the 910B or later", id="on 910"
    ),
    pytest.param("npu:ascend910_93", "ascend", {**PAGED, "page_size": 128}, "", id="ascend on 910_93"),
    pytest.param("npu", "ascend", {**MLA, "page_size": 128, "heads": 24}, "heads=24 is not one of", id="MLA heads"),
]


def test_the_plugin_registers_every_name() -> None:
    manager = PluginManager(
        environ={"POLYATTN_PLUGINS": "ascend", "POLYATTN_EXTRA_PLUGINS": "polyattn_ascend.plugin"}
    ).load()
    report = manager.plugins["ascend"]
    assert report.state == "ready", report.traceback
    assert {b.partition("@")[0] for b in report.backends} == NAMES


def test_every_backend_says_what_it_needs_and_where_it_comes_from() -> None:
    lacking = [b.id for b in BACKENDS if not b.summary or not b.upstream]
    assert not lacking
    bare = [f"{b.id}: {p.name}" for b in BACKENDS for p in b.providers if not all(r.hint for r in p.requires)]
    assert not bare, "a requirement without the one thing to do when it is missing"


def test_every_backend_has_an_adapter_that_says_where_its_evidence_is_from() -> None:
    assert [(b.id, b.planned, b.evidence) for b in BACKENDS] == [
        ("fa@npu", False, "emulator"),
        ("ascend@npu", False, "emulator"),
    ]


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
