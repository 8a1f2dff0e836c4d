"""`flex_attention`: PyTorch's FlexAttention with every position rule, softcap, masks, sinks and the LSE."""

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ..adapters import launch_slices, slice_samples, with_aligned_inputs
from ..contract import AttentionRequest, Bound

__all__ = ["FlexAttention", "dense", "fused", "position_rule", "run"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexAttention:
    """Binds dense and varlen requests. Autograd is torch's own, through the LSE too."""

    def bind(self, request: AttentionRequest) -> Bound:
        kernel = fused(request)
        varlen = request.family == "varlen"
        bound = Bound(functools.partial(_varlen if varlen else dense, request, kernel), traceable=not varlen)
        return with_aligned_inputs(bound) if request.misaligned and request.platform != "cpu" else bound


def fused(request: AttentionRequest) -> Callable[..., Any]:
    """The kernel of a request, fused by torch.compile where its options say so."""
    # A request is one compiled program: dynamo counts recompilations per code object, so each gets its own.
    return _kernel(request) if _compiles(request) else _eager


def _compiles(request: AttentionRequest) -> bool:
    mode = dict(request.options).get("compile", "auto")
    if request.platform == "cpu":
        # Inductor's CPU template has no LSE, which sinks need too.
        return mode == "always" and not request.lse and not request.sinks
    return mode != "never"


def _eager(*args: Any, **kw: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return flex_attention(*args, **kw)
    with warnings.catch_warnings():
        # Running it unfused is what the request's options ask for.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(*args, **kw)


def _call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    return flex_attention(query, key, value, **options)


def _kernel(request: AttentionRequest) -> Callable[..., Any]:
    """FlexAttention compiled for one request, at its first call. Dynamo counts recompilations per code object, so each
    request gets a copy of `_call` with code of its own: many requests do not exhaust one function's limit."""
    compiled: list[Callable[..., Any]] = []

    def call(*args: Any, **kw: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return flex_attention(*args, **kw)
        if not compiled:
            name = f"flex_attention_{next(_numbers)}"
            own = types.FunctionType(_call.__code__.replace(co_name=name), globals(), name)
            compiled.append(torch.compile(own))
        return compiled[0](*args, **kw)

    return call


_numbers = itertools.count()


def position_rule(request: AttentionRequest) -> Callable[[Tensor, Tensor], Tensor] | None:
    """S3 and S4: whether a query at position p of the keys' axis sees key j; None where it sees all."""
    causal, (left, right), chunk = request.causal, request.window, request.chunk
    if causal == "none" and left < 0 and right < 0 and not chunk:
        return None

    def rule(p: Tensor, j: Tensor) -> Tensor:
        seen = (j <= p) if causal != "none" or chunk else (j >= 0)
        if left >= 0:
            seen = seen & (j >= p - left)
        if right >= 0:
            seen = seen & (j <= p + right)
        if chunk:
            seen = seen & (j // chunk == p // chunk)
        return seen

    return rule


def _position_mod(request: AttentionRequest, s_q: int, s_k: int) -> MaskMod | None:
    """Return the position rule as a mask_mod; query i stands at key position i + offset."""
    rule = position_rule(request)
    if rule is None:
        return None
    offset = 0 if request.causal == "top_left" else s_k - s_q

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule(i + offset, j)

    return mod


@functools.lru_cache(maxsize=256)
def _position_mask(request: AttentionRequest, s_q: int, s_k: int, device: str) -> BlockMask | None:
    mod = _position_mod(request, s_q, s_k)
    return None if mod is None else create_block_mask(mod, None, None, s_q, s_k, device=device)


def _score_mod(request: AttentionRequest, bias: Tensor | None) -> Callable[..., Tensor] | None:
    cap = request.softcap
    if not cap and bias is None:
        return None

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        if bias is not None:
            score = score + bias[b, h, i, j]
        return score

    return mod


def _block_mask(request: AttentionRequest, attn_mask: Tensor | None, query: Tensor, key: Tensor) -> BlockMask | None:
    """query, key: [B, H, S, D]. A bool mask becomes part of the mask_mod, at the caller's broadcast shape."""
    s_q, s_k = query.shape[2], key.shape[2]
    if attn_mask is None or attn_mask.dtype != torch.bool:
        if torch.compiler.is_dynamo_compiling():
            rule = _position_mod(request, s_q, s_k)
            return None if rule is None else create_block_mask(rule, None, None, s_q, s_k, device=query.device.type)
        return _position_mask(request, s_q, s_k, str(query.device))
    position = _position_mod(request, s_q, s_k)
    per_batch, per_head = attn_mask.shape[0] > 1, attn_mask.shape[1] > 1

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = attn_mask[b if per_batch else 0, h if per_head else 0, i, j]
        return seen if position is None else seen & position(b, h, i, j)

    batch = attn_mask.shape[0] if per_batch else None
    heads = attn_mask.shape[1] if per_head else None
    return create_block_mask(mod, batch, heads, s_q, s_k, device=str(query.device))


def _kernel_options(request: AttentionRequest) -> dict[str, Any]:
    # Inductor sends fewer than 128 queries to its decoding kernel, which packs a GQA group into one block and finds
    # no configuration for, say, 100 queries x 2 heads. One query is what that kernel is for.
    if request.platform != "cpu" and request.group != 1 and request.s_relation != "one":
        return {"kernel_options": {"BACKEND": "TRITON"}}
    return {}


def run(
    request: AttentionRequest,
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask | None,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """BHSD in and out; (out, lse [B, H_q, S_q] or None)."""
    if request.platform == "cpu":
        # It trains nothing there, and refuses a tensor that requires a gradient even under no_grad().
        query, key, value = query.detach(), key.detach(), value.detach()
    want = request.lse or sinks is not None
    result = kernel(
        query,
        key,
        value,
        score_mod=_score_mod(request, bias),
        block_mask=block_mask,
        scale=request.scale,
        enable_gqa=request.group != 1,
        **({"return_aux": AuxRequest(lse=True)} if want else {}),
        **_kernel_options(request),
    )
    out, lse = (result[0], result[1].lse) if want else (result, None)
    if sinks is not None and lse is not None:
        # Rows without keys are 0 whatever the sink; an LSE of -inf beside a sink of -inf would make them NaN.
        finite = lse.masked_fill(lse == float("-inf"), 0.0)
        # By its logarithm: the gradient of sigmoid, s (1 - s), loses its digits where a sink is far below.
        share = torch.exp(torch.nn.functional.logsigmoid(finite - sinks.to(lse.dtype)[:, None]))
        out = (out * share[..., None]).to(query.dtype)
    return out, lse


def dense(
    request: AttentionRequest,
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """`DenseForward` of a request by its kernel."""
    parts = launch_slices(query.shape[0], request.heads) if request.platform != "cpu" else []
    if len(parts) > 1:
        # Its grid has samples times heads along the second axis.
        found = [
            dense(
                request, kernel, query[some], key[some], value[some],
                attn_mask=slice_samples(attn_mask, some), sinks=sinks, out=None if out is None else out[some],
            )
            for some in parts
        ]  # fmt: skip
        whole = torch.cat([one[0] if request.lse else one for one in found]) if out is None else out
        return (whole, torch.cat([one[1] for one in found])) if request.lse else whole
    bshd = request.layout == "BSHD"
    if bshd:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    bias = closed = None
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        bias = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        # FlexAttention's own care for empty rows covers its mask_mod only: rows of -inf are opened, then repaired.
        closed = ~(bias > float("-inf")).any(-1, keepdim=True)
        bias = bias.masked_fill(closed, 0.0)
    mask = _block_mask(request, attn_mask, query, key)
    result, lse = run(request, kernel, query, key, value, mask, bias, sinks)
    if closed is not None:
        result = result.masked_fill(closed, 0.0)
        lse = None if lse is None else lse.masked_fill(closed[..., 0], float("-inf"))
    if bshd:
        result, lse = result.transpose(1, 2), None if lse is None else lse.transpose(1, 2)
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if request.lse else result


def _varlen(
    request: AttentionRequest,
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    t_q, t_k = query.shape[0], key.shape[0]
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    mask = _document_mask(request, cu_seqlens_q, cu_seqlens_k, t_q, t_k, query.device)
    result, lse = run(request, kernel, q, k, v, mask, None, sinks)
    packed = result[0].transpose(0, 1)
    if out is not None:
        packed = out.copy_(packed)
    if not request.lse or lse is None:
        return packed
    return packed, lse[0].transpose(0, 1)


def _document_mask(
    request: AttentionRequest, cu_q: Tensor, cu_k: Tensor, t_q: int, t_k: int, device: torch.device
) -> BlockMask:
    """Queries see keys of their own sequence, by the position rules within it."""
    document_q = torch.bucketize(torch.arange(t_q, device=device), cu_q[1:], right=True)
    document_k = torch.bucketize(torch.arange(t_k, device=device), cu_k[1:], right=True)
    start_q, start_k = cu_q[document_q], cu_k[document_k]
    lengths_q, lengths_k = cu_q[1:] - cu_q[:-1], cu_k[1:] - cu_k[:-1]
    shift = (lengths_k - lengths_q) if request.causal != "top_left" else torch.zeros_like(lengths_k)
    offset, rule = shift[document_q], position_rule(request)

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = document_q[i] == document_k[j]
        return seen if rule is None else seen & rule(i - start_q[i] + offset[i], j - start_k[j])

    return create_block_mask(mod, None, None, t_q, t_k, device=str(device))
