"""`polyattn list`."""

from __future__ import annotations

from typing import Any

import pytest

from polyattn import list_backends
from polyattn.cli.listing import entries
from polyattn.selection.inspection import BackendStatus

from .conftest import Run

KEYS = {"name", "platforms", "package", "version", "status", "evidence", "reasons"}


def status(platform: str, **changes: Any) -> BackendStatus:
    fields = {
        "name": "x",
        "package": "p",
        "version": "1",
        "status": "unavailable",
        "evidence": "declared",
        "summary": "s",
    }
    return BackendStatus(**{**fields, "platform": platform, **changes})


def test_json_has_every_backend_on_every_platform_once(run: Run) -> None:
    shown = run("list", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert all(set(entry) >= KEYS for entry in shown.data)
    pairs = [(entry["name"], platform) for entry in shown.data for platform in entry["platforms"]]
    assert sorted(pairs) == sorted((b.name, b.platform) for b in list_backends())


def test_json_says_what_the_library_says(run: Run) -> None:
    found = {(entry["name"], p): entry for entry in run("list", "--json").data for p in entry["platforms"]}
    for backend in list_backends():
        entry = found[backend.name, backend.platform]
        assert (entry["status"], entry["evidence"]) == (backend.status, backend.evidence)
        assert (entry["package"], entry["version"]) == (backend.package, backend.version)
        for reason in backend.reasons:
            assert reason in entry["reasons"] or f"{backend.platform}: {reason}" in entry["reasons"]


def test_what_several_providers_lack_is_said_once() -> None:
    for backend in list_backends():
        assert len(set(backend.reasons)) == len(backend.reasons), backend.name


def test_platforms_with_one_answer_share_an_entry() -> None:
    (entry,) = entries([status("cuda", reasons=("lost", "no cuda")), status("rocm", reasons=("lost", "no rocm"))])
    assert entry["platforms"] == ["cuda", "rocm"]
    assert entry["reasons"] == ["lost", "cuda: no cuda", "rocm: no rocm"]


@pytest.mark.parametrize("field", ["name", "package", "version", "status", "evidence"])
def test_platforms_with_other_answers_do_not(field: str) -> None:
    changed = "planned" if field == "status" else "other"
    assert len(entries([status("cuda"), status("rocm", **{field: changed})])) == 2


def test_the_table_has_this_machine(run: Run) -> None:
    shown = run("list").out
    assert "this machine: cpu" in shown
    assert "torch_sdpa" in shown
    assert "flashinfer" not in shown
    assert "polyattn list --all" in shown


def test_all_has_the_others_and_why_their_devices_are_missing(run: Run) -> None:
    shown = run("list", "--all").out
    assert "flashinfer" in shown
    assert "rocm: no AMD GPU" in shown


def test_one_platform(run: Run) -> None:
    assert {p for entry in run("list", "--platform", "npu", "--json").data for p in entry["platforms"]} == {"npu"}
    shown = run("list", "--platform", "npu").out
    assert "ascend" in shown
    assert "aiter" not in shown


def test_what_to_do_is_a_column_where_there_is_something_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "what to do" not in run("list").out.replace("`polyattn doctor` what to do", "")
    missing = status("cpu", reasons=("acme is not installed; pip install acme",))
    monkeypatch.setattr("polyattn.cli.listing.list_backends", lambda platform: [missing])
    shown = " ".join(run("list").out.split())
    assert "why not, and what to do" in shown
    assert "pip install acme" in shown


CHATTY = """
print("acme: found no licence")

from polyattn.contract import hookimpl
from polyattn.contract import *


@hookimpl
def polyattn_register_backends():
    provider = Provider("acme", (row(family="dense", dtype="float32", head_dim=8),), "acme:Acme")
    yield BackendInfo("acme", "cpu", (provider,), summary="Acme's")
"""


@pytest.mark.parametrize("words", ["list --json", "doctor --json", "matrix --format json"])
def test_what_a_plugin_prints_when_it_is_imported_is_said_and_spoils_no_data(run: Run, plugin: Any, words: str) -> None:
    plugin("acme", CHATTY)
    shown = run(*words.split())
    assert shown.data, "it is JSON"
    assert "acme: found no licence" not in shown.out
    assert "acme: found no licence\n" in shown.err


def test_markdown_is_data_too(run: Run, plugin: Any) -> None:
    plugin("acme", CHATTY)
    shown = run("matrix", "--format=markdown")
    assert shown.out.startswith("#")
    assert "acme: found no licence\n" in shown.err


def test_people_see_it_where_it_is_printed(run: Run, plugin: Any) -> None:
    plugin("acme", CHATTY)
    assert "acme: found no licence" in run("list").out
    assert "--json" in run("list", "--json", "--help").out
