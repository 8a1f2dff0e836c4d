"""Attention under torch.compile: the choice is made while tracing, and what cannot be traced hides behind a custom op.

While dynamo traces a call, `_plan` runs as ordinary Python on constants (dtypes, device, heads, head dims, the
relation of the lengths) and returns the name of a plan; the plan is a function on the `_plans` module that dynamo then
inlines. What may change later is guarded: the overrides of this thread or task (`overrides.HERE`), everything
process-wide through the epoch's token; measurements change that only where they order the backends of compiled code
otherwise. Lengths stay symbolic.

Traceable forwards are inlined. Others, and trainable ones that bring their own backward, become
`torch.ops.polyattn.dense` or `.varlen` (`polyattn.dispatch.compile.custom_ops`).
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...contract import AttentionRequest
from ...contract.scalars import kinds
from ...epoch import EPOCH
from ...errors import InvalidInputError, PolyattnError
from ...selection import overrides
from ...semantics.validation import FLOATS
from ..binding import Chosen, choose, device_facts, dtype_name
from ..device_facts import transform_around
from . import custom_ops as _ops  # noqa: F401 - that they are registered
from .errors import raising, refuse_derivatives
from .facts import constants, fixed, mask_fits, tensor_facts
from .op_plans import op_plan

__all__ = ["trace_dense", "trace_varlen"]

_F = TypeVar("_F", bound=Callable[..., Any])
_Facts = tuple[Any, ...]

_plans = types.ModuleType("polyattn._plans", "Functions that dynamo inlines, one per choice made while tracing.")
_numbers = itertools.count()
_names: dict[Any, str] = {}


def _constant(function: _F) -> _F:
    """`torch.compiler.assume_constant_result` without its import of dynamo, which costs as much as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def trace_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
    static: tuple[Any, ...],
    backend: str | None,
    scope: overrides.Scope | None,
) -> Any:
    """A dense call being traced. `static`: the arguments of `dispatch.Static` in order."""
    _check_ranks(query, key, value, 4)
    bshd = static[4] == "BSHD"
    s, h = (1, 2) if bshd else (2, 1)
    s_q, s_k = query.shape[s], key.shape[s]
    facts = (
        *tensor_facts(query, key, value, attn_mask, sinks, out, h),
        fixed(query.shape[h], key.shape[h], value.shape[h], query.shape[3], key.shape[3], value.shape[3]),
        "equal" if s_q == s_k else "one" if s_q == 1 else "fewer" if s_q < s_k else "more",
        "agree"
        if query.shape[0] == key.shape[0] and key.shape[0] == value.shape[0] and s_k == value.shape[s]
        else "differ",
        None if attn_mask is None else "fits" if mask_fits(attn_mask, query, h, s_q, s_k) else "does not fit",
    )
    scope = overrides.current_scope() if scope is None else scope
    plan = getattr(_plans, _plan("dense", facts, constants(static), backend, scope, EPOCH.token))
    return plan(query, key, value, attn_mask, sinks, out)


def _check_ranks(query: Tensor, key: Tensor, value: Tensor, rank: int) -> None:
    if query.ndim != rank or key.ndim != rank or value.ndim != rank:
        getattr(_plans, _plan("ranks", query.ndim, key.ndim, value.ndim, rank, EPOCH.token))()


def _refuse_ranks(query: int, key: int, value: int, rank: int, around: str) -> str:
    raise InvalidInputError(f"query, key and value have {query}, {key} and {value} dimensions; {rank} are needed")


@_constant
def _plan(*name: Any) -> str:
    # It runs as ordinary Python, inside the transforms that dynamo is tracing through.
    around = transform_around()
    name = (*name, around)
    known = name, kinds(name)
    if known not in _names:
        family, *said, _, _ = name
        try:
            _names[known] = _MAKERS[family](*said, around)
        except PolyattnError as error:
            _names[known] = _publish(raising(error))
    return _names[known]


