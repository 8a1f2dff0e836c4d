"""Linear attention: gated delta net (`gdn`), Kimi delta attention (`kda`). FlashInfer's is in flashinfer.py."""

from __future__ import annotations

from polyattn.contract import BackendInfo, Provider, Range, Requirement, row

from .common import HALF, PHASES

CUTEDSL = BackendInfo(
    "cutedsl",
    "cuda",
    (
        Provider(
            "nvidia-cutlass-dsl",
            (
                row(
                    family="linear",
                    method=("gdn", "kda"),
                    dtype=HALF,
                    head_dim=128,
                    phase="decode",
                    s_relation=("equal", "one"),
                    causal=True,
                    group=True,
                    scale=True,
                    state_layout=("", "VK"),
                    graph_capture=True,
                ),
            ),
            requires=(Requirement("nvidia-cutlass-dsl", module="cutlass", hint="pip install nvidia-cutlass-dsl"),),
        ),
    ),
    summary="CuTe DSL recurrent kernels, decode only",
    priority=35,
    upstream="https://github.com/sgl-project/sglang",
)

FLA = BackendInfo(
    "fla",
    "cuda",
    (
        Provider(
            "flash-linear-attention",
            (
                row(
                    family="linear",
                    method=("gdn", "kda"),
                    dtype=(*HALF, "float32"),
                    head_dim=Range(16, 256),
                    v_head_dim=Range(16, 512),
                    phase=PHASES[:3],
                    s_relation=("equal", "one"),
                    causal=True,
                    group=True,
                    scale=True,
                    state_layout=("", "KV"),
                    grad=("query", "key", "value"),
                ),
            ),
            requires=(
                Requirement(
                    "flash-linear-attention",
                    module="fla.ops.gated_delta_rule",
                    hint="pip install flash-linear-attention",
                    also=("fla-core",),
                ),
            ),
        ),
    ),
    summary="flash-linear-attention, trains",
    priority=34,
    upstream="https://github.com/fla-org/flash-linear-attention",
)

BACKENDS = (CUTEDSL, FLA)
