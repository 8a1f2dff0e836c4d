"""Attention under torch.compile: the choice is made while tracing, and what cannot be traced hides behind a custom op.

While dynamo traces a call, `_plan` runs as ordinary Python on constants (dtypes, device, heads, head dims, the
relation of the lengths) and returns the name of a plan; the plan is a function on the `_plans` module that dynamo then
inlines. What may change later is guarded: the overrides of this thread or task (`overrides.HERE`), everything
process-wide through the epoch's token; measurements change that only where they order the backends of compiled code
otherwise. Lengths stay symbolic.

Traceable forwards are inlined. Others, and trainable ones that bring their own backward, become
the custom op of their family (`polyattn.dispatch.compile.custom_ops`), as calls of the other families always do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...contract import AttentionRequest
from ...contract.families import FAMILY_SPECS
from ...contract.lengths import head_axis
from ...contract.scalars import kinds
from ...epoch import EPOCH
from ...errors import InvalidInputError, PolyattnError
from ...selection import overrides
from ...semantics.block_maps import check_starts_given, lists_of
from ...semantics.reference import unit_rows
from ...semantics.validation import FLOATS, check_words
from ..binding import Chosen, choose, device_facts, dtype_name
from ..call_key import Static, runner
from ..device_facts import transform_around
from . import custom_ops as _ops  # noqa: F401 - that they are registered
from .errors import raising, refuse_derivatives
from .facts import TensorFacts, constants, fixed, fixed_number, map_fits, mask_fits, tensor_facts
from .op_plans import op_plan

__all__ = ["trace_block_sparse", "trace_dense", "trace_linear", "trace_varlen"]

_F = TypeVar("_F", bound=Callable[..., Any])
_Facts = tuple[Any, ...]
_Backend = str | None

_plans = types.ModuleType("polyattn._plans", "Functions that dynamo inlines, one per choice made while tracing.")
_numbers = itertools.count()
_names: dict[Any, str] = {}


def _constant(function: _F) -> _F:
    """`torch.compiler.assume_constant_result` without its import of dynamo, which costs as much as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Call(NamedTuple):
    """A call while it is traced, as constants. dynamo hands it over as a bare tuple.

    Attributes:
        tensors: `TensorFacts`. heads: H of query, key and value; dims: D of them. lengths: whether they agree.
        given: what else the family must know of its tensors.
    """

    tensors: _Facts
    heads: tuple[int, int, int]
    dims: tuple[int, int, int]
    relation: str
    lengths: str
    given: _Facts = ()


def _traced(family: str, call: _Facts, static: _Facts, backend: _Backend, scope: Any, *tensors: Any) -> Any:
    plan = getattr(_plans, _plan(family, call, static, backend, scope, EPOCH.token))
    return plan(*tensors)


def _relation(s_q: int, s_k: int) -> str:
    return "equal" if s_q == s_k else "one" if s_q == 1 else "fewer" if s_q < s_k else "more"


def _lengths(query: Tensor, key: Tensor, value: Tensor, s: int) -> str:
    agree = query.shape[0] == key.shape[0] and key.shape[0] == value.shape[0] and key.shape[s] == value.shape[s]
    return "agree" if agree else "differ"


def _heads(query: Tensor, key: Tensor, value: Tensor, axis: int) -> tuple[Any, ...]:
    return fixed(query.shape[axis], key.shape[axis], value.shape[axis])


def trace_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
    static: Static,
    backend: str | None,
    scope: overrides.Scope | None,
) -> Any:
    """A dense call being traced."""
    _check_ranks(query, key, value, 4)
    s, h = (1, 2) if static.layout == "BSHD" else (2, 1)
    s_q, s_k = query.shape[s], key.shape[s]
    call = (
        tensor_facts(query, key, value, attn_mask, sinks, out, h),
        _heads(query, key, value, h),
        _heads(query, key, value, 3),
        _relation(s_q, s_k),
        _lengths(query, key, value, s),
        (None if attn_mask is None else "fits" if mask_fits(attn_mask, query, h, s_q, s_k) else "does not fit",),
    )
    scope = overrides.current_scope() if scope is None else scope
    return _traced("dense", call, constants(static), backend, scope, query, key, value, out, attn_mask, sinks)


def trace_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
    lens: dict[str, Any],
    static: Static,
    backend: str | None,
) -> Any:
    """A packed call being traced. Token counts stay symbolic; the longest lengths may be constants or symbols."""
    _check_ranks(query, key, value, 3)
    cu_q, cu_k = lens["cu_seqlens_q"], lens["cu_seqlens_k"]
    max_q, max_k = lens["max_seqlen_q"], lens["max_seqlen_k"]
    call = (
        tensor_facts(query, key, value, attn_mask, sinks, out, 1),
        _heads(query, key, value, 1),
        _heads(query, key, value, 2),
        "equal" if cu_q is cu_k else "one" if max_q == 1 else "more",
        "agree",
        (cu_q.dtype, cu_k.dtype),
    )
    tensors = (query, key, value, out, attn_mask, sinks, cu_q, cu_k, max_q, max_k)
    return _traced("varlen", call, constants(static), backend, overrides.current_scope(), *tensors)