def _make_dense(facts: _Facts, static: _Facts, backend: str | None, scope: overrides.Scope, around: str) -> str:
    common, (sizes, relation, lengths, mask) = facts[:10], facts[10:]
    h_q, h_k, h_v, d, dk, dv = sizes
    if lengths != "agree" or mask == "does not fit":
        raise InvalidInputError(
            f"batch and key lengths of query, key and value {lengths}; attn_mask {mask or 'is not given'} "
            f"(allowed: [B|1, H_q|1, S_q, S_k]). Run the call once outside torch.compile for the exact sizes"
        )
    if h_k != h_v or d != dk or not h_k or h_q % h_k:
        raise InvalidInputError(
            f"heads {h_q}, {h_k}, {h_v} and head dims {d}, {dk}, {dv} of query, key and value do not fit: "
            f"H_q must be a multiple of H_kv, key and value have equal heads, query and key equal head dims"
        )
    from ..call_key import Static

    bound = Static(*static).checked()
    fields = _request_fields(common, bound, h_q, h_k, d, dv, around)
    request = AttentionRequest(family="dense", s_relation=relation, **fields).normalised()
    chosen = _exported(choose(request, backend, scope, eager=False))
    axis = 2 if bound.layout == "BSHD" else 1
    if not _traceable(chosen):
        refuse_derivatives(around)
    return _publish(_inline(chosen, axis, common[7]) if _traceable(chosen) else _opaque_dense(chosen, common[7]))


def _request_fields(common: _Facts, static: Any, h_q: int, h_k: int, d: int, dv: int, around: str) -> dict[str, Any]:
    device, dtypes, misplaced, mask, sinks, out, grads, autocast, _, (empty, large) = common
    if misplaced:
        raise InvalidInputError(misplaced)
    if mask is not None and mask != torch.bool and mask not in FLOATS:
        raise InvalidInputError(f"attn_mask is {mask}; bool (True = attend) or a float to be added is needed")
    if sinks is not None and (sinks[0] != "fits" or sinks[1] not in FLOATS):
        raise InvalidInputError(f"sinks must be [{h_q}] (H_q) and of a float dtype ({sinks[1]}): one per query head")
    if autocast is None and len(set(dtypes)) != 1:
        raise InvalidInputError(f"query, key and value have dtypes {dtypes}; cast them to one, or use autocast")
    names = ("query", "key", "value", "mask", "sinks")
    if around in ("grad", "gradgrad"):
        # dynamo does not say which of a transform's tensors require a gradient.
        grads = (True, True, True, mask is not None and mask != torch.bool, sinks is not None)
    wanted = [n for n, g in zip(names, grads, strict=True) if g]
    if wanted and out is not None:
        raise InvalidInputError("out= cannot be used while gradients are wanted; drop it, or run under torch.no_grad()")
    dtype = dtypes[0] if autocast is None or dtypes[0] == torch.float64 else autocast
    if out is not None and out != ("fits", dtype):
        like = f"{dtype} and shaped like query, with the last size of value"
        raise InvalidInputError(f"out ({out[1]}) must be {like}, and not expanded; it {out[0]}")
    return {
        **static.fields(),
        **device_facts(torch.device(device)),
        "dtype": dtype_name(dtype),
        "heads": h_q,
        "kv_heads": h_k,
        "head_dim": d,
        "v_head_dim": dv,
        "mask": "none" if mask is None else "bool" if mask == torch.bool else "additive",
        "sinks": sinks is not None,
        "zero_size": empty,
        "large": large,
        "transform": around,
        "grad": tuple([*wanted, "lse"] if wanted and static.return_lse else wanted),
    }


def _traceable(chosen: Chosen) -> bool:
    return chosen.bound.traceable and not (chosen.bound.backward is not None and chosen.request.grad)


def _exported(chosen: Chosen) -> Chosen:
    """A saved program is to run without polyattn where that can be: autograd goes through such a forward itself."""
    if not (torch.compiler.is_exporting() and chosen.bound.exportable):
        return chosen
    return dataclasses.replace(chosen, bound=dataclasses.replace(chosen.bound, backward=None))


