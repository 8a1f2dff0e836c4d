"""The factor on the logits of latent attention.

It is that of the uncompressed heads, (D_nope + D_r)^-0.5, whatever the width of a latent row, times the square of
YaRN's temperature where the model asks for it (DeepSeek-V2, arXiv 2405.04434, section 3.1.4: sqrt(t) = 0.1 ln(s) + 1
with YaRN, arXiv 2309.00071, section 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidInputError

__all__ = ["softmax_scale", "yarn_mscale"]


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 where `factor` does not stretch."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(nope: int, rope: int, rope_parameters: Mapping[str, Any] | None = None) -> float:
    """The scale of a latent layer.

    Args:
        nope, rope: D_nope and D_r. rope_parameters: as a model's configuration has them; read are `rope_type` (also
            under its older name `type`), `mscale_all_dim` and `factor`.

    Raises:
        InvalidInputError: `mscale_all_dim` without a `factor`.
    """
    scale = float((nope + rope) ** -0.5)
    given = dict(rope_parameters or {})
    kind, all_dim = given.get("rope_type", given.get("type", "default")), given.get("mscale_all_dim")
    if kind == "default" or not all_dim:
        return scale
    if not given.get("factor"):
        raise InvalidInputError(
            f"rope_parameters have mscale_all_dim={all_dim} and factor={given.get('factor')!r}; the scale of latent "
            f"attention needs the factor by which the context was stretched"
        )
    return scale * yarn_mscale(given["factor"], all_dim) ** 2
