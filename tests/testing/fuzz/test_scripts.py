"""Scripts of failures: they run alone, fail where the bug is, and do not where it is not."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn.contract import AttentionRequest
from polyattn.semantics import reference
from polyattn.testing import Case
from polyattn.testing.fuzz import Drawn, Failure, draw, exit_code, fuzz, judge, script, scripts
from polyattn.testing.fuzz.drawing import settled
from polyattn.testing.planted import BUGS, NO_BUG, planted

from .conftest import CPU, Forward, Registered


def imports(text: str) -> set[str]:
    """Top-level packages that a script imports."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", BUGS)
def test_the_script_of_a_bug_fails_for_it_and_for_nobody_else(name: str, tmp_path: Path) -> None:
    with planted(name) as backend:
        report = fuzz([backend], seed=0, calls=400, first=True, out=tmp_path)
        (found,) = report.failures
        assert found.path is not None
        text = found.path.read_text(encoding="utf-8")
        # Plain torch, not the kit, unless it takes the kit's own numbers: a maximum that lies in a later tile.
        assert "def results" in text or BUGS[name].tile
        assert exit_code(text) == 1
    assert imports(text) <= {"torch", "polyattn"}
    with planted(NO_BUG) as backend:
        assert exit_code(text.replace(f"planted_{name}", backend)) == 0
    assert exit_code(text.replace(f"planted_{name}", "reference")) == 0


def test_a_script_runs_alone_and_ends_with_0_once_the_bug_is_gone(tmp_path: Path) -> None:
    """The way a stranger runs it: another process, the plugin named as the script's first lines say."""
    plugin = tmp_path / "acme_kernels.py"
    plugin.write_text(ACME.replace("FACTOR", "1.02"), encoding="utf-8")
    environment = {**os.environ, "POLYATTN_EXTRA_PLUGINS": "acme_kernels", "PYTHONPATH": path_with(tmp_path)}
    command = [sys.executable, "-m", "polyattn", "fuzz", "--backend", "acme_scale", "--seed", "3", "--calls", "20"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (path, *_) = sorted((tmp_path / "polyattn-fuzz").glob("acme_scale-3-*.py"))
    assert "POLYATTN_EXTRA_PLUGINS=acme_kernels" in path.read_text(encoding="utf-8")

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)

    failing = run()
    assert failing.returncode == 1
    assert "Tensor-likes are not close" in failing.stderr
    plugin.write_text(ACME.replace("FACTOR", "1.0"), encoding="utf-8")
    fixed = run()
    assert fixed.returncode == 0, fixed.stderr
    assert fixed.stdout == "they agree\n"


def test_a_script_names_the_package_of_the_platform_that_it_failed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform in ("cuda", "rocm"):
        monkeypatch.setattr(scripts, "device_facts", lambda device, platform=platform: {"platform": platform})
        assert scripts._needs("fa", CPU).startswith(f"Needs polyattn-{platform} ")


ACME = """
import dataclasses

from polyattn.backends.plugin import _reference_rows
from polyattn.contract import hookimpl
from polyattn.contract import BackendInfo, Provider


class Acme:
    def bind(self, request):
        from polyattn.backends.reference_backend import Reference

        return Reference().bind(dataclasses.replace(request, scale=FACTOR * request.softmax_scale))


@hookimpl
def polyattn_register_backends():
    rows = _reference_rows("cpu")
    yield BackendInfo("acme_scale", "cpu", (Provider("acme", rows, "acme_kernels:Acme"),), "acme", priority=None)
"""


def path_with(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def dense(**changes: Any) -> Drawn:
    request = AttentionRequest(dtype="float32", head_dim=4, v_head_dim=4)
    return Drawn(settled(Case(request=request, lengths=((2, 2),), **changes)))


def written(drawn: Drawn, backend: str) -> str:
    failure = judge(drawn, backend, CPU).failure
    assert failure is not None
    return script(drawn, failure, backend, CPU, "polyattn fuzz --seed 1")


def test_what_plain_code_cannot_show_is_shown_by_the_kit(registered: Registered) -> None:
    def writes(request: AttentionRequest) -> Forward:
        def forward(query: Any, key: Any, value: Any, **_: Any) -> Any:
            made = reference.attention(query, key, value)
            with torch.no_grad():
                value.zero_()
            return made

        return forward

    with registered(writes) as name:
        text = written(dense(), name)
        assert "run_case(Calls(BACKEND" in text
        assert imports(text) == {"polyattn"}
        assert exit_code(text) == 1
        assert exit_code(text.replace("BACKEND = 'acme'", "BACKEND = 'reference'")) == 0


def test_an_exception_is_shown_by_the_call(registered: Registered) -> None:
    def fails(request: AttentionRequest) -> Forward:
        def forward(*tensors: Any, **given: Any) -> Any:
            raise IndexError("list index out of range")

        return forward

    with registered(fails) as name:
        text = written(dense(), name)
        assert "run_case" not in text
        assert exit_code(text) == 1


@pytest.mark.parametrize("storage", ["gapped", "padded", "transposed", "misaligned", "expanded"])
def test_the_memory_layout_is_kept(registered: Registered, storage: str) -> None:
    """A backend that reads memory as if it were contiguous."""

    def reads(request: AttentionRequest) -> Forward:
        def forward(query: Any, key: Any, value: Any, **_: Any) -> Any:
            if not (value.is_contiguous() and value.storage_offset() == 0):
                value = value.flip(-1)
            return reference.attention(query, key, value)

        return forward

    request = AttentionRequest(dtype="float32", head_dim=4, v_head_dim=4, heads=2, kv_heads=2)
    drawn = Drawn(settled(Case(request=request, lengths=((3, 3),) * 2, storage=storage)))
    with registered(reads) as name:
        text = written(drawn, name)
        assert exit_code(text) == 1
        assert "run_case" in text or "laid(" in text


def test_a_wrong_call_is_written_as_it_is() -> None:
    drawn = Drawn(dense().case, "scale nan")
    text = script(drawn, Failure("served", "a call that is wrong (scale nan) was answered"), None, CPU, "polyattn fuzz")
    assert 'scale=float("nan")' in text
    assert exit_code(text) == 0  # it is refused, as it must be
    right = text.replace('scale=float("nan")', "scale=1.0")
    assert exit_code(right) == 1


def calls() -> list[Drawn]:
    """One wrong call of each kind of argument, and fine calls of every family."""
    drawn = [draw(8, number) for number in range(100)]
    return [d for d in drawn if judge(d, "reference", CPU).word in ("agreed", "rejected")]


def test_every_call_can_be_written() -> None:
    """Whatever is drawn: its script is Python, and what it makes is the call (the reference agrees with itself)."""
    failure = Failure("out", "largest error 1, 0 is allowed")
    for drawn in calls():
        if drawn.case.request.dropout:
            continue
        text = script(drawn, failure, "reference", CPU, "polyattn fuzz")
        assert exit_code(text) == 0, text
        assert max(map(len, text.splitlines())) < 4000


def test_the_head_says_what_where_and_how() -> None:
    failure = Failure("out", 'a "quoted" \\ message')
    text = script(dense(), failure, "reference", CPU, "polyattn fuzz --seed 1 --number 2")
    head = ast.get_docstring(ast.parse(text))
    assert head is not None
    assert 'reference: out: a "quoted" \\ message' in head
    assert "Found by `polyattn fuzz --seed 1 --number 2` with polyattn " in head
    assert re.search(r"torch \d", head)
    assert "EXTRA_PLUGINS" not in head
