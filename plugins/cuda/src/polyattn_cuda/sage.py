"""Family `dense` by SageAttention 2 and 1: INT8 scores, values in FP8 or float16.

From their sources: D is filled up to 64 or 128 inside (2.x), or is 64, 96 or 128 (1.x); the causal mask starts in the
upper left corner; no query is without keys. Arguments that a function does not know it swallows, so each kernel is
called by its own name, with arguments that it has. The packed kernel of 1.x is not used: it reads scales past the last
sequence's, and waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load, with_aligned_inputs, with_positive_scale
from polyattn.contract import AttentionRequest, Bound

from .int8 import scaled, with_empty_channels
from .records.diffusion import SAGE_1, SAGE_2
from .unstreamed import on_default_stream

__all__ = ["KERNELS", "Sage1", "Sage2"]

_LAYOUT = {"BSHD": "NHD", "BHSD": "HND"}

_FP8 = "sageattn_qk_int8_pv_fp8_cuda"
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sm80": ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp32"}),
    "sm86": ("sageattn_qk_int8_pv_fp16_triton", {}),
    "sm89": (_FP8, {"qk_quant_gran": "per_thread", "pv_accum_dtype": "fp32+fp16"}),
    "sm90": ("sageattn_qk_int8_pv_fp8_cuda_sm90", {"qk_quant_gran": "per_thread", "pv_accum_dtype": "fp32+fp32"}),
    "sm100": (_FP8, {"qk_quant_gran": "per_thread", "pv_accum_dtype": "fp32+fp16"}),
    "sm120": (_FP8, {"qk_quant_gran": "per_warp", "pv_accum_dtype": "fp32+fp16"}),
    "sm121": (_FP8, {"qk_quant_gran": "per_warp", "pv_accum_dtype": "fp32+fp16"}),
}
"""What `sageattn` of 2.2 takes by architecture; SM100, which it does not know, as SGLang does."""


class Sage2:
    """Binds dense requests. Keys are centred inside, on a copy, and the LSE is corrected for it. The largest logit of a
    row is found before the scale: scales of 0 and less go into the queries."""

    def bind(self, request: AttentionRequest) -> Bound:
        return with_aligned_inputs(with_positive_scale(request, lambda positive: scaled(positive, self._bind)))

    def _bind(self, request: AttentionRequest) -> Bound:
        name, how = KERNELS[request.arch]
        given = {
            **how,
            "tensor_layout": _LAYOUT[request.layout],
            "is_causal": request.causal != "none",
            "sm_scale": request.softmax_scale,
            "smooth_k": True,
            "return_lse": request.lse,
        }
        kernel = load(SAGE_2, f"sageattention.core:{name}", dict.fromkeys(given, "polyattn"))

        values_in_fp8, heads_first = "fp8" in name, request.layout == "BHSD"

        def forward(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **_: None) -> Any:
            found = on_default_stream(kernel, query, key, value, **given)
            result, lse = found if request.lse else (found, None)
            if values_in_fp8:
                result = with_empty_channels(result, value, heads_first)
            if lse is None:
                return _into(result, out)
            return _into(result, out), lse if heads_first else lse.transpose(1, 2)

        return Bound(forward)


class Sage1:
    """Binds dense requests. It would centre the caller's keys in place: they are centred here, into a copy."""

    def bind(self, request: AttentionRequest) -> Bound:
        given = {
            "tensor_layout": _LAYOUT[request.layout],
            "is_causal": request.causal != "none",
            "sm_scale": request.softmax_scale,
            "smooth_k": False,
        }
        kernel = functools.partial(
            load(SAGE_1, "sageattention.core:sageattn", dict.fromkeys(given, "polyattn")), **given
        )
        axis = 1 if request.layout == "BSHD" else 2
        attend = _causal if request.causal != "none" else _full

        def forward(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **_: None) -> Tensor:
            return _into(attend(kernel, axis, query, key - key.mean(axis, keepdim=True), value), out)

        return Bound(forward)


def _causal(kernel: Callable[..., Tensor], axis: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """1.x, causal: for each 128 queries it reads the scales of two blocks of 64 keys, even those of a block that does
    not exist. With whole blocks they all do; no query sees the keys that fill them up."""
    size = query.shape[axis]
    result = kernel(*(_filled(tensor, axis, 128) for tensor in (query, key, value)))
    return result.narrow(axis, 0, size)


def _full(kernel: Callable[..., Tensor], axis: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """1.x, every key: those that fill up its last block of 64 take part as keys of zeros, which no argument prevents.

    Where there are any, the output is the right one times the weight of the real keys. A second call attends to values
    of 1 for these and gives that weight, in float32, so that the quotient is no coarser than the output.
    """
    if not key.shape[axis] % 64:
        return kernel(query, key, value)
    filled = _filled(key, axis, 64)
    real = _filled(torch.ones_like(value), axis, 64)
    weight = kernel(query.float(), filled.float(), real.float())
    return (kernel(query, filled, _filled(value, axis, 64)) / weight[..., :1]).to(query.dtype)


def _filled(tensor: Tensor, axis: int, block: int) -> Tensor:
    """`tensor` with zeros up to whole blocks along `axis`."""
    missing = -tensor.shape[axis] % block
    return torch.nn.functional.pad(tensor, [0, 0] * (3 - axis) + [0, missing]) if missing else tensor


def _into(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)
