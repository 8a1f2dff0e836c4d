"""Family `dense` by MATE's SageAttention: scores of INT8 queries and keys, values and weights in FP8.

From its wrapper (mate 0.2.2; wrappers/SageAttention, mate/testing/sage_attention_quantization.py): Q is quantised by
128 tokens, K, centred on a copy, by 16, V by channel. The function swallows keywords it does not know and ignores
`pv_accum_dtype`; its quantisers are compiled when first called. Where the causal mask starts for unequal lengths is not
documented: it is for equal ones.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from polyattn.adapters import load, with_aligned_inputs
from polyattn.contract import AttentionRequest, Bound

from .records import SAGE

__all__ = ["Sage"]

_LAYOUT = {"BSHD": "NHD", "BHSD": "HND"}


class Sage:
    """Binds dense requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: another package of this name is installed, or none.
        """
        given: dict[str, Any] = {
            "tensor_layout": _LAYOUT[request.layout],
            "is_causal": request.causal != "none",
            "sm_scale": request.softmax_scale,
            "smooth_k": True,
            # Not a word of SageAttention's: only MATE's takes it.
            "quant_recipe": (128, 16, -1, 1),
            "qk_quant_dtype": "int8",
        }
        name = "sageattention.interface:sageattn_qk_int8_pv_fp8_cuda_sm90"
        kernel = functools.partial(load(SAGE, name, dict.fromkeys(given, "polyattn")), **given)

        def forward(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **_: None) -> Tensor:
            result: Tensor = kernel(q=query, k=key, v=value)
            return result if out is None else out.copy_(result)

        return with_aligned_inputs(Bound(forward))