def _publish(plan: Callable[..., Any]) -> str:
    name = f"plan_{next(_numbers)}"
    setattr(_plans, name, plan)
    return name


def _inline(chosen: Chosen, axis: int, autocast: torch.dtype | None) -> Callable[..., Any]:
    from ..call_key import runner

    run = runner(chosen, chosen.request.lse, autocast is not None, axis)

    def plan(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, out: Any) -> Any:
        return run(query, key, value, attn_mask=attn_mask, sinks=sinks, out=out)

    return plan


def _opaque_dense(chosen: Chosen, autocast: torch.dtype | None) -> Callable[..., Any]:
    text, lse = op_plan(chosen.request, chosen.selection), chosen.request.lse
    dtype = None if autocast is None or chosen.request.dtype == "float64" else autocast

    def plan(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, out: Any) -> Any:
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        result, softmax = torch.ops.polyattn.dense(query, key, value, attn_mask, sinks, text)
        if out is not None:
            result = out.copy_(result)
        return (result, softmax) if lse else result

    return plan


def trace_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
    lens: dict[str, Any],
    static: tuple[Any, ...],
    backend: str | None,
) -> Any:
    """A packed call being traced. Token counts stay symbolic; the longest lengths may be constants or symbols."""
    _check_ranks(query, key, value, 3)
    cu_q, cu_k = lens["cu_seqlens_q"], lens["cu_seqlens_k"]
    max_q, max_k = lens["max_seqlen_q"], lens["max_seqlen_k"]
    facts = (
        *tensor_facts(query, key, value, attn_mask, sinks, out, 1),
        fixed(query.shape[1], key.shape[1], value.shape[1], query.shape[2], key.shape[2], value.shape[2]),
        "equal" if cu_q is cu_k else "one" if max_q == 1 else "more",
        (cu_q.dtype, cu_k.dtype),
    )
    plan = getattr(_plans, _plan("varlen", facts, constants(static), backend, overrides.current_scope(), EPOCH.token))
    return plan(query, key, value, attn_mask, sinks, out, cu_q, cu_k, max_q, max_k)


def _make_varlen(facts: _Facts, static: _Facts, backend: str | None, scope: overrides.Scope, around: str) -> str:
    common, (sizes, relation, index) = facts[:10], facts[10:]
    h_q, h_k, h_v, d, dk, dv = sizes
    if set(index) != {torch.int32} or h_k != h_v or d != dk or not h_k or h_q % h_k:
        raise InvalidInputError(
            f"query, key and value must be [T, H, D] with fitting heads and head dims, cu_seqlens int32; "
            f"heads {h_q}, {h_k}, {h_v}, head dims {d}, {dk}, {dv}, cu_seqlens {index}"
        )
    from ..call_key import Static

    bound = Static(*static).checked(("THD",))
    fields = _request_fields(common, bound, h_q, h_k, d, dv, around)
    request = AttentionRequest(family="varlen", s_relation=relation, **fields).normalised()
    refuse_derivatives(around)
    chosen = choose(request, backend, scope, eager=False)
    text, lse = op_plan(chosen.request, chosen.selection), chosen.request.lse
    autocast = None if chosen.request.dtype == "float64" else common[7]

    def plan(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, out: Any,
        cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    ) -> Any:  # fmt: skip
        if autocast is not None:
            query, key, value = query.to(autocast), key.to(autocast), value.to(autocast)
        args = (query, key, value, attn_mask, sinks, cu_q, cu_k, max_q, max_k, text)
        result, softmax = torch.ops.polyattn.varlen(*args)
        if out is not None:
            result = out.copy_(result)
        return (result, softmax) if lse else result

    return _publish(plan)


_MAKERS: dict[str, Callable[..., str]] = {"dense": _make_dense, "varlen": _make_varlen, "ranks": _refuse_ranks}
