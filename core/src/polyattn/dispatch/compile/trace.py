"""Attention under torch.compile: the choice is made while tracing, and what cannot be traced hides behind a custom op.

While dynamo traces a call, `_plan` runs as ordinary Python on constants (dtypes, device, heads, head dims, the
relation of the lengths) and returns the name of a plan; the plan is a function on the `_plans` module that dynamo then
inlines. What may change later is guarded: the overrides of this thread or task (`overrides.HERE`), everything
process-wide through the epoch's token; measurements change that only where they order the backends of compiled code
otherwise. Lengths stay symbolic.

Traceable forwards are inlined. Others, and trainable ones that bring their own backward, become
the custom op of their family (`polyattn.dispatch.compile.custom_ops`), as calls of the other families always do. Those
over a cache choose when the graph runs (`polyattn.dispatch.compile.trace_cached`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...contract.families import FAMILY_SPECS
from ...contract.lengths import head_axis
from ...contract.scalars import kinds
from ...epoch import EPOCH
from ...errors import InvalidInputError, PolyattnError, UnsupportedRequestError
from ...selection import overrides
from ...semantics.block_maps import block_shape_of, check_one_given, check_starts_given, lists_of
from ...semantics.linear_gates import computed_gates
from ...semantics.reference import unit_rows
from ...semantics.validation import FLOATS, LinearOptions, check_traced_gates
from ..binding import Chosen, choose
from ..call_key import NOTHING, Added, CallKey, Six, Static, request_of, runner
from ..device_facts import transform_around
from . import custom_ops as _ops  # noqa: F401 - that they are registered
from .errors import raising, refuse_transforms
from .facts import TensorFacts, added_facts, constants, fixed, fixed_int, gate_facts, map_fits, mask_fits, tensor_facts
from .op_plans import op_plan

__all__ = ["MAKERS", "Blocks", "publish", "trace_block_sparse", "trace_dense", "trace_linear", "trace_varlen", "traced"]

_F = TypeVar("_F", bound=Callable[..., Any])
_Facts = tuple[Any, ...]
_Backend = str | None

_plans = types.ModuleType("polyattn._plans", "Functions that dynamo inlines, one per choice made while tracing.")
_numbers = itertools.count()
_names: dict[Any, str] = {}
overrides.tracing = torch.compiler.is_dynamo_compiling


def _constant(function: _F) -> _F:
    """`torch.compiler.assume_constant_result` without its import of dynamo, which costs as much as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Call(NamedTuple):
    """A call while it is traced, as constants. dynamo hands it over as a bare tuple.

    Attributes:
        tensors: `TensorFacts`. heads: H of query, key and value; dims: D of them. lengths: whether they agree.
        given: what else the family must know of its tensors. added: `added_facts`.
    """

    tensors: _Facts
    heads: tuple[int, int, int]
    dims: tuple[int, int, int]
    relation: str
    lengths: str
    given: _Facts = ()
    added: tuple[Any, Any] = (None, None)


def traced(family: str, call: _Facts, static: _Facts, backend: _Backend, scope: Any, *tensors: Any) -> Any:
    """Run a call by the plan that is made of its facts."""
    plan = getattr(_plans, _plan(family, call, static, backend, scope, EPOCH.token))
    return plan(*tensors)


def _relation(s_q: int, s_k: int) -> str:
    return "equal" if s_q == s_k else "one" if s_q == 1 else "fewer" if s_q < s_k else "more"


def _lengths(query: Tensor, key: Tensor, value: Tensor, s: int) -> str:
    agree = query.shape[0] == key.shape[0] and key.shape[0] == value.shape[0] and key.shape[s] == value.shape[s]
    return "agree" if agree else "differ"


def _heads(query: Tensor, key: Tensor, value: Tensor, axis: int) -> tuple[Any, ...]:
    return fixed(query.shape[axis], key.shape[axis], value.shape[axis])


