"""Words that both operators share."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyattn.contract import Requirement

TORCH_NPU = Requirement(
    "torch-npu",
    module="torch_npu",
    hint="install CANN, then pip install torch-npu in the version of your torch",
)
UPSTREAM = "https://github.com/Ascend/op-plugin"

HALF = ("bfloat16", "float16")
TRAINABLE = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class Since910B:
    """No architecture before the 910B. An unknown one passes: it was not found out, not refused."""

    before: tuple[str, ...] = ("ascend310", "ascend310p", "ascend910")

    def reason(self, value: Any) -> str | None:
        return f"is not {self.describe()}" if value in self.before else None

    def describe(self) -> str:
        return "the 910B or later"
