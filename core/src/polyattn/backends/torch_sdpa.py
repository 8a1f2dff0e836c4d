"""`torch_sdpa`: PyTorch's scaled_dot_product_attention, and torch's own flash ops where the LSE is wanted."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..adapters import (
    align16,
    has_low_lse_fault,
    launch_slices,
    normalise_unit_strides,
    slice_samples,
    with_aligned_inputs,
    with_positive_scale,
)
from ..contract import AttentionRequest, Bound
from ..semantics.masks import additive, combined_mask, may_have_empty_rows, open_empty_rows, position_kind
from .reference_backend import Reference

__all__ = ["TorchSDPA"]

_VECTOR_ROWS = 8
"""Most queries of MPS's kernel for few of them (aten/src/ATen/native/mps/operations/Attention.mm)."""

_sdpa = F.scaled_dot_product_attention
_aten = torch.ops.aten


class TorchSDPA:
    """Binds dense requests. Without LSE and sinks: SDPA itself, autograd by torch. With them: the flash op of the
    device and its backward, which accepts a substituted (out, lse). Requests over a cache become dense ones."""

    def bind(self, request: AttentionRequest) -> Bound:
        if request.family in ("paged", "mla"):
            from . import paged_torch_sdpa  # it asks this class for its dense calls

            return paged_torch_sdpa.bind(request)
        return with_positive_scale(request, self._bind)

    def _bind(self, request: AttentionRequest) -> Bound:
        # On a GPU only the flash op's backward is the same bits on every run, so it is asked for by name.
        exact = request.deterministic and bool(request.grad) and request.platform != "cpu"
        if request.lse or request.sinks or exact:
            bound = _with_lse(request)
        else:
            bound = Bound(_plain(request), traceable=True, simple=_simple(request))
        return with_aligned_inputs(bound) if request.misaligned and request.platform != "cpu" else bound


def _views(request: AttentionRequest, function: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a BHSD function to the request's layout by views (torch's SDPA is BHSD)."""
    if request.layout == "BHSD":
        return function

    def bshd(query: Tensor, key: Tensor, value: Tensor, **kw: Any) -> Any:
        result = function(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **kw)
        if isinstance(result, tuple):
            return result[0].transpose(1, 2), result[1].transpose(1, 2)
        return result.transpose(1, 2)

    return bshd


def _into(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def _strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    flag: bool = False,
    **kw: Any,
) -> Tensor:
    """SDPA by torch's composite of matrix products: slower, and differentiable in everything."""
    out: Tensor = _aten._scaled_dot_product_attention_math(query, key, value, mask, dropout, flag, **kw)[0]
    return out


_switching = threading.Lock()


def _without_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    flag: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA by another kernel than cuDNN's, where its backward gives NaN for queries of a low LSE: of those that the
    caller has not switched off, while nothing is compiled."""
    if not has_low_lse_fault(query.shape[2], key.shape[2]):
        return _sdpa(query, key, value, mask, dropout, flag, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa and mask is not None:
        # The one fused kernel with masks that is left takes no groups.
        group = query.shape[1] // key.shape[1]
        key, value, enable_gqa = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), False
    switches: dict[SDPBackend, Callable[[], bool]] = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    }
    if torch.compiler.is_compiling():
        with sdpa_kernel(list(switches)):
            return _sdpa(query, key, value, mask, dropout, flag, scale=scale, enable_gqa=enable_gqa)
    # The switches are the process's: whoever else were here would put back what this thread has set.
    with _switching, sdpa_kernel([one for one, on in switches.items() if on()] or [SDPBackend.MATH]):
        return _sdpa(query, key, value, mask, dropout, flag, scale=scale, enable_gqa=enable_gqa)


def _trained(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel as its backward wants it: no more samples at a time than that takes, and no two numbers of an input in
    one place, because the gradient of such an input would be laid out alike."""

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *args: Any, **kw: Any) -> Tensor:
        query, key, value = _apart(query), _apart(key), _apart(value)
        parts = launch_slices(*query.shape[:2])
        if len(parts) == 1:
            return kernel(query, key, value, mask, *args, **kw)
        pieces = ((query[some], key[some], value[some], slice_samples(mask, some)) for some in parts)
        return torch.cat([kernel(*piece, *args, **kw) for piece in pieces])

    return call


