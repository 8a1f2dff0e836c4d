"""A call over a cache under torch.compile: one op, which makes the eager call when the graph runs.

What decides who serves it, such as the lengths, is known only then; so the results are those of eager calls.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import KVPart, PagedTables
from ...contract.families import FAMILY_SPECS
from ...errors import InvalidInputError
from ...selection import overrides
from ..call_key import Static, backend_name
from .errors import INFERENCE_ONLY, refuse_transforms
from .facts import constants, fixed_int, out_fits
from .op_plans import returned, wide_dtype
from .trace import MAKERS, publish, traced

__all__ = ["CachedCall", "forward", "outputs", "trace_cached", "trained", "value_dim"]


class CachedCall(NamedTuple):
    """A call over a cache, as it came.

    Attributes:
        tensors: query and caches. given: the optional tensors by name, and `kv_parts`. more: the other arguments
            that are the family's own.
    """

    family: str
    tensors: tuple[Tensor, ...]
    tables: PagedTables
    given: dict[str, Any]
    more: dict[str, Any]
    static: Static
    backend: Any


def trained(call: CachedCall) -> tuple[Any, ...]:
    """What would want gradients, if there were any."""
    return (*call.tensors, *[call.given.get(name) for name in ("key", "value", "attn_mask", "sinks", "alibi")])


def value_dim(tensors: Sequence[Tensor], more: dict[str, Any]) -> Any:
    """D_v. A byte of a cache holds two numbers of FP4."""
    if len(tensors) == 2:
        return more["v_head_dim"]
    return tensors[2].shape[-1] * (2 if tensors[2].dtype == torch.uint8 else 1)


def trace_cached(call: CachedCall) -> Any:
    """A call over a cache being traced. It is checked when the graph runs, but for what an op cannot be given."""
    family, tensors, tables, given, more, static, backend = call
    more = {name: fixed_int(one) for name, one in more.items()}
    out, parts = given["out"], given["kv_parts"]
    optional = {name: one for name, one in given.items() if name not in ("out", "kv_parts")}
    names = (
        *(("query", "cache") if family == "mla" else ("query", "key_cache", "value_cache")),
        *PagedTables._fields[:3],
    )
    every = {**dict(zip(names, (*tensors, *tables[:3]), strict=True)), **optional, "out": out}
    odd = [name for name, one in every.items() if not (isinstance(one, Tensor) or (one is None and name in given))]
    if not isinstance(parts, (tuple, list)) or [one for one in parts if not isinstance(one, KVPart)]:
        odd, parts = [*odd, "kv_parts"], ()
    wants = fits = None
    if not odd:
        grad = torch.is_grad_enabled()
        wants = [True for one in trained(call) if grad and one is not None and one.requires_grad] != []
        fits = None if out is None else (out_fits(out, tensors[0], value_dim(tensors, more)), out.dtype)
    # A cache that the op writes is handed to it once: beside it, a part would see the cache as it was before.
    own = [*tensors[1:], None] if more.get("save_kv_cache") else []
    flat: list[Any] = []
    for part in parts:
        same = [True for one, cache in zip(part[5:], own, strict=False) if one is cache] == [True] * 3
        flat += [*part[:3], *((None,) * 3 if same else part[5:])]
    lengths = [n for part in parts for n in part[3:5]]
    said = (family, tuple(more.items()), tuple(odd), wants, fits, None if odd else tensors[0].dtype)
    scope = overrides.current_scope()
    return traced("cached", said, constants(static), backend, scope, tensors, tables, optional, flat, lengths, out)


def _made(call: Any, static: tuple[Any, ...], backend: Any, scope: overrides.Scope, around: str) -> str:
    family, items, odd, wants, fits, dtype = call
    more = dict(items)
    refuse_transforms(around)
    if odd:
        raise InvalidInputError(
            f"{odd[0]} of a compiled call over a cache must be a tensor, kv_parts a list of polyattn.KVPart; what is "
            f"optional may be None"
        )
    if wants:
        raise InvalidInputError(INFERENCE_ONLY)
    if fits not in (None, ("fits", dtype)):
        raise InvalidInputError(
            "out must be [T_q, H_q, D_v] in query's dtype, not expanded; a call outside torch.compile says the sizes"
        )
    checked = Static(*static).checked(("THD",))
    said = {"static": checked._asdict(), "more": more, "backend": backend_name(backend), "scope": scope}
    text, spec = json.dumps(said), FAMILY_SPECS[family]
    op = getattr(torch.ops.polyattn, f"{family}_saving" if more.get("save_kv_cache") else family)
    names = [one.name for one in spec.keywords if one.kind == "optional"]
    added = [one.name for one in spec.added]

    def plan(tensors: Any, tables: Any, optional: Any, parts: Any, lengths: Any, out: Tensor | None) -> Any:
        before, behind = [optional[name] for name in names], [optional[name] for name in added]
        result, lse = op(*tensors, *tables[:5], *before, parts, lengths, text, *behind)
        if out is not None:
            result = out.copy_(result)
        return (result, lse) if checked.return_lse else result

    return publish(plan)


MAKERS["cached"] = _made


@functools.lru_cache(maxsize=512)
def _said(plan: str) -> tuple[Static, dict[str, Any], str | None, overrides.Scope]:
    said = json.loads(plan)
    left, right = said["static"]["window"]
    return Static(**{**said["static"], "window": (left, right)}), said["more"], said["backend"], tuple(said["scope"])


@functools.cache
def _names(family: str) -> list[str]:
    return [one.name for one in getattr(torch.ops.polyattn, family).default._schema.arguments]


def forward(family: str, *given: Any) -> tuple[Tensor, Tensor]:
    """What the op of a family returns: (output, LSE), an LSE that nobody asked for is empty."""
    from ..paged import served

    spec, named = FAMILY_SPECS[family], dict(zip(_names(family), given, strict=False))  # torch leaves defaults out
    tensors = tuple(named[one.name] for one in spec.positional)
    tables = PagedTables(*(named[name] for name in PagedTables._fields[:5]))
    optional = {one.name: named.get(one.name) for one in (*spec.keywords, *spec.added) if one.kind == "optional"}
    flat, lengths = iter(named["kv_parts"]), iter(named["part_lengths"])
    parts = [
        KVPart(*(next(lengths if name.startswith("max") else flat) for name in KVPart._fields))
        for _ in range(len(named["part_lengths"]) // 2)
    ]
    static, more, backend, scope = _said(named["plan"])
    optional |= {"out": None, "kv_parts": parts}
    result = served(CachedCall(family, tensors, tables, optional, more, static, backend), scope)
    return returned(result, tensors[0], [one for one in given if isinstance(one, Tensor)])


def outputs(family: str, *given: Any) -> tuple[Tensor, Tensor]:
    """Empty tensors like those that `forward` returns."""
    static, more, _, _ = _said(given[_names(family).index("plan")])
    query, count = given[0], len(FAMILY_SPECS[family].positional)
    out = query.new_empty((*query.shape[:-1], value_dim(given[:count], more)))
    dtype = wide_dtype(query) if static.return_lse else torch.float32
    return out, query.new_empty(query.shape[:-1] if static.return_lse else (0,), dtype=dtype)
