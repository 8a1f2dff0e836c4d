"""What polyattn's conformance does not know of this kernel: its tools, its option, and that its bits depend on neither
threads nor blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polyattn
from polyattn_tinyflash import build, tools

LIST = """
import json, sys
import polyattn
(found,) = [b for b in polyattn.list_backends("cpu") if b.name == "tinyflash"]
print(json.dumps([found.status, list(found.reasons), "torch" in sys.modules]))
"""
CALL = """
import polyattn, torch
q = torch.randn(1, 3, 1, 8)
try:
    polyattn.attention(q, q, q, backend="tinyflash")
except polyattn.BackendUnavailableError as error:
    print(error)
"""


def python(code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def nothing(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine that has neither ninja nor a compiler."""
    return {"PATH": str(tmp_path), "CXX": "no-such-compiler"}


def test_it_is_listed_without_torch() -> None:
    assert json.loads(python(LIST)) == ["available", [], False]


def test_missing_tools_are_named_with_what_to_do(nothing: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", nothing["PATH"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(tools.sysconfig, "get_path", lambda name: nothing["PATH"])
    assert [(need.distribution, need.hint) for need in tools.missing()] == [
        ("ninja", "pip install ninja"),
        ("a C++ compiler", "install g++ or clang++, or name one in CXX"),
    ]
    build.kernel.cache_clear()
    with pytest.raises(polyattn.BackendUnavailableError, match=r"ninja is missing .* and a C\+\+ compiler is missing"):
        build.kernel()


def test_without_a_compiler_it_is_unavailable_and_says_why(nothing: dict[str, str]) -> None:
    status, reasons, torch_loaded = json.loads(python(LIST, CXX=nothing["CXX"]))
    assert (status, torch_loaded) == ("unavailable", False)
    assert reasons == ["a C++ compiler is not installed; install g++ or clang++, or name one in CXX"]
    assert "a C++ compiler is not installed" in python(CALL, CXX=nothing["CXX"])


@pytest.mark.parametrize(
    "name, script, message",
    [
        ("g++", 'case " $* " in *" -c "*) echo "no such luck"; exit 1;; esac; exec c++ "$@"', "no such luck"),
        ("cc", "exit 1", "returned non-zero exit status 1"),  # torch asks one of this name who it is
    ],
)
def test_a_build_that_fails_says_what_the_compiler_said(name: str, script: str, message: str, tmp_path: Path) -> None:
    broken = tmp_path / name
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    said = python(CALL, CXX=str(broken), TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert said.startswith(f"tinyflash could not build its kernel with {broken}: ")
    assert message in said
    assert "name another one in CXX; TORCH_EXTENSIONS_DIR names" in said


@pytest.mark.parametrize("train", [False, True])
def test_the_bits_do_not_depend_on_threads(train: bool) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 200, heads, 40).requires_grad_(train) for heads in (4, 2, 2)]

    def call(threads: int) -> list[torch.Tensor]:
        polyattn.configure(attention_backend="tinyflash", attention_backend_config=f"threads={threads}")
        out = polyattn.attention(*tensors, causal=True)
        return [out, *torch.autograd.grad(out.sum(), tensors)] if train else [out]

    try:
        one, three = call(1), call(3)
    finally:
        polyattn.configure()
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_a_wrong_option_is_refused() -> None:
    q = torch.randn(1, 3, 1, 8)
    try:
        polyattn.configure(attention_backend="tinyflash", attention_backend_config="threads=-1")
        with pytest.raises(polyattn.ConfigError, match="threads"):
            polyattn.attention(q, q, q)
    finally:
        polyattn.configure()
