"""Ranks of one job that would be served by different backends are told so, whoever chose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, sys, torch
import torch.distributed as dist
import polyattn
rank, file, how = int(sys.argv[1]), *sys.argv[2:]
os.environ.pop("POLYATTN_ATTENTION_BACKEND", None)
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
def call(**named):
    q = torch.randn(1, 5, 2, 16)
    polyattn.attention(q, q.clone(), q.clone(), **named)
def under(name):
    with polyattn.use_backend(name):
        call()
def environment(name):
    os.environ["POLYATTN_ATTENTION_BACKEND"] = name
    polyattn.configure()
    call()
def compiled(name):
    with polyattn.use_backend(name):
        torch.compile(call, backend="eager")()
def packed(name):
    q, cu = torch.randn(5, 2, 16), torch.tensor([0, 5], dtype=torch.int32)
    polyattn.varlen_attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5, backend=name)
try:
    if how == "argument" and rank: call(backend="reference")
    elif how == "use_backend" and rank: under("reference")
    elif how == "environment" and rank: environment("reference")
    elif how == "compiled" and rank: compiled("reference")
    elif how == "packed": packed("reference" if rank else None)
    elif how == "all ranks": under("reference")
    elif how == "one after the other":
        call(); call(backend="reference"); under("flex_attention"); call()
    elif how == "as the rule has it" and rank: call(backend="torch_sdpa")
    elif how == "second name differs": call(); call(backend="flex_attention" if rank else "reference")
    elif how == "one rank checks itself":
        call()
        if rank: call(backend="reference")
    else: call()
    print("served")
except polyattn.ConfigError as error:
    print(error)
dist.barrier()
dist.destroy_process_group()
"""


def ranks(tmp_path: Path, how: str) -> list[str]:
    """What each of two ranks says at last."""
    command = [sys.executable, "-c", RANK]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "ranks"), how],
            env={**os.environ, "POLYATTN_TUNING": "off"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=1800) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    return [out.strip().splitlines()[-1] for out, _ in said]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("how", ["argument", "use_backend", "environment", "compiled", "packed", "second name differs"])
def test_ranks_that_name_different_backends_raise(tmp_path, how):
    said = ranks(tmp_path, how)
    assert sorted(text == "served" for text in said) == [False, True], said
    (error,) = [text for text in said if text != "served"]
    assert "ranks of one job choose alike" in error
    assert "reference@cpu (" in error
    assert "or name one backend on all of them" in error


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("how", ["all ranks", "one after the other", "as the rule has it", "one rank checks itself"])
def test_ranks_that_are_served_alike_are_left_alone(tmp_path, how):
    assert ranks(tmp_path, how) == ["served", "served"]
