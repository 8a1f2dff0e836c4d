"""Linear attention: gated delta net (`gdn`), Kimi delta attention (`kda`). FlashInfer's is in flashinfer.py."""

from __future__ import annotations

from typing import Any

from polyattn.contract import BackendInfo, Provider, Range, Requirement, row

from .common import BLACKWELL, CAUSAL, HALF, HOPPER, TRAINABLE
from .defects import FLA_ODD_WIDTHS, FLA_TRITON, FLA_WIPED

SGLANG = Requirement("sglang", ">=0.5.23", module="sglang.kernels.ops.attention.cutedsl_gdn", hint="pip install sglang")
FLA_LIBRARY = Requirement(
    "flash-linear-attention",
    ">=0.6",
    module="fla.ops.gated_delta_rule",
    hint="pip install -U flash-linear-attention",
    also=("fla-core",),
)

SHARED: dict[str, Any] = {
    "family": "linear",
    "method": ("gdn", "kda"),
    "causal": CAUSAL,
    "group": True,
    "misaligned": True,
}
ONE: dict[str, Any] = {"phase": "decode", "s_relation": "one"}
CHUNKS: dict[str, Any] = {
    **SHARED,
    "dtype": HALF,
    "head_dim": Range(16, 256),
    "v_head_dim": Range(16, 512),
    "phase": ("prefill", "extend", "decode"),
    "s_relation": ("equal", "one"),
    "scale": True,
    "state_layout": ("", "KV", "VK"),
    "qk_norm": True,
}

CUTEDSL = BackendInfo(
    "cutedsl",
    "cuda",
    (
        Provider(
            "sglang",
            (
                row(
                    when={"arch": (*HOPPER, *BLACKWELL)},
                    **SHARED,
                    **ONE,
                    dtype="bfloat16",
                    head_dim=128,
                    state_layout=("", "VK"),
                    state_slots=True,
                    raw_gates=("softplus",),
                    qk_norm=(True,),
                    graph_capture=True,
                ),
            ),
            target="polyattn_cuda.cutedsl:CuteDSL",
            requires=(
                SGLANG,
                Requirement("nvidia-cutlass-dsl", module="cutlass", hint="pip install nvidia-cutlass-dsl"),
            ),
        ),
    ),
    summary="SGLang's CuTe DSL recurrent kernels, decode only",
    priority=None,
    evidence="emulator",
    upstream="https://github.com/sgl-project/sglang",
    note="by name, for calls with raw gates (a_log) in bfloat16 and qk_norm: its kernels compute both, and know no "
    "other scale than D ** -0.5; each number of sequences is compiled anew",
)

FLA = BackendInfo(
    "fla",
    "cuda",
    (
        Provider(
            "flash-linear-attention",
            (
                # Its kernels of single tokens have no backward, and compute gates from raw ones.
                row(
                    **{**CHUNKS, **ONE, "dtype": (*HALF, "float32")},
                    raw_gates=("", "softplus"),
                    beta_range=(1, 2),
                    graph_capture=True,
                ),
                # In float32 the products of chunks are of TF32.
                row(
                    **{**CHUNKS, "head_dim": Range(16, 256, 16), "v_head_dim": Range(16, 512, 16)},
                    grad=TRAINABLE,
                ),
                row(**CHUNKS),
            ),
            target="polyattn_cuda.fla:FLA",
            requires=(FLA_LIBRARY,),
            defects=(FLA_TRITON, FLA_ODD_WIDTHS, FLA_WIPED),
        ),
    ),
    summary="flash-linear-attention, trains",
    priority=34,
    evidence="emulator",
    compiles=True,
    upstream="https://github.com/fla-org/flash-linear-attention",
    note="gradients where both head dims are multiples of 16; of gdn on Hopper with Triton 3.7.1 or newer",
)

BACKENDS = (CUTEDSL, FLA)
