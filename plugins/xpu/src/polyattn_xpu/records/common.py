"""Words that several backends share: dtypes, architectures, and the distributions they come from."""

from __future__ import annotations

from polyattn.contract import Requirement

HALF = ("bfloat16", "float16")
CAUSAL = ("none", "bottom_right")
LENGTHS = ("equal", "one", "fewer", "more")
PHASES = ("prefill", "extend", "decode", "verify")

# Architectures as they are detected; "" is a GPU that is not told apart (Lunar Lake, Panther Lake). sgl-kernel is
# compiled for Battlemage alone, vllm-xpu-kernels asks for Xe2 or Xe3 and counts Ponte Vecchio as Xe2.
SGL_ARCHS = ("bmg", "")
VLLM_ARCHS = ("bmg", "pvc", "")

# Widths that seeds and both libraries name; the kernels for pages have 512 too.
WIDTHS = (64, 96, 128, 192, 256)

# Exact rewrites. A cache dtype that a kernel cannot read is dequantised by pages; KV_DTYPES is what that knows.
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")
LATENT_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
DEQUANTISE = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}
BY_TOKENS = {"page_size": "page_table_to_tokens"}
SINKS = {"sinks": "sinks_from_lse"}

SGL_KERNEL_XPU = Requirement(
    "sgl-kernel-xpu",
    module="sgl_kernel.flash_attn",
    hint="build https://github.com/sgl-project/sgl-kernel-xpu; it is not on PyPI",
    impostor="sgl-kernel, a build for CUDA",
    also=("sgl-kernel",),
)
VLLM_XPU_KERNELS = Requirement(
    "vllm-xpu-kernels",
    ">=0.1.16",
    module="vllm_xpu_kernels.flash_attn_interface",
    hint="pip install vllm-xpu-kernels",
)
SGL_KERNEL_CPU = Requirement(
    "sgl-kernel-cpu",
    module="sgl_kernel",
    hint="build the CPU kernels of https://github.com/sgl-project/sglang (sgl-kernel, pyproject_cpu.toml); they are "
    "not on PyPI",
    impostor="sgl-kernel, a build for CUDA",
    also=("sglang-kernel-cpu", "sgl-kernel"),
)
IPEX_HINT = (
    "use torch_sdpa: Intel moved these kernels to PyTorch and ended the project, whose last version imports beside "
    "torch 2.8 only; polyattn's own backends need a newer one"
)
IPEX = Requirement(
    "intel-extension-for-pytorch",
    ">=2.8,<2.9",
    module="intel_extension_for_pytorch",
    hint=IPEX_HINT,
    also=("intel_extension_for_pytorch", "ipex"),
    warning="its project was archived in March 2026 with known security issues open, and gets no more mends; uninstall "
    "it unless something else needs it: polyattn uses it only where it is asked for by name",
)
TORCH_OF_IPEX = Requirement("torch", ">=2.8,<2.9", hint=IPEX_HINT)
