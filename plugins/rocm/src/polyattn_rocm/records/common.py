"""Words that several ROCm backends share: dtypes, architectures, and the distributions they come from."""

from __future__ import annotations

from typing import Any

from polyattn.contract import Range, Requirement, Window

HALF = ("bfloat16", "float16")
TRAINABLE = ("query", "key", "value")
TRAINABLE_LSE = (*TRAINABLE, "lse")
CAUSAL = ("none", "bottom_right")
LENGTHS = ("equal", "one", "fewer", "more")
# A right bound of S_k keys or more is taken for none, which it is not where queries stand before the first key.
WINDOWS: tuple[dict[str, Any], ...] = (
    {"s_relation": "more", "window": Window(right=False)},
    {"s_relation": ("equal", "one", "fewer"), "window": Window()},
)
PHASES = ("prefill", "extend", "decode", "verify")

CK_ARCHS = ("gfx90a", "gfx942", "gfx950")
"""Instinct: Composable Kernel for all of AITER's attention. Assembly (MLA, and dense where it is faster) is for the
latter two."""
ASSEMBLY_ARCHS = ("gfx942", "gfx950")
RDNA4 = ("gfx1200", "gfx1201")
RDNA = ("gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", *RDNA4)
FP8_ARCHS = ("gfx950", *RDNA4)
"""Chips whose e4m3 is that of the OCP, which a cache holds. That of gfx942 is another one (fnuz), that of half the
value and with no negative zero; gfx90a has none."""

# MLA rows: absorbed (latent 512 + rope 64, V is the latent).
ABSORBED = (576, 512)
PREFILL_HEADS = (16, 128)

UNIFIED_PAGES = (16, 32, 64, 128, 256)
"""Of AITER's `unified_attention`: powers of two; below 16 it would do single keys."""
LARGEST_TILE = 64
"""Keys that it loads at a time, at most."""

NO_TREE = Range(0, 1)
ANY_TREE = Range(0)

# Exact rewrites. A cache dtype that a kernel cannot read is dequantised by pages; KV_DTYPES is what that knows.
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")
LATENT_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
DEQUANTISE = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}
SINKS = {"sinks": "sinks_from_lse"}
TREE = {"tree": "tree_by_lse"}

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
    ">=2.7,<3",
    module="flash_attn_2_cuda",
    hint="build https://github.com/Dao-AILab/flash-attention from source with ROCm's torch installed",
)
FLASH_ATTN_TRITON = Requirement(
    "flash-attn",
    ">=2.7.4,<3",
    module="flash_attn.flash_attn_interface",
    hint="FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE pip install --no-build-isolation flash-attn, and set it to run, too",
)
"""The build without an extension."""
