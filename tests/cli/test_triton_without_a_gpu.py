"""Triton is installed, something has imported it, and there is no accelerator: each command says so, and none fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="not run: the Triton package is not installed (it has no build for this platform)")

PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
import torch, triton.language
from polyattn.cli import main

found = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(command)
        except SystemExit as end:
            code = end.code
    found.append([code or 0, out.getvalue(), " ".join(err.getvalue().split())])
print(json.dumps(found))
"""
WHY = "is installed, but CPUs run its kernels only under its interpreter, which is slow"
ACTION = "set TRITON_INTERPRET=1 before the program starts"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """(exit code, output, error output) of each command."""
    failures = tmp_path_factory.mktemp("fuzz") / "failures"
    commands = {
        "list": ["list", "--json"],
        "doctor": ["doctor", "--json"],
        "conform": ["conform", "triton", "--quick", "--no-evidence"],
        "conform the CPU": ["conform", "triton@cpu", "--device", "cpu", "--quick", "--no-evidence"],
        "fuzz": ["fuzz", "--calls", "20", "--seed", "3", "--out", str(failures), "--json"],
        "fuzz it": ["fuzz", "--backend", "triton", "--calls", "1", "--out", str(failures), "--json"],
        "explain": ["explain", "--head-dim", "64", "--attention-backend", "triton"],
    }
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "500"}
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(list(commands.values()))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=env, cwd=Path(failures).parent)
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout), strict=True))


def test_the_list_says_why_and_what_to_do(said: dict[str, Any]) -> None:
    code, out, err = said["list"]
    assert (code, err) == (0, "")
    (entry,) = [b for b in json.loads(out) if b["name"] == "triton" and "cpu" in b["platforms"]]
    assert entry["status"] == "unavailable"
    assert any(WHY in reason and ACTION in reason for reason in entry["reasons"])


def test_doctor_says_why_and_what_to_do_and_finds_no_plugin_broken(said: dict[str, Any]) -> None:
    code, out, _ = said["doctor"]
    assert code == 0
    findings = json.loads(out)
    (entry,) = [b for b in findings["backends"] if (b["name"], b["platform"]) == ("triton", "cpu")]
    assert entry["status"] == "unavailable"
    assert WHY in entry["why"]
    assert entry["do"] == ACTION


@pytest.mark.parametrize("command", ["conform", "conform the CPU", "explain"])
def test_asked_for_by_name_it_is_refused_with_what_to_do(said: dict[str, Any], command: str) -> None:
    code, out, err = said[command]
    assert (code, out) == (4, "")
    assert WHY in err
    assert ACTION in err


def test_the_fuzzer_leaves_it_out(said: dict[str, Any]) -> None:
    code, out, err = said["fuzz"]
    assert code == 0, out + err
    assert set(json.loads(out)["compared"]) >= {"automatic", "torch_sdpa", "reference"}
    assert "triton" not in json.loads(out)["compared"]


def test_the_fuzzer_of_it_alone_is_told(said: dict[str, Any]) -> None:
    code, out, err = said["fuzz it"]
    assert code != 0
    assert ACTION in out + err
