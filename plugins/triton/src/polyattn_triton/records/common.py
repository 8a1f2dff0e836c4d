"""Where the portable kernels run, what Triton is called there, and the words their rows share."""

from __future__ import annotations

from polyattn.contract import Range, Requirement

HALF = ("bfloat16", "float16")
TRAINABLE = ("query", "key", "value")
LENGTHS = ("equal", "one", "fewer", "more")
PHASES = ("prefill", "extend", "decode", "verify")

PLATFORMS = ("cuda", "rocm", "xpu", "musa", "npu", "cpu")
INTERPRETED = -200
"""Priority on CPUs: after the reference, because the interpreter is slower still."""

AT_ODDS = "polyattn_triton.interpreter:at_odds"
TORCH_BRINGS_IT = Requirement(
    "triton",
    module="triton",
    hint="PyTorch's wheels for GPUs bring Triton along; reinstall torch for this device",
    also=("pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-rocm", "triton-xpu"),
    check=AT_ODDS,
)
TRITON = {
    "cuda": TORCH_BRINGS_IT,
    "rocm": TORCH_BRINGS_IT,
    "xpu": TORCH_BRINGS_IT,
    "musa": Requirement(
        "triton", module="triton", hint="install the Triton that comes with the MUSA SDK", check=AT_ODDS
    ),
    "npu": Requirement(
        "triton-ascend",
        module="triton",
        hint="pip install triton-ascend (it takes the place of triton)",
        check=AT_ODDS,
    ),
    "cpu": Requirement(
        "triton",
        module="triton",
        hint="pip install triton, and set TRITON_INTERPRET=1: CPUs run it under its interpreter",
        check="polyattn_triton.interpreter:not_on_cpu",
    ),
}

NO_TREE = Range(0, 1)
ANY_TREE = Range(0)
ANY_PAGE = Range(1)