def _facts(
    six: Six, heads: int, length: int, relation: str, given: _Facts, added: Added = NOTHING, like: Any = None
) -> _Facts:
    """A `_Call`. heads, length: axes, of which packed tokens share one. like: as `tensor_facts`."""
    query, key, value = six[:3]
    return (
        tensor_facts(six, heads, like),
        _heads(query, key, value, heads),
        _heads(query, key, value, query.ndim - 1),
        relation,
        "agree" if query.ndim == 3 else _lengths(query, key, value, length),
        given,
        added_facts(added, query, key, heads, length),
    )


def trace_dense(
    six: Six, static: Static, backend: str | None, scope: overrides.Scope | None, added: Added = NOTHING
) -> Any:
    """A dense call being traced."""
    query, key, value, attn_mask, sinks, out = six
    _check_ranks(query, key, value, 4)
    s, h = (1, 2) if static.layout == "BSHD" else (2, 1)
    s_q, s_k = query.shape[s], key.shape[s]
    fits = None if attn_mask is None else "fits" if mask_fits(attn_mask, query, h, s_q, s_k) else "does not fit"
    call = _facts(six, h, s, _relation(s_q, s_k), (fits,), added)
    scope = overrides.current_scope() if scope is None else scope
    more = (added.get("alibi"), added.get("q_segments"), added.get("k_segments"))
    return traced("dense", call, constants(static), backend, scope, query, key, value, out, attn_mask, sinks, *more)


def trace_varlen(six: Six, lens: dict[str, Any], static: Static, backend: str | None) -> Any:
    """A packed call being traced. Token counts stay symbolic; the longest lengths may be constants or symbols."""
    query, key, value, attn_mask, sinks, out = six
    _check_ranks(query, key, value, 3)
    cu_q, cu_k = lens["cu_seqlens_q"], lens["cu_seqlens_k"]
    max_q, max_k = lens["max_seqlen_q"], lens["max_seqlen_k"]
    how = "equal" if cu_q is cu_k else "one" if max_q == 1 else "more"
    call = _facts(six, 1, 0, how, (cu_q.dtype, cu_k.dtype), lens)
    tensors = (query, key, value, out, attn_mask, sinks, cu_q, cu_k, max_q, max_k, lens.get("alibi"))
    return traced("varlen", call, constants(static), backend, overrides.current_scope(), *tensors)


class Blocks(NamedTuple):
    """What a block-sparse call says of its blocks: the arguments of that name, and `lists`."""

    map: Any
    lists: Any
    shape: Any
    valid: Any
    starts: Any


def trace_block_sparse(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor | None, blocks: Blocks, static: Static, backend: str | None
) -> Any:
    """A block-sparse call being traced. Its lists are checked when the graph runs."""
    _check_ranks(query, key, value, 4)
    turned = static.layout == "BSHD"
    if turned:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out = None if out is None else out.transpose(1, 2)
    block_map, lists, shape = blocks.map, blocks.lists, blocks.shape
    pair = isinstance(shape, (tuple, list)) and len(shape) == 2
    whole = pair and isinstance(shape[0], int) and isinstance(shape[1], int)
    usable = whole and shape[0] > 0 and shape[1] > 0
    fits = "fits"
    if block_map is not None and usable and not map_fits(block_map, query, key, shape):
        fits = "does not fit"
    listed = isinstance(lists, (tuple, list)) and len(lists) == 2
    given = (
        *((fixed_int(shape[0]), fixed_int(shape[1])) if whole else None, fits, block_map is not None),
        *(None if block_map is None else block_map.dtype, lists is not None, listed),
        *(blocks.valid is not None, blocks.starts is not None),
    )
    call = _facts((query, key, value, None, None, out), 1, 2, _relation(query.shape[2], key.shape[2]), given)
    counts, indices = (lists[0], lists[1]) if listed else (block_map, None)
    tensors = (query, key, value, out, counts, indices, blocks.valid, blocks.starts)
    result = traced("block_sparse", call, constants(static), backend, overrides.current_scope(), *tensors)
    if not turned:
        return result
    return (result[0].transpose(1, 2), result[1].transpose(1, 2)) if static.return_lse else result.transpose(1, 2)