def _apart(tensor: Tensor) -> Tensor:
    """`tensor`, copied where it is expanded."""
    strides = tensor.stride()
    expanded = 0 in strides and any(size > 1 and not step for size, step in zip(tensor.shape, strides, strict=True))
    return tensor.contiguous() if expanded else tensor


def _with_fit(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel with strides of whole 16 bytes along axes of one, which its float32 version looks at."""

    def call(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
        # The compiler lays inputs of such kernels out by itself.
        if (1 in query.shape or 1 in key.shape) and not torch.compiler.is_compiling():
            query, key, value = normalise_unit_strides(query, key, value)
        return kernel(query, key, value, *args, **kw)

    return call


def _of_one_query(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel for a query that sees the first key alone, which is all that it is given (`defects.CUDA`)."""

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, flag: bool, **kw: Any) -> Tensor:
        return kernel(query, key[:, :, :1], value[:, :, :1], mask, dropout, False, **kw)

    return call


def _kernel(request: AttentionRequest) -> Callable[..., Tensor]:
    """SDPA, around the faults that fused kernels have for a request (`defects.CUDA`), and what they do not derive."""
    if request.transform in ("gradgrad", "jvp"):
        return _math
    if request.platform != "cuda":
        return _sdpa
    kernel: Callable[..., Tensor] = _sdpa
    if request.grad:
        kernel = _trained(_without_cudnn if request.dtype in ("float16", "bfloat16") else _sdpa)
    kernel = _with_fit(kernel) if request.dtype == "float32" and not request.transform else kernel
    one = request.s_relation == "one" and position_kind(request) == "flag"
    return _of_one_query(kernel) if one else kernel


def _beyond(request: AttentionRequest) -> bool:
    """Return whether SDPA would pick a fused kernel that cannot take this call: on NPU a V wider than K; on NPU, MUSA
    and MPS (which makes no graph of them) tensors without elements."""
    if request.zero_size:
        return request.platform in ("npu", "musa", "mps")
    return request.platform == "npu" and request.v_head_dim > request.head_dim


def _simple(request: AttentionRequest) -> Callable[..., Tensor] | None:
    """SDPA with as few arguments as the request needs: parsing the others costs a microsecond."""
    if position_kind(request) == "mask" or request.layout != "BHSD" or request.group != 1:
        return None
    if request.platform == "mps" or request.mask != "none" or _beyond(request):
        return None
    if request.dropout or request.scale is not None or _kernel(request) is not _sdpa:
        return None
    if position_kind(request) == "all":
        function: Callable[..., Tensor] = _sdpa
        return function

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _sdpa(query, key, value, None, 0.0, True)

    return causal


