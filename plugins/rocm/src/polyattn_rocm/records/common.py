"""Words that several ROCm backends share: dtypes, architectures, and the distributions they come from."""

from __future__ import annotations

from polyattn.records import Range, Requirement

HALF = ("bfloat16", "float16")
TRAINABLE = ("query", "key", "value")
CAUSAL = ("none", "bottom_right")
LENGTHS = ("equal", "one", "fewer", "more")
PHASES = ("prefill", "extend", "decode", "verify")

INSTINCT = ("gfx90a", "gfx942", "gfx950")
FP8_INSTINCT = ("gfx942", "gfx950")

# MLA rows: absorbed (latent 512 + rope 64, V is the latent) and unabsorbed prefill (nope 128 + rope 64, V 128).
ABSORBED = (576, 512)
UNABSORBED = (192, 128)

NO_TREE = Range(0, 1)
ANY_TREE = Range(0)

# Exact rewrites. A cache dtype that a kernel cannot read is dequantised by pages; KV_DTYPES is what that knows.
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")
DEQUANTISE = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}
SINKS = {"sinks": "sinks_from_lse"}

AITER = Requirement(
    "amd-aiter",
    ">=0.1.7",
    module="aiter.ops.mha",
    hint="pip install --pre amd-aiter, or build https://github.com/ROCm/aiter (newer, and sinks need 0.1.20)",
    impostor="aiter, a library for asynchronous iteration that has nothing to do with AMD",
    also=("aiter",),
)
AITER_0_1_20 = Requirement(
    "amd-aiter",
    ">=0.1.20",
    module="aiter.ops.mha",
    hint="build https://github.com/ROCm/aiter: PyPI's amd-aiter is older than 0.1.20",
    impostor=AITER.impostor,
    also=AITER.also,
)
FLASH_ATTN = Requirement(
    "flash-attn",
    ">=2.6,<3",
    module="flash_attn.flash_attn_interface",
    hint="build https://github.com/Dao-AILab/flash-attention from source with ROCm's torch installed",
)