def trace_block_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    block_map: Tensor | None,
    lists: Any,
    block_shape: Any,
    block_valid: Tensor | None,
    block_starts: Tensor | None,
    static: Static,
    backend: str | None,
) -> Any:
    """A block-sparse call being traced. Its lists are checked when the graph runs."""
    _check_ranks(query, key, value, 4)
    turned = static.layout == "BSHD"
    if turned:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out = None if out is None else out.transpose(1, 2)
    pair = isinstance(block_shape, (tuple, list)) and len(block_shape) == 2
    whole = pair and isinstance(block_shape[0], int) and isinstance(block_shape[1], int)
    shape = (fixed_number(block_shape[0]), fixed_number(block_shape[1])) if whole else ()
    usable = whole and block_shape[0] > 0 and block_shape[1] > 0
    fits = "missing" if block_map is None else "fits"
    if block_map is not None and usable and not map_fits(block_map, query, key, block_shape):
        fits = "does not fit"
    listed = isinstance(lists, (tuple, list)) and len(lists) == 2
    call = (
        tensor_facts(query, key, value, None, None, out, 1),
        _heads(query, key, value, 1),
        _heads(query, key, value, 3),
        _relation(query.shape[2], key.shape[2]),
        _lengths(query, key, value, 2),
        (
            *(shape, usable, fits, None if block_map is None else block_map.dtype),
            *("missing" if lists is None else "a pair" if listed else "no pair", block_valid is not None),
            block_starts is not None,
        ),
    )
    counts, indices = (lists[0], lists[1]) if listed else (block_map, None)
    tensors = (query, key, value, out, counts, indices, block_valid, block_starts)
    result = _traced("block_sparse", call, constants(static), backend, overrides.current_scope(), *tensors)
    if not turned:
        return result
    return (result[0].transpose(1, 2), result[1].transpose(1, 2)) if static.return_lse else result.transpose(1, 2)


def trace_linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    given: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    scale: float | None,
    words: tuple[Any, Any, Any],
    backend: str | None,
) -> Any:
    """A linear call being traced. given: gate, beta, state, cu_seqlens; they are checked when the graph runs. words:
    method, state_layout, qk_norm."""
    _check_ranks(query, key, value, 4)
    gate, beta, state, cu_seqlens = given
    trains = gate.requires_grad or beta.requires_grad or (state is not None and state.requires_grad)
    call = (
        tensor_facts(query, key, value, None, None, out, 2, value),
        _heads(query, key, value, 2),
        _heads(query, key, value, 3),
        "one" if cu_seqlens is None and query.shape[1] == 1 else "equal",
        "agree" if query.shape[1] == key.shape[1] and _lengths(query, key, value, 1) == "agree" else "differ",
        (*words, torch.is_grad_enabled() and trains),
    )
    static, scope = constants(Static(scale=scale)), overrides.current_scope()
    return _traced("linear", call, static, backend, scope, query, key, value, out, gate, beta, state, cu_seqlens)


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
        make: Callable[..., str] = _refuse_ranks if family == "ranks" else functools.partial(_made, family)
        try:
            _names[known] = make(*said, around)
        except PolyattnError as error:
            _names[known] = _publish(raising(error))
    return _names[known]


def _made(family: str, call: _Facts, static: _Facts, backend: str | None, scope: overrides.Scope, around: str) -> str:
    """Choose for a call of any family, and publish its plan."""
    facts = _Call(*call)
    common, bound = TensorFacts(*facts.tensors), Static(*static)
    bound = bound.checked() if family != "varlen" else bound.checked(("THD",))
    fields = _FIELDS[family](facts)
    if family == "block_sparse":
        bound = bound._replace(layout="BHSD")
    shared = _request_fields(common, bound, facts.heads[0], facts.heads[1], facts.dims[0], facts.dims[2], around)
    asked = {"family": family, "s_relation": facts.relation, **shared, **fields}
    chosen = choose(AttentionRequest(**asked).normalised(), backend, scope, eager=False)
    if family == "dense":
        chosen = _exported(chosen)
        if _traceable(chosen):
            return _publish(_inline(chosen, common.autocast))
    refuse_derivatives(around)
    prepare = _PREPARED[family](facts) if family in _PREPARED else None
    return _publish(_opaque(chosen, common.autocast, prepare))


def _check_heads(call: _Call) -> None:
    h_q, h_k, h_v = call.heads
    d, dk, dv = call.dims
    if h_k != h_v or d != dk or not h_k or h_q % h_k:
        raise InvalidInputError(
            f"heads {h_q}, {h_k}, {h_v} and head dims {d}, {dk}, {dv} of query, key and value do not fit: "
            f"H_q must be a multiple of H_kv, key and value have equal heads, query and key equal head dims"
        )


def _dense_fields(call: _Call) -> dict[str, Any]:
    (mask,) = call.given
    if call.lengths != "agree" or mask == "does not fit":
        raise InvalidInputError(
            f"batch and key lengths of query, key and value {call.lengths}; attn_mask {mask or 'is not given'} "
            f"(allowed: [B|1, H_q|1, S_q, S_k]). Run the call once outside torch.compile for the exact sizes"
        )
    _check_heads(call)
    return {}


