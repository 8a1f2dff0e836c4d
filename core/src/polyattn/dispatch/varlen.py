"""`varlen_attention`: sequences packed along one axis."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..adapters.alignment import aligned
from ..adapters.device import capturing
from ..contract import AttentionRequest, scalars
from ..contract.lengths import extent_of
from ..selection import overrides
from ..semantics import validation
from . import call_key
from .binding import Asked, explained_by
from .bound_table import BoundTable
from .compile.facts import counted
from .compile.symbolic import recorded_call
from .compile.trace import trace_varlen
from .device_facts import transform

__all__ = ["VarlenSite", "packed_key", "varlen_attention", "varlen_request"]

# By dynamo, or by an export without it.
_is_tracing = torch.compiler.is_compiling
_scope = overrides.SCOPE.get
_LENS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class VarlenSite:
    """A packed call with its static arguments bound."""

    __slots__ = ("_argument", "_check", "_scope", "_table", "static")

    def __init__(
        self, static: call_key.Static, backend: str | None = None, scope: overrides.Scope | None = None
    ) -> None:
        self.static = static.checked(("THD",))
        self._argument = call_key.backend_name(backend)
        self._scope = _scope() if scope is None else scope
        overrides.reach(self._scope)
        self._table: BoundTable[call_key.Found] = BoundTable()
        self._check = validation.PackedCheck()

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, out: Any, **lens: Any
    ) -> Any:
        # Contents may differ at every call, so they are checked at every call; the shapes with them.
        tensors = isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
        if not tensors:
            given = {"attn_mask": attn_mask, "sinks": sinks, "out": out, **lens}
            node = recorded_call(varlen_attention, self, query, key, value, **given)
            if node is not None:
                return node
        q, k, v = call_key.autocasted(query, key, value)
        self._check(q, k, v, attn_mask=attn_mask, sinks=sinks, out=out, **lens)
        if validation.has_shapes_only(query) or counted():
            return trace_varlen((query, key, value, attn_mask, sinks, out), lens, self.static, self._argument)
        validation.check_lengths(q, k, **lens)
        signature = packed_key(query, key, value, attn_mask, sinks, out, lens)
        entry = self._table.get(signature)
        if entry is None:
            asked = functools.partial(varlen_request, self.static, q, k, v, attn_mask, sinks, lens)
            cast = call_key.autocast_dtype(query.device.type) is not None
            entry = call_key.found(self._table, signature, asked, self._argument, self._scope, autocast=cast)
        run = entry.chosen.ranged("varlen_attention", entry.run)
        return run(query, key, value, attn_mask=attn_mask, sinks=sinks, out=out, **lens)


def _packed_relation(lens: dict[str, Any]) -> str:
    """Of the sequences' lengths. `equal` needs proof (one tensor); `more` stands for any mixture."""
    if lens["cu_seqlens_q"] is lens["cu_seqlens_k"]:
        return "equal"
    return "one" if lens["max_seqlen_q"] == 1 else "more"


def packed_key(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Any, out: Any, lens: dict[str, Any]
) -> tuple[Any, ...]:
    """The complete signature of a packed call, whose tensors are checked already: a `CallKey` as a bare tuple, and what
    decides of slopes."""
    return (
        type(query) is type(key) is type(value) is Tensor,
        *(query.dtype, key.dtype, value.dtype),
        *(query.device, key.device, value.device),
        *(query.shape[1], key.shape[1], value.shape[1]),
        *(query.shape[2], key.shape[2], value.shape[2]),
        _packed_relation(lens),
        True,
        not (query.numel() and key.numel() and value.numel()),
        max(query.numel(), key.numel(), value.numel()) >= call_key.LARGE,
        (True, True, True),
        (type(query) is not Tensor and validation.has_shapes_only(query)) or aligned(query, key, value),
        (query.requires_grad, key.requires_grad, value.requires_grad) if call_key.grad_on() else None,
        None if mask is None else (True, mask.dtype, mask.device, mask.layout, mask.requires_grad, type(mask)),
        call_key.sinks_key(sinks),
        None if out is None else True,
        *(call_key.autocast_dtype(query.device.type), capturing(query.device.type)),
        transform(query, key, value, mask, sinks),
        call_key.torch_deterministic(),
        call_key.sinks_key(lens.get("alibi")),
    )


def varlen_request(
    static: call_key.Static, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, lens: dict[str, Any]
) -> AttentionRequest:
    """What a packed call asks for. Its tensors are checked already."""
    *said, alibi = packed_key(q, k, v, mask, sinks, None, lens)
    return call_key.request_of(call_key.CallKey._make(said), static, family="varlen", alibi=alibi is not None)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool | str = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    out: Tensor | None = None,
    chunk: int = 0,
    alibi: Tensor | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Softmax attention on sequences packed along one axis.

    Args:
        query: [T_q, H_q, D]; key: [T_k, H_kv, D]; value: [T_k, H_kv, D_v].
        cu_seqlens_q, cu_seqlens_k: int32 [N+1], cumulative lengths from 0 to T; pass one tensor for self-attention.
            Contents are checked on the CPU, on a device only under POLYATTN_VALIDATE=1.
        max_seqlen_q, max_seqlen_k: host ints, at least the longest sequence.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k], read up to each sequence's lengths.
        sinks: [H_q]. out: [T_q, H_q, D_v]. The rest as `attention`; chunk and alibi count along each sequence.

    Returns:
        out [T_q, H_q, D_v], or (out, lse [T_q, H_q]).

    Raises:
        As `attention`.
    """
    static = (causal, window, softcap, scale, "THD", dropout_p, return_lse, deterministic, chunk, None, batch_invariant)
    tracing = _is_tracing()
    if not tracing and not type(max_seqlen_q) is type(max_seqlen_k) is int:
        max_seqlen_q = scalars.length("max_seqlen_q", max_seqlen_q)
        max_seqlen_k = scalars.length("max_seqlen_k", max_seqlen_k)
    lens: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    if alibi is not None:
        lens["alibi"] = alibi
    if tracing:
        return trace_varlen((query, key, value, attn_mask, sinks, out), lens, call_key.Static(*static), backend)
    site: VarlenSite = call_key.site_of(VarlenSite, static, backend)
    return site(query, key, value, attn_mask, sinks, out, **lens)


def _asked(query: Any, key: Any, value: Any, attn_mask: Any, sinks: Any, out: Any, backend: Any, **given: Any) -> Asked:
    lens = {name: given.pop(name) for name in _LENS}
    if (alibi := given.pop("alibi")) is not None:
        lens["alibi"] = alibi
    static = call_key.Static(layout="THD", **given).checked(("THD",))
    query, key, value = call_key.autocasted(query, key, value)
    validation.check_varlen(query, key, value, attn_mask=attn_mask, sinks=sinks, out=out, **lens)
    validation.check_lengths(query, key, **lens)
    request = varlen_request(static, query, key, value, attn_mask, sinks, lens)
    return request, backend, extent_of(request)(query, **lens)


explained_by(varlen_attention, _asked)
