"""torch's scaled_dot_product_attention: the kernel that it picks, its FlashAttention 2, and cuDNN's."""

from __future__ import annotations

import contextlib
import functools

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from polyattn.bench.measure import Call, Inputs
from polyattn.errors import UnsupportedRequestError

from .common import called, heads_first, only, plain_step, scale_of

__all__ = ["automatic", "cudnn", "flash", "gathered"]


def automatic(inputs: Inputs) -> Call:
    """As a program calls it that chooses nothing."""
    return _dense(inputs, None)


def cudnn(inputs: Inputs) -> Call:
    return _dense(inputs, SDPBackend.CUDNN_ATTENTION)


def flash(inputs: Inputs) -> Call:
    return _dense(inputs, SDPBackend.FLASH_ATTENTION)


def _dense(inputs: Inputs, kernel: SDPBackend | None) -> Call:
    request = only(inputs, ("dense",), "causal", "v_head_dim", "grad")
    if request.causal != "none" and request.s_relation != "equal":
        raise UnsupportedRequestError("torch's causal mask begins at the top left: equal lengths only")
    scope = functools.partial(sdpa_kernel, kernel) if kernel is not None else contextlib.nullcontext

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with scope():
            return scaled_dot_product_attention(
                query, key, value, is_causal=request.causal != "none", scale=request.scale, enable_gqa=request.group > 1
            )

    sets = [heads_first(inputs, number) for number in range(inputs.count)]
    return called(inputs, forward, sets, first=True)


def gathered(inputs: Inputs) -> Call:
    """Pages are copied into one tensor at each call, and attended by the kernel that torch picks."""
    request = only(inputs, ("paged",), "causal", "v_head_dim", "kv_parts")
    step = plain_step(inputs)
    pages = step.page_table.long()
    # torch's name for a causal mask that ends with the last key; FlashAttention takes it.
    mask = causal_lower_right(step.q_len, step.kv_len) if step.q_len > 1 else None

    def call(number: int) -> Tensor:
        given = inputs.tensors[number]
        caches = (given["key_cache"], given["value_cache"])
        key, value = (cache[pages].flatten(1, 2)[:, : step.kv_len].transpose(1, 2) for cache in caches)
        query = given["query"].unflatten(0, (step.batch, step.q_len)).transpose(1, 2)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale_of(request), enable_gqa=request.group > 1
        )
        return out.transpose(1, 2).flatten(0, 1)

    return call
