"""diffusers' context parallelism over polyattn: two ranks on gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyattn.errors import UnsupportedRequestError

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")
from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ParallelConfig

from polyattn.integrations import diffusers as host

JOB = Path(__file__).with_name("parallel_job.py")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_ranks_make_the_frames_and_gradients_of_one():
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(JOB))
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("done") == 2


@pytest.mark.parametrize(
    ("name", "given", "degree"),
    [
        ("is_causal", {"is_causal": True}, "ulysses_degree"),
        ("enable_gqa", {"enable_gqa": True}, "ulysses_degree"),
        ("dropout_p", {"dropout_p": 0.1}, "ring_degree"),
        ("attn_mask", {"attn_mask": torch.ones(1, 4, dtype=torch.bool)}, "ring_degree"),
    ],
)
def test_what_context_parallelism_has_not_is_refused_by_name(name, given, degree):
    host.install()
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(**{degree: 2}))
    query = torch.randn(1, 4, 2, 8)
    try:
        with pytest.raises(
            UnsupportedRequestError, match=f"{name} reached context parallelism|{name} reached attention"
        ):
            attention_dispatch.dispatch_attention_fn(
                query, query, query, parallel_config=config, **given,
                backend=attention_dispatch.AttentionBackendName("polyattn"),
            )  # fmt: skip
    finally:
        host.uninstall()
