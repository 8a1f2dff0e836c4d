"""Expected failures: what a line may say, and that it is held to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyattn.errors import ConfigError
from polyattn.registry.evidence import read_evidence
from polyattn.registry.manager import get_manager
from polyattn.testing import Report, plan, record, run
from polyattn.testing.calls import Installed
from polyattn.testing.xfails import read_xfails

from .conftest import ADAPTER, Acme

WRONG = ADAPTER.replace(
    '"""The reference under another name."""',
    """
    def bind(self, request):
        bound = super().bind(request)
        if request.lse and request.dtype == "bfloat16":
            import dataclasses

            def forward(*tensors, **given):
                out, lse = bound.forward(*tensors, **given)
                return out, lse / 0.6931471805599453
            return dataclasses.replace(bound, forward=forward)
        return bound
""",
)
"""The LSE is in log2 in bfloat16: both the cases of that LSE and what is merged by it are wrong."""
LSE = "dense-bfloat16-*-lse*"


def lines(folder: Path, *text: str) -> None:
    (folder / "xfails.txt").write_text("\n".join(text) + "\n")


def tried(level: str = "quick", **changes: object) -> Report:
    return run("acme", device="cpu", level=level, **changes)


def test_listed_cases_may_fail_and_are_counted(acme: Acme) -> None:
    folder = acme(adapter=WRONG)
    assert tried(per_row=20).failed > 0
    lines(folder, "# what is wrong with acme", "", f"{LSE}  # https://acme.example/1: the LSE is in log2")
    report = tried(per_row=20)
    assert report.ok, report
    assert report.xfailed == len(report.xfails) > 0
    assert report.counts["dense bfloat16"]["xfailed"] == report.xfailed
    assert json.loads(report.to_json())["xfailed"] == report.xfailed
    shown = str(report).splitlines()
    assert any(line.split()[:2] == ["dense", "bfloat16"] and str(report.xfailed) in line for line in shown)
    assert any("xfailed dense-bfloat16" in line and "lse:" in line for line in shown)
    assert Report.from_dict(json.loads(report.to_json())) == report


def test_they_are_in_the_evidence_and_in_what_lists_show(acme: Acme) -> None:
    folder = acme(adapter=WRONG)
    lines(folder, f"{LSE}  # the LSE is in log2")
    report = tried(per_row=20)
    path = record(report)
    assert json.loads(path.read_text())["xfailed"] == report.xfailed
    evidence = read_evidence(str(folder / "plugin.py"), "acme", "cpu")
    assert f", {report.xfailed} xfailed, " in str(evidence)


def test_a_listed_case_that_passes_is_a_failure(acme: Acme) -> None:
    lines(acme(), "dense-float32-B*-lse*  # we thought so")
    report = tried(per_row=5, dtypes=["float32"])
    assert not report.ok
    found = [message for messages in report.findings.values() for message in messages]
    said = "xfail: it is passed, and xfails.txt, line 1 expects it to fail (we thought so): take the line out"
    assert set(found) == {said}


def test_a_listed_refusal_that_works_is_a_failure(acme: Acme) -> None:
    folder = acme()
    refused = next(c for c in plan(Installed("acme")) if c.check == "refusal")
    lines(folder, f"{refused.id}  # why")
    report = tried(per_row=1, dtypes=["float32"])
    assert list(report.findings) == [refused.id]
    assert "it is refused, and" in report.findings[refused.id][0]


def test_a_line_that_matches_nothing_is_an_error_of_a_full_run(acme: Acme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("polyattn.testing.generation", fromlist=["LEVELS"]).LEVELS, "full", 3)
    folder = acme()
    lines(folder, "dense-float32-B9*  # gone")
    tried(per_row=1, dtypes=["float32"])
    message = r"xfails\.txt, line 1: 'dense-float32-B9\*' matches none of the \d+ cases of acme@cpu\. Take the line out"
    with pytest.raises(ConfigError, match=message):
        tried("full")


@pytest.mark.parametrize("whose", ["", "acme:", "acme@cpu:"])
def test_a_line_may_name_its_backend(acme: Acme, whose: str) -> None:
    lines(acme(), f"{whose}dense-*  # why")
    (line,) = read_xfails(get_manager().backends["acme", "cpu"])
    assert (line.pattern, line.reason, line.where) == ("dense-*", "why", "xfails.txt, line 1")


def test_lines_of_other_backends_are_left_to_them(acme: Acme) -> None:
    behind = """
        @hookimpl
        def polyattn_register_backends():
            for name, platform in (("acme", "cpu"), ("other", "cpu"), ("acme", "cuda")):
                yield BackendInfo(name, platform, (Provider("p", ROWS, "acme_kernels.adapter:Acme"),), summary="")
    """
    lines(acme(behind=behind), "other:dense-a*  # x", "acme@cuda:dense-b*  # x", "acme:dense-c*  # x")
    patterns = {
        (name, platform): [line.pattern for line in read_xfails(get_manager().backends[name, platform])]
        for name, platform in (("acme", "cpu"), ("acme", "cuda"), ("other", "cpu"))
    }
    assert patterns[("acme", "cpu")] == ["dense-c*"]
    assert patterns[("acme", "cuda")] == ["dense-b*", "dense-c*"]
    assert patterns[("other", "cpu")] == ["dense-a*"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("dense-*", r"xfails\.txt, line 1 of plugin acme: 'dense-\*' has no reason\. Write: CASE  # reason or link"),
        ("dense-*  #  ", "has no reason"),
        ("acme:  # why", "'acme:' names no case. Write: acme:CASE  # reason"),
        ("fa3:dense-*  # why", "it has no backend 'fa3'. Its backends: acme@cpu"),
    ],
)
def test_wrong_lines(acme: Acme, line: str, message: str) -> None:
    lines(acme(), line)
    with pytest.raises(ConfigError, match=message):
        read_xfails(get_manager().backends["acme", "cpu"])


def test_most_plugins_have_no_such_file() -> None:
    assert read_xfails(get_manager().backends["torch_sdpa", "cpu"]) == ()
