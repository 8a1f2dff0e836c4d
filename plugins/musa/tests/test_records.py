"""The records of polyattn-musa: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyattn import what_if
from polyattn.distributions import availability, distribution_version
from polyattn.errors import PolyattnError
from polyattn.plugins import PluginManager
from polyattn.records import AttentionRequest, Provider
from polyattn_musa.plugin import BACKENDS
from polyattn_musa.records import MATE

NAMES = {"fa", "fa3", "sage_attn"}
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
    pytest.param("musa:mp31", "fa", {"window": (127, 0), "softcap": 30.0}, "", id="fa"),
    pytest.param("musa:mp22", "fa", {}, "arch='mp22' is not one of", id="before MP31"),
    pytest.param("musa:mp31", "fa", {"family": "varlen", "grad": ("query",)}, "", id="packed batches train"),
    pytest.param("musa:mp31", "fa", {"grad": ("query",)}, "", id="dense ones packed"),
    pytest.param(
        "musa:mp31", "fa", {"grad": ("query",), "softcap": 9.0}, "softcap=9.0 is not declared", id="without a softcap"
    ),
    pytest.param("musa:mp31", "fa", {"head_dim": 512}, "", id="the widest"),
    pytest.param("musa:mp31", "fa", {"head_dim": 520}, "head_dim=520", id="wider"),
    pytest.param("musa:mp31", "fa", {"dtype": "float32"}, "dtype='float32'", id="float32"),
    pytest.param(
        "musa:mp31",
        "fa",
        {"family": "varlen", "grad": ("query",), "head_dim": 264},
        "grad=('query',)",
        id="wide training",
    ),
    pytest.param("musa:mp31", "fa3", {**PAGED, "page_size": 1}, "", id="any page"),
    pytest.param("musa:mp31", "fa3", {**MLA, "page_size": 32}, "page_size=32", id="latent pages"),
    pytest.param("musa:mp31", "sage_attn", {"head_dim": 128, "causal": "bottom_right"}, "", id="sage"),
    pytest.param("musa:mp31", "sage_attn", {"head_dim": 136}, "head_dim=136", id="sage width"),
    pytest.param("musa:mp31", "sage_attn", {"lse": True}, "lse=True is not declared", id="no LSE"),
    pytest.param("musa:mp31", "sage_attn", {"head_dim": 64, "dtype": "float16"}, "", id="sage, the narrower"),
    pytest.param("musa:mp31", "sage_attn", {"window": (9, -1)}, "window=(9, -1) is not declared", id="sage, a window"),
    pytest.param(
        "musa:mp31", "sage_attn", {"grad": ("query",)}, "grad=('query',) is not declared", id="sage, training"
    ),
    pytest.param("musa:mp31", "fa", {"head_dim": 192, "v_head_dim": 128, "lse": True}, "", id="K wider than V"),
    pytest.param("musa:mp31", "fa", {"mask": "bool"}, "mask='bool' is not declared", id="a mask"),
    pytest.param("musa:mp31", "fa", {"alibi": True}, "alibi=True is not declared", id="ALiBi"),
    pytest.param("musa:mp31", "fa", {"dropout": 0.1}, "dropout=0.1 is not declared", id="dropout"),
    pytest.param(
        "musa:mp31",
        "fa",
        {"causal": "bottom_right", "s_relation": "fewer", "family": "varlen", "grad": ("query",)},
        "grad=('query',) is not declared",
        id="training, causal is square",
    ),
    pytest.param("musa:mp31", "fa3", {**PAGED, "head_dim": 512, "page_size": 48}, "", id="the widest, paged"),
    pytest.param("musa:mp31", "fa3", {**PAGED, "head_dim": 520}, "head_dim=520", id="wider, paged"),
    pytest.param("musa:mp31", "fa3", {**PAGED, "kv_layout": "HND"}, "kv_layout='HND' is not declared", id="HND"),
    pytest.param("musa:mp31", "fa3", {**PAGED, "dtype": "float32"}, "dtype='float32'", id="float32, paged"),
    pytest.param("musa:mp22", "fa3", PAGED, "arch='mp22' is not one of", id="paged before MP31"),
    pytest.param(
        "musa:mp31",
        "fa3",
        {**MLA, "head_dim": 192, "v_head_dim": 128, "page_size": 16},
        "",
        id="latent of 128, any page",
    ),
    pytest.param("musa:mp31", "fa3", {**MLA, "window": (9, -1)}, "window=(9, -1) is not declared", id="latent window"),
    pytest.param("musa:mp31", "fa3", {**MLA, "softcap": 9.0}, "softcap=9.0 is not declared", id="latent softcap"),
    pytest.param("musa:mp31", "fa3", PAGED, "", id="paged"),
    pytest.param("musa:mp31", "fa3", MLA, "", id="latent"),
]


def test_the_plugin_registers_every_name() -> None:
    manager = PluginManager(
        environ={"POLYATTN_PLUGINS": "musa", "POLYATTN_EXTRA_PLUGINS": "polyattn_musa.plugin"}
    ).load()
    report = manager.plugins["musa"]
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


def test_the_impostor_on_the_registry_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mate").mkdir()
    (tmp_path / "mate" / "__init__.py").touch()
    (tmp_path / "mate-9.0.dist-info").mkdir()
    (tmp_path / "mate-9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mate\nVersion: 9.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    distribution_version.cache_clear()
    try:
        found = availability(Provider("probe", (), requires=(MATE,)))
    finally:
        distribution_version.cache_clear()
    assert not found.ok
    assert "matchers for unittest" in found.reason
    assert "build" in found.hint