def trace_linear(
    four: Sequence[Any], given: dict[str, Any], more: dict[str, Any], scale: Any, options: LinearOptions, backend: Any
) -> Any:
    """A linear call being traced. four: query, key, value, out. given: gate, beta, state, cu_seqlens; they are checked
    when the graph runs. more: raw gates, which are computed in the graph, and what steps of serving have, which are not
    compiled."""
    query, key, value, out = four
    _check_ranks(query, key, value, 4)
    raw = (given["gate"], given["beta"], more["a_log"], more["dt_bias"])
    options, facts = gate_facts(options, query, value, *raw)
    getattr(_plans, _plan("gates", facts, tuple(options), EPOCH.token))()
    if more["a_log"] is not None:
        gates = computed_gates(*raw, gate_bound=options.gate_bound, beta_range=options.beta_range)
        given = {**given, **dict(zip(("gate", "beta"), gates, strict=True))}
    gate, beta, state, cu_seqlens = given["gate"], given["beta"], given["state"], given["cu_seqlens"]
    trains = gate.requires_grad or beta.requires_grad or (state is not None and state.requires_grad)
    how = "one" if cu_seqlens is None and query.shape[1] == 1 else "equal"
    lengths = "agree" if query.shape[1] == key.shape[1] else "differ"
    serves = more["state_slots"] is not None or more["parents"] is not None or options[3]
    said = (*options[:3], torch.is_grad_enabled() and trains, lengths, serves)
    call = _facts((query, key, value, None, None, out), 2, 1, how, said, like=value)
    static, scope = constants(Static(scale=scale)), overrides.current_scope()
    return traced("linear", call, static, backend, scope, query, key, value, out, gate, beta, state, cu_seqlens)


def _check_ranks(query: Tensor, key: Tensor, value: Tensor, rank: int) -> None:
    if query.ndim != rank or key.ndim != rank or value.ndim != rank:
        getattr(_plans, _plan("ranks", query.ndim, key.ndim, value.ndim, rank, EPOCH.token))()


def _refuse_ranks(query: int, key: int, value: int, rank: int, around: str) -> str:
    raise InvalidInputError(f"query, key and value have {query}, {key} and {value} dimensions; {rank} are needed")


def _gates(said: tuple[Any, ...], options: tuple[Any, ...], around: str) -> str:
    check_traced_gates(said, LinearOptions(*options))
    return publish(lambda: None)


MAKERS: dict[str, Callable[..., str]] = {"ranks": _refuse_ranks, "gates": _gates}
"""What makes a plan that is none of a family, by name."""


@_constant
def _plan(*name: Any) -> str:
    # It runs as ordinary Python, inside the transforms that dynamo is tracing through.
    around = transform_around()
    name = (*name, around)
    known = name, kinds(name)
    if known not in _names:
        family, *said, _, _ = name
        make = MAKERS.get(family) or functools.partial(_made, family)
        try:
            _names[known] = make(*said, around)
        except PolyattnError as error:
            _names[known] = publish(raising(error))
    return _names[known]


