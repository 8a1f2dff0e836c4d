"""Words that both operators share."""

from __future__ import annotations

from polyattn.records import Requirement

TORCH_NPU = Requirement(
    "torch-npu",
    module="torch_npu",
    hint="install CANN, then pip install torch-npu in the version of your torch",
)
UPSTREAM = "https://github.com/Ascend/op-plugin"

HALF = ("bfloat16", "float16")
TRAINABLE = ("query", "key", "value")
