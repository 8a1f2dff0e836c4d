"""Triton without an accelerator: what is said of the backend is what it does, whoever imported Triton and when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="not run: the Triton package is not installed (it has no build for this platform)")

PROGRAM = """
import json, os, sys
import polyattn, polyattn.registry.manager, polyattn_triton.plugin

def said():
    polyattn.registry.manager.reset_manager()
    return next(s for s in polyattn.list_backends("cpu") if s.name == "triton")

untouched = not {"torch", "triton"} & set(sys.modules) and said() is not None and "triton" not in sys.modules
exec(os.environ["FIRST"])
status = said()
import torch
q = torch.randn(1, 5, 2, 16)
found = {"status": status.status, "reasons": status.reasons, "untouched": untouched}
try:
    out = polyattn.attention(q, q, q, causal=True, backend="triton")
    found["error"] = (out - polyattn.attention(q, q, q, causal=True, backend="reference")).abs().max().item()
except polyattn.errors.PolyattnError as exc:
    found["refusal"] = [type(exc).__name__, str(exc)]
found["automatic"] = polyattn.explain(polyattn.attention, q, q, q).backend
blocks = dict(family="block_sparse", dtype="float32", head_dim=64, block_map=True, block_shape=(64, 64), layout="BHSD")
try:
    found["blocks"] = polyattn.explain(polyattn.AttentionRequest(**blocks)).backend
except polyattn.errors.PolyattnError as exc:
    found["blocks"] = str(exc)
found["switch"] = os.environ.get("TRITON_INTERPRET")
print(json.dumps(found))
"""
IMPORTED = "import torch, triton.language"
LATE = "it was imported before TRITON_INTERPRET was set, and now it can neither interpret nor compile"
TAKEN_BACK = "it was imported while TRITON_INTERPRET was set, and since it is not it can neither interpret nor compile"


def found(first: str, switch: str | None) -> Any:
    """What a fresh process says and does: `first` is run before it is asked."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"FIRST": first, "CUDA_VISIBLE_DEVICES": "", **({} if switch is None else {"TRITON_INTERPRET": switch})}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("first", ["", IMPORTED], ids=["before Triton", "after Triton"])
@pytest.mark.parametrize("switch", [None, "0"])
def test_without_the_switch_it_is_unavailable_and_says_what_to_do(first: str, switch: str | None) -> None:
    seen = found(first, switch)
    assert seen["untouched"], "neither the list nor a plugin's records import torch or Triton"
    assert seen["status"] == "unavailable"
    (reason,) = seen["reasons"][:1]
    assert "is installed, but CPUs run its kernels only under its interpreter, which is slow" in reason
    assert reason.endswith("set TRITON_INTERPRET=1 before the program starts")
    assert seen["refusal"][0] == "BackendUnavailableError"
    assert reason in seen["refusal"][1]
    assert seen["automatic"] == "torch_sdpa"
    assert seen["blocks"] == "torch_sdpa", "the map is written out as a mask"
    assert seen["switch"] == switch, "the switch is the user's"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("first", ["", IMPORTED], ids=["before Triton", "after Triton"])
def test_with_the_switch_it_is_available_and_right(first: str) -> None:
    seen = found(first, "1")
    assert (seen["status"], seen["reasons"]) == ("available", [])
    assert seen["error"] < 1e-5
    assert (seen["automatic"], seen["blocks"]) == ("torch_sdpa", "torch_sdpa"), "an interpreter is a last resort"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "first, switch, why, action",
    [
        (f"{IMPORTED}; os.environ['TRITON_INTERPRET'] = '1'", None, LATE, "set TRITON_INTERPRET=1 before the program"),
        (
            f"{IMPORTED}; del os.environ['TRITON_INTERPRET']",
            "1",
            "CPUs run its kernels only under its interpreter",
            "set TRITON_INTERPRET=1 before the program starts",
        ),
    ],
    ids=["set too late", "taken back"],
)
def test_a_switch_that_changes_after_triton_was_imported(first: str, switch: str | None, why: str, action: str) -> None:
    seen = found(first, switch)
    assert seen["status"] == "unavailable"
    assert why in seen["reasons"][0]
    assert action in seen["reasons"][0]
    assert seen["refusal"][0] == "BackendUnavailableError"
    assert why in seen["refusal"][1]


def test_the_interpreter_needs_numpy() -> None:
    seen = found("sys.modules['numpy'] = None", "1")
    assert seen["status"] == "unavailable"
    assert "its interpreter needs NumPy, which is not installed; pip install numpy" in seen["reasons"][0]
    assert seen["refusal"][0] == "BackendUnavailableError"


def test_kernels_are_not_declared_where_they_could_not_run() -> None:
    """On a device too: kernels that are compiled and a library that is interpreted cannot call each other."""
    program = """
import os, sys, triton.language
del os.environ["TRITON_INTERPRET"]
from polyattn_triton import interpreter
print(interpreter.at_odds())
from polyattn_triton import runtime
"""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env)
    assert TAKEN_BACK in done.stdout
    assert "leave TRITON_INTERPRET as it is while a program runs" in done.stdout
    assert f"BackendUnavailableError: Triton cannot be used in this process: {TAKEN_BACK}" in done.stderr