def _made(family: str, call: _Facts, static: _Facts, backend: str | None, scope: overrides.Scope, around: str) -> str:
    """Choose for a call of any family, and publish its plan."""
    facts = _Call(*call)
    common, bound = TensorFacts(*facts.tensors), Static(*static)
    bound = bound.checked() if family != "varlen" else bound.checked(("THD",))
    fields = _FIELDS[family](facts)
    if family == "block_sparse":
        bound = bound._replace(layout="BHSD")
    request = request_of(_key(common, facts, around), bound, family=family, **fields, **_added_fields(facts))
    chosen = choose(request, backend, scope, eager=False)
    if family == "dense":
        chosen = _exported(chosen)
        if _traceable(chosen):
            return publish(_inline(chosen, common.autocast))
    refuse_transforms(around)
    return publish(_opaque(chosen, common.autocast, _prepared(family, facts)))


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
    shape, fits, mapped, dtype, lists, listed, valid, starts = call.given
    if call.lengths != "agree":
        raise InvalidInputError(
            "batch and key lengths of query, key and value differ. Run the call once outside torch.compile for the "
            "exact sizes"
        )
    _check_heads(call)
    shape = block_shape_of(shape)
    if lists and not listed:
        raise InvalidInputError("lists must be a pair (counts, indices)")
    check_one_given(map_given=mapped, lists_given=lists)
    if fits != "fits" or dtype not in (None, torch.bool):
        raise InvalidInputError(
            f"block_map ({dtype}) {fits}: bool [B|1, H_q|1, nQ, nK] is needed, for blocks of {shape}"
        )
    if starts:
        check_starts_given(map_given=mapped, valid_given=valid)
    return {"block_map": True, "block_sizes": valid, "block_starts": starts, "block_shape": shape}


def _linear_fields(call: _Call) -> dict[str, Any]:
    method, state_layout, _, trains, lengths, serves = call.given
    if serves:
        raise UnsupportedRequestError(
            "linear_attention with state_slots, parents or every_state is not compiled: it is a step of serving. Call "
            "it outside torch.compile, or give one state for each sequence"
        )
    (h, h_k, h_v), (d, dk, d_v) = call.heads, call.dims
    lengths = "differ" if "differ" in (lengths, call.lengths) else "agree"
    if lengths == "differ" or h != h_k or d != dk or not h or h_v % h or not d or not d_v:
        raise InvalidInputError(
            "query and key must be [B, S, H, D] and value [B, S, H_v, D_v] with H_v a multiple of H, all at least 1; "
            f"heads {call.heads}, head dims {call.dims}, batches and lengths {lengths}"
        )
    phase = "decode" if call.relation == "one" else "prefill"
    fields: dict[str, Any] = {"method": method, "state_layout": state_layout, "phase": phase}
    return {**fields, **({"grad": ("query", "key", "value")} if trains else {}), "heads": h_v, "kv_heads": h}


_FIELDS: dict[str, Callable[[_Call], dict[str, Any]]] = {
    "dense": _dense_fields,
    "varlen": _varlen_fields,
    "block_sparse": _block_sparse_fields,
    "linear": _linear_fields,
}
"""What a family adds to a request, once it has looked at what is its own."""


def _added_fields(call: _Call) -> dict[str, Any]:
    slopes, how = call.added
    if slopes is not None and (slopes[0] != "fits" or slopes[1] not in FLOATS or slopes[2]):
        raise InvalidInputError(
            f"alibi ({slopes[1]}) must be [{call.heads[0]}] (H_q), one slope per query head, of a float dtype, on the "
            "device of query, and want no gradient"
        )
    if how is not None and (how[0] != "fits" or set(how[1]) != {torch.int32}):
        raise InvalidInputError(
            f"segments ({how[1]}) must be int32 [B, S_q] and [B, S_k] on the device of query, one tensor or a pair. "
            "Run the call once outside torch.compile for the exact sizes"
        )
    return {"alibi": slopes is not None, "segments": "" if how is None else how[2]}


