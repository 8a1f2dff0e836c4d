"""This module converts the LSE to the base that a host expects, and back.

polyattn's LSE is the natural logarithm of the sum of exponentials, fp32 (docs/semantics.md, S6). FlashInfer and some
merges of vLLM count in powers of two.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

__all__ = ["Base", "lse_from_base", "lse_to_base"]

Base = Literal["e", "2"]

_LOG2_E = 1 / math.log(2)


def lse_to_base(lse: Tensor, base: Base) -> Tensor:
    """Convert an LSE of polyattn for a host that counts in this base. lse: fp32, any shape; rows without a key stay
    -inf."""
    return lse if base == "e" else lse * _LOG2_E


def lse_from_base(lse: Tensor, base: Base) -> Tensor:
    """Convert the LSE of a host that counts in this base for polyattn. lse: fp32, any shape; rows without a key stay
    -inf."""
    return lse if base == "e" else lse * math.log(2)
