"""Words that several CUDA backends share: dtypes, architectures, and the distributions they come from."""

from __future__ import annotations

from typing import Any

from polyattn.contract import AtLeast, ConfigField, OneOf, Range, Requirement, Window

HALF = ("bfloat16", "float16")
TRAINABLE = ("query", "key", "value")
TRAINABLE_LSE = (*TRAINABLE, "lse")
CAUSAL = ("none", "bottom_right")
LENGTHS = ("equal", "one", "fewer", "more")
PHASES = ("prefill", "extend", "decode", "verify")

HOPPER = ("sm90",)
BLACKWELL = ("sm100", "sm103")
AMPERE_AND_LATER = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120")

# What every serving kernel takes; a row adds its own limits.
SERVING: dict[str, Any] = {
    "dtype": HALF,
    "phase": PHASES,
    "s_relation": LENGTHS,
    "causal": CAUSAL,
    "group": True,
    "scale": True,
    "save_kv_cache": True,
}
ANY_PAGE = Range(1)
NO_TREE = Range(0, 1)
ANY_TREE = Range(0)

CUDA_12_3 = AtLeast((12, 3))

# Head dims of the FlashAttention generations: to 256, K and V of one width or 192 with 128; fa4 on Blackwell less.
WIDE: dict[str, Any] = {"head_dim": Range(8, 256, multiple_of=8)}
FA_WIDTHS: tuple[dict[str, Any], ...] = (WIDE, {"dims": ((192, 128),)})
# FA2 takes a bound of S_k keys or more for none, and a missing right bound beside a left one for S_k: neither is what
# it says for queries before the first key.
FA2_WINDOWS: tuple[dict[str, Any], ...] = (
    {"s_relation": ("equal", "one", "fewer"), "window": Window()},
    {"s_relation": "more", "causal": OneOf(("bottom_right",)), "window": Window()},
    {"s_relation": "more", "window": False},
)
FA4_BLACKWELL_WIDTHS: tuple[dict[str, Any], ...] = (
    {"head_dim": Range(8, 128, multiple_of=8)},
    {"dims": ((192, 128),)},
    {"dims": ((256, 256),)},
)

# MLA rows: absorbed (latent 512 + rope 64, V is the latent) and unabsorbed prefill (nope 128 + rope 64, V 128).
ABSORBED = (576, 512)
UNABSORBED = (192, 128)

# Exact rewrites. A cache dtype that a kernel cannot read is dequantised by pages; KV_DTYPES is what that knows.
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")
LATENT_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
DEQUANTISE = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}
BY_TOKENS = {"page_size": "page_table_to_tokens"}
SINKS = {"sinks": "sinks_from_lse"}
TREE = {"tree": "tree_by_lse"}

# FA3 keeps sinks in shared memory for 64 heads: vLLM's build says so, sgl-kernel's does not look.
SINK_HEADS = Range(1, 64)


def free_slots(otherwise: str) -> ConfigField:
    """The option of a backend that multiplies free slots of a page by 0; `otherwise`: what it does to spare them."""
    return ConfigField(
        "free_slots",
        "str",
        "any",
        f"what a cache holds where no token is: any = {otherwise}; finite = a promise that it is a number, so that "
        "pages are read as they are",
        choices=("any", "finite"),
    )


FLASH_ATTENTION = "https://github.com/Dao-AILab/flash-attention"
FLASH_ATTN_2 = Requirement(
    "flash-attn",
    ">=2.7,<3",
    module="flash_attn.flash_attn_interface",
    hint="pip install flash-attn --no-build-isolation",
)
FLASH_ATTN_3 = Requirement(
    "flash-attn-3",
    module="flash_attn_interface",
    hint="run pip install . in the hopper folder of https://github.com/Dao-AILab/flash-attention",
)
FLASH_ATTN_4 = Requirement(
    "flash-attn-4",
    ">=4.0.0b36",
    module="flash_attn.cute.interface",
    hint="pip install --pre flash-attn-4",
)
FLASHINFER = Requirement(
    "flashinfer-python", ">=0.6", module="flashinfer", hint="pip install flashinfer-python", also=("flashinfer",)
)
SGL_KERNEL = Requirement(
    "sgl-kernel", module="sgl_kernel.flash_attn", hint="pip install sglang-kernel", also=("sglang-kernel",)
)
VLLM = Requirement("vllm", module="vllm.vllm_flash_attn.flash_attn_interface", hint="pip install vllm")
PORTABLE = Requirement("polyattn-triton", module="polyattn_triton", hint="pip install polyattn-triton")
TRITON = Requirement(
    "triton",
    module="triton",
    hint="PyTorch's wheels for GPUs bring Triton along; reinstall torch for this device",
    also=("pytorch-triton",),
)