def _varlen_fields(call: _Call) -> dict[str, Any]:
    if set(call.given) != {torch.int32}:
        raise InvalidInputError(f"cu_seqlens int32 [N+1] are needed; cu_seqlens_q and cu_seqlens_k are {call.given}")
    _check_heads(call)
    return {}


def _block_sparse_fields(call: _Call) -> dict[str, Any]:
    shape, usable, fits, dtype, lists, valid, starts = call.given
    if call.lengths != "agree":
        raise InvalidInputError(
            "batch and key lengths of query, key and value differ. Run the call once outside torch.compile for the "
            "exact sizes"
        )
    _check_heads(call)
    if not usable:
        raise InvalidInputError("block_shape must be two numbers of tokens, (block_q, block_k), each 1 or more")
    if lists == "no pair":
        raise InvalidInputError("lists must be a pair (counts, indices)")
    if (fits == "missing") == (lists == "missing"):
        given = "neither" if lists == "missing" else "both"
        raise InvalidInputError(f"{given} of block_map and lists given: pass block_map or lists, (counts, indices)")
    if fits == "does not fit" or dtype not in (None, torch.bool):
        raise InvalidInputError(
            f"block_map ({dtype}) {fits}: bool [B|1, H_q|1, nQ, nK] is needed, for blocks of {shape}"
        )
    if starts:
        check_starts_given(map_given=lists == "missing", valid_given=valid)
    blocks = {"block_sizes": valid, "block_starts": starts, "block_shape": (int(shape[0]), int(shape[1]))}
    return {"block_map": True, **blocks}


def _linear_fields(call: _Call) -> dict[str, Any]:
    method, state_layout, qk_norm, trains = call.given
    check_words(method, state_layout, qk_norm)
    (h, h_k, h_v), (d, dk, _) = call.heads, call.dims
    if call.lengths != "agree" or h != h_k or d != dk or not h or h_v % h:
        raise InvalidInputError(
            "query and key must be [B, S, H, D] and value [B, S, H_v, D_v] with H_v a multiple of H; heads "
            f"{call.heads}, head dims {call.dims}, batches and lengths {call.lengths}"
        )
    one = call.relation == "one"
    fields = {"method": method, "state_layout": state_layout, "phase": "decode" if one else "prefill"}
    wanted = {"grad": ("query", "key", "value")} if trains else {}
    return {**fields, **wanted, "heads": h_v, "kv_heads": h}


_FIELDS: dict[str, Callable[[_Call], dict[str, Any]]] = {
    "dense": _dense_fields,
    "varlen": _varlen_fields,
    "block_sparse": _block_sparse_fields,
    "linear": _linear_fields,
}
"""What a family adds to a request, once it has looked at what is its own."""


def _request_fields(
    common: TensorFacts, static: Static, h_q: int, h_k: int, d: int, dv: int, around: str
) -> dict[str, Any]:
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


def _inline(chosen: Chosen, autocast: torch.dtype | None) -> Callable[..., Any]:
    run = runner(chosen, chosen.request.lse, autocast is not None, head_axis(chosen.request))

    def plan(query: Tensor, key: Tensor, value: Tensor, out: Any, attn_mask: Any, sinks: Any) -> Any:
        return run(query, key, value, attn_mask=attn_mask, sinks=sinks, out=out)

    return plan


def _opaque(chosen: Chosen, autocast: torch.dtype | None, prepare: Callable[..., Any] | None) -> Callable[..., Any]:
    """The op of a family. prepare: makes its arguments of those of the call."""
    text, request = op_plan(chosen.request, chosen.selection), chosen.request
    both = request.lse or FAMILY_SPECS[request.family].second == "state"
    dtype = None if autocast is None or request.dtype == "float64" else autocast
    op = getattr(torch.ops.polyattn, request.family)

    def plan(query: Tensor, key: Tensor, value: Tensor, out: Any, *given: Any) -> Any:
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        tensors = (query, key, value, *given)
        if prepare is not None:
            tensors = prepare(*tensors)
        result, second = op(*tensors, text)
        if out is not None:
            result = out.copy_(result)
        return (result, second) if both else result

    return plan


def _listed(call: _Call) -> Callable[..., Any] | None:
    if call.given[2] == "missing":
        return None

    def prepare(query: Tensor, key: Tensor, value: Tensor, block_map: Tensor, indices: None, *rest: Any) -> Any:
        return (query, key, value, *lists_of(block_map), *rest)

    return prepare


def _normalised(call: _Call) -> Callable[..., Any] | None:
    if not call.given[2]:
        return None

    def prepare(query: Tensor, key: Tensor, *rest: Any) -> Any:
        return (unit_rows(query), unit_rows(key), *rest)

    return prepare


_PREPARED: dict[str, Callable[[_Call], Callable[..., Any] | None]] = {"block_sparse": _listed, "linear": _normalised}