def _plain(request: AttentionRequest) -> Callable[..., Tensor]:
    kind = position_kind(request)
    flag = kind == "flag"
    scale, gqa, dropout = request.scale, request.group != 1, request.dropout
    explicit = kind == "mask" or request.mask != "none"
    # MPS has let future tokens through its causal flag in half precision (pytorch#195910): spell the mask out.
    explicit = explicit or (flag and request.platform == "mps")
    # ... and taken V for as wide as Q (pytorch#176767, until 2.12): the narrower ones are padded.
    pad = request.head_dim - request.v_head_dim if request.platform == "mps" else 0
    # Columns of 0 in Q and K change no logit, once the scale is said.
    widen = request.v_head_dim - request.head_dim if request.platform in ("mps", "npu") else 0
    if widen > 0 and scale is None:
        scale = request.softmax_scale
    # torch's CPU kernels already give 0 and zero gradients for rows without keys; elsewhere kernels differ.
    repair = may_have_empty_rows(request) and (request.platform != "cpu" or _kernel(request) is _math)

    def masked(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
        if attn_mask is not None and kind == "all":
            mask = attn_mask
        else:
            mask = combined_mask(request, attn_mask, query.shape[2], key.shape[2], query.device)
        alive = None
        if repair:
            mask, alive = open_empty_rows(mask)
        if mask.dtype != torch.bool or kernel is _math:
            mask = additive(mask, _added_in(request, mask, query))
            if request.platform != "cpu" and not request.transform and not torch.compiler.is_compiling():
                mask = align16(mask)
        if request.platform == "mps" and query.shape[2] <= _VECTOR_ROWS:
            # Its kernel of few queries mistook the place of a mask shared by some heads or batches (pytorch#184180).
            mask = mask.expand(*query.shape[:3], key.shape[2]).contiguous()
        result = sdpa(query, key, value, mask, dropout, scale=scale, enable_gqa=gqa)
        if steady and result.requires_grad and not torch.compiler.is_compiling():
            result.register_hook(functools.partial(_strided, strides=result.stride()))  # type: ignore[no-untyped-call]
        return result if alive is None else result.masked_fill(~alive, 0.0)

    # PyTorch keeps cuDNN's plans of backwards, which masks come to, by the layouts of Q, K, V and the mask, and reads
    # the gradient of the output by that of the call a plan was made in: it gets one layout always.
    steady = request.platform == "cuda" and bool(request.grad)

    # The fused kernels' gradient of a mask fails for some shapes on GPUs (one query: "LSE is not correctly aligned").
    kernel = _math if "mask" in request.grad and request.platform != "cpu" else _kernel(request)
    if request.zero_size and _beyond(request):
        kernel = _math

    def sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
        if widen > 0:
            query, key = F.pad(query, (0, widen)), F.pad(key, (0, widen))
        if pad <= 0:
            return kernel(query, key, value, *args, **kw)
        return kernel(query, key, F.pad(value, (0, pad)), *args, **kw)[..., :-pad]

    if request.layout == "BSHD":

        def bshd(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            attn_mask: Tensor | None = None,
            sinks: Tensor | None = None,
            out: Tensor | None = None,
        ) -> Tensor:
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            if explicit:
                return _into(masked(q, k, v, attn_mask).transpose(1, 2), out)
            result = sdpa(q, k, v, None, dropout, flag, scale=scale, enable_gqa=gqa).transpose(1, 2)
            return result if out is None else out.copy_(result)

        return bshd

    def bhsd(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if explicit:
            return _into(masked(query, key, value, attn_mask), out)
        result = sdpa(query, key, value, None, dropout, flag, scale=scale, enable_gqa=gqa)
        return result if out is None else out.copy_(result)

    return bhsd


def _with_lse(request: AttentionRequest) -> Bound:
    flag = position_kind(request) == "flag"
    explicit = position_kind(request) == "mask" or request.mask != "none"
    repair = may_have_empty_rows(request)
    scale = request.softmax_scale
    returns_lse = request.lse or bool(request.grad)
    # The LSE of torch's flash ops is not theirs to publish: who reads an exported program may take it for zeros, as
    # ONNX's exporter does, and autograd does not go through it.
    public = Reference().bind(request).forward
    exporting = torch.compiler.is_exporting
    op, gradient = (_cpu_forward, _cpu_backward) if request.platform == "cpu" else (_cuda_forward, _cuda_backward)

    def mask_of(query: Tensor, key: Tensor, attn_mask: Tensor | None) -> Tensor | None:
        if not explicit:
            return None
        return combined_mask(request, attn_mask, query.shape[2], key.shape[2], query.device)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        if exporting():
            return public(query, key, value, attn_mask=attn_mask, sinks=sinks, out=out)
        mask = mask_of(query, key, attn_mask)
        bias = None if mask is None else additive(mask, _added_in(request, mask, query))
        result, lse = op(query, key, value, bias, flag, scale)
        if sinks is not None:
            # From the op's own LSE, finite in every row: a sink of -inf beside an LSE of -inf would give NaN.
            keep = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
            result = (result * keep[..., None]).to(query.dtype)
        if mask is not None and repair:
            alive = open_empty_rows(mask)[1][..., 0]
            lse = lse.masked_fill(~alive, float("-inf"))
        result = _into(result, out)
        return (result, lse) if returns_lse else result

    def backward(
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = mask_of(query, key, attn_mask)
        bias = None if mask is None else additive(mask, _added_in(request, mask, query))
        # A row without keys has no weights: exp(-inf - 0) = 0, where exp(-inf + inf) would be NaN.
        finite = lse.masked_fill(lse == float("-inf"), 0.0)
        with _deterministic(request.deterministic):
            return gradient(dout, query, key, value, out, finite, bias, flag, scale)

    if request.layout == "BHSD":
        return Bound(forward, backward, traceable=True, exportable=True)

    inner = _views(request, forward)

    def forward_bshd(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **kw: Any) -> Any:
        if exporting():
            return public(query, key, value, out=out, **kw)
        result = inner(query, key, value, **kw)
        if out is None:
            return result
        return (out.copy_(result[0]), result[1]) if isinstance(result, tuple) else out.copy_(result)

    def backward_bshd(
        dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **kw: Any
    ) -> tuple[Tensor, ...]:
        turned = (t.transpose(1, 2) for t in (dout, query, key, value, out, lse))
        return tuple(g.transpose(1, 2) for g in backward(*turned, **kw))

    return Bound(forward_bshd, backward_bshd, traceable=True, exportable=True)


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """torch's switch on for the length of one op, where the request asks for the same bits on every run."""
    # Not asked for where nothing is wanted: dynamo cannot trace the question.
    before = torch.get_deterministic_debug_mode() if wanted else 0
    if not wanted or before:
        yield
        return
    # use_deterministic_algorithms would also set it for compiled code, and import the compiler for that.
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _widths(query: Tensor, value: Tensor, multiple: int) -> int:
    """The one head dim torch's flash ops want for Q, K and V."""
    width = max(query.shape[-1], value.shape[-1])
    return -(-width // multiple) * multiple


def _wide(tensor: Tensor, width: int) -> Tensor:
    return tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, flag: bool, scale: float
) -> tuple[Tensor, Tensor]:
    width = _widths(query, value, 1)
    q, k, v = _wide(query, width), _wide(key, width), _wide(value, width)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, flag, attn_mask=bias, scale=scale)
    return out[..., : value.shape[-1]], lse


def _cpu_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    flag: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    width = _widths(query, value, 1)
    wide = [_wide(t, width) for t in (dout, query, key, value, out)]
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *wide, lse, 0.0, flag, attn_mask=bias, scale=scale
    )
    return dq[..., : query.shape[-1]], dk[..., : key.shape[-1]], dv[..., : value.shape[-1]]


def _cuda_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, flag: bool, scale: float
) -> tuple[Tensor, Tensor]:
    width = _widths(query, value, 8)
    q, k, v = _wide(query, width), _wide(key, width), _wide(value, width)
    result = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, flag, False, scale=scale)
    return result[0][..., : value.shape[-1]], result[1][..., : query.shape[2]]


def _cuda_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    flag: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    width = _widths(query, value, 8)
    wide = [_wide(t, width) for t in (dout, query, key, value, out)]
    # Random state of the dropout that this adapter never asks the flash op for. The op takes its determinism from
    # torch's switch.
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, dtype=torch.uint64, device=query.device)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        *wide, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, flag, seed, unused, scale=scale
    )
    return dq[..., : query.shape[-1]], dk[..., : key.shape[-1]], dv[..., : value.shape[-1]]


def _added_in(request: AttentionRequest, mask: Tensor, query: Tensor) -> torch.dtype:
    """The dtype in which a mask is added to logits: kernels of CPUs take float32 beside tensors of 16 bits, in which
    large numbers, those of distances for example, would lose what tells them apart."""
    return torch.float32 if request.platform == "cpu" and mask.dtype == torch.float32 else query.dtype
