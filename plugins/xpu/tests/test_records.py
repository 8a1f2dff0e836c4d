"""The records of polyattn-xpu: they load, each says what it needs, and nothing approximate is automatic."""

from __future__ import annotations

from polyattn.plugins import PluginManager
from polyattn_xpu.plugin import BACKENDS

NAMES = {"fa", "intel_xpu", "intel_amx", "ipex"}


def test_the_plugin_registers_every_name() -> None:
    manager = PluginManager(environ={"POLYATTN_PLUGINS": "xpu", "POLYATTN_EXTRA_PLUGINS": "polyattn_xpu.plugin"}).load()
    report = manager.plugins["xpu"]
    assert report.state == "ready", report.traceback
    assert {b.partition("@")[0] for b in report.backends} == NAMES


def test_every_backend_says_what_it_needs_and_where_it_comes_from() -> None:
    lacking = [b.id for b in BACKENDS if not b.summary or not b.upstream]
    assert not lacking
    bare = [f"{b.id}: {p.name}" for b in BACKENDS for p in b.providers if not all(r.hint for r in p.requires)]
    assert not bare, "a requirement without the one thing to do when it is missing"


def test_approximate_methods_are_never_automatic() -> None:
    assert not [b.id for b in BACKENDS if b.lossy and (b.priority is not None or b.auto)]