def _key(common: TensorFacts, call: _Call, around: str) -> CallKey:
    """What the tensors of a call say, checked. Of masks and sinks a `CallKey` has the dtypes and the gradients."""
    device, dtypes, misplaced, mask, sinks, out, grads, autocast, (deterministic, _), (empty, large) = common
    if misplaced:
        raise InvalidInputError(misplaced)
    if mask is not None and mask != torch.bool and mask not in FLOATS:
        raise InvalidInputError(f"attn_mask is {mask}; bool (True = attend) or a float to be added is needed")
    if sinks is not None and (sinks[0] != "fits" or sinks[1] not in FLOATS):
        raise InvalidInputError(
            f"sinks must be [{call.heads[0]}] (H_q) and of a float dtype ({sinks[1]}): one per query head"
        )
    if autocast is None and len(set(dtypes)) != 1:
        raise InvalidInputError(f"query, key and value have dtypes {dtypes}; cast them to one, or use autocast")
    if around in ("grad", "gradgrad"):
        # dynamo does not say which of a transform's tensors require a gradient.
        grads = (True, True, True, mask is not None and mask != torch.bool, sinks is not None)
    if any(grads) and out is not None:
        raise InvalidInputError("out= cannot be used while gradients are wanted; drop it, or run under torch.no_grad()")
    dtype = dtypes[0] if autocast is None or dtypes[0] == torch.float64 else autocast
    if out is not None and out != ("fits", dtype):
        like = f"{dtype} and shaped like query, with the last size of value"
        raise InvalidInputError(f"out ({out[1]}) must be {like}, and not expanded; it {out[0]}")
    masked = None if mask is None else (True, mask, device, None, grads[3], Tensor)
    sunk = None if sinks is None else (None, sinks[1], device, None, grads[4], Tensor)
    where = (torch.device(device),) * 3
    said = (call.relation, True, empty, large, (True, True, True), True, grads[:3], masked, sunk, None, None, False)
    return CallKey._make((True, *[dtype] * 3, *where, *call.heads, *call.dims, *said, around, deterministic))


def _traceable(chosen: Chosen) -> bool:
    return chosen.bound.traceable and not (chosen.bound.backward is not None and chosen.request.grad)


def _exported(chosen: Chosen) -> Chosen:
    """A saved program is to run without polyattn where that can be: autograd goes through such a forward itself."""
    if not (torch.compiler.is_exporting() and chosen.bound.exportable):
        return chosen
    return dataclasses.replace(chosen, bound=dataclasses.replace(chosen.bound, backward=None))


def publish(plan: Callable[..., Any]) -> str:
    """The name of a plan that dynamo will inline."""
    name = f"plan_{next(_numbers)}"
    setattr(_plans, name, plan)
    return name


def _inline(chosen: Chosen, autocast: torch.dtype | None) -> Callable[..., Any]:
    run = runner(chosen, chosen.request.lse, autocast is not None, head_axis(chosen.request))

    alibi, segments = chosen.request.alibi, chosen.request.segments

    def plan(
        query: Tensor, key: Tensor, value: Tensor, out: Any, attn_mask: Any, sinks: Any, slopes: Any, q: Any, k: Any
    ) -> Any:
        added = {"alibi": slopes} if alibi else {}
        if segments:
            added = {**added, "q_segments": q, "k_segments": k}
        return run(query, key, value, attn_mask=attn_mask, sinks=sinks, out=out, **added)

    return plan


def _opaque(chosen: Chosen, autocast: torch.dtype | None, prepare: Callable[..., Any] | None) -> Callable[..., Any]:
    """The op of a family. prepare: makes its arguments of those of the call."""
    text, request = op_plan(chosen.request, chosen.selection), chosen.request
    spec = FAMILY_SPECS[request.family]
    both, count = request.lse or spec.second == "state", len(spec.arguments)
    dtype = None if autocast is None or request.dtype == "float64" else autocast
    op = getattr(torch.ops.polyattn, request.family)

    def plan(query: Tensor, key: Tensor, value: Tensor, out: Any, *given: Any) -> Any:
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        tensors = (query, key, value, *given)
        if prepare is not None:
            tensors = prepare(*tensors)
        result, second = op(*tensors[:count], text, *tensors[count:])
        if out is not None:
            result = out.copy_(result)
        return (result, second) if both else result

    return plan


def _prepared(family: str, call: _Call) -> Callable[..., Any] | None:
    """What makes the arguments of an op of those of its call where they differ: lists of a map, queries and keys of
    length 1."""
    if family not in ("block_sparse", "linear") or not call.given[2]:
        return None

    def prepare(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        if family == "linear":
            return (unit_rows(query), unit_rows(key), value, *rest)
        return (query, key, value, *lists_of(rest[0]), *rest[2:])

    return prepare
