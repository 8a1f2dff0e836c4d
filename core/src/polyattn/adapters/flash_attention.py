"""From a request to FlashAttention's calls: what all generations and builds of all vendors share.

For adapters of plugins: `bind_flash_attention(request, kernels)` with the
`FlashAttentionKernels` of one build. They agree on the layouts
([B, S, H, D], [T, H, D], pages [pages, page_size, H_kv, D]), on bottom-right alignment and inclusive windows (S3, S4),
and on a natural-log float32 LSE with the heads before the positions ([B, H_q, S_q] and [H_q, T_q]). They differ in
names, in what a row without keys has for an LSE, and in which sinks they take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..contract import AttentionRequest, Bound, PagedTables
from ..semantics.masks import may_have_empty_rows
from ..semantics.merge_lse import merge
from .alignment import align16, aligned
from .flash_split import MOST, OutAndLSE, Packed, by_samples, differentiable, gradient, packed_in_pieces
from .gather_kv import empty_result
from .new_rows import append_new_kv
from .scale_sign import with_positive_scale
from .strides import normalise_unit_strides, normalise_unit_strides_bshd

__all__ = [
    "FlashAttentionKernels",
    "OutAndLSE",
    "Packed",
    "bind_dropout",
    "bind_flash_attention",
    "constant_int32",
    "dense_by_packed",
    "uniform_cu_seqlens",
]


class FlashAttentionKernels(Protocol):
    """One build's functions, loaded for one request: those of its family are there. Every forward takes `lse`, whether
    it is wanted, sinks that it takes, `out` where it writes there, and returns (out, lse or None).

    Attributes:
        empty: the LSE that it writes, and its backward expects, for a row that sees no key.
        writes_out: its forwards take `out`. simple: the shortest way to `dense` without an LSE; None = `dense` itself.
    """

    @property
    def empty(self) -> float: ...
    @property
    def writes_out(self) -> bool: ...
    @property
    def simple(self) -> Callable[..., Tensor] | None: ...

    def takes_sinks(self, sinks: Tensor, query: Tensor) -> bool:
        """Whether its forwards take these sinks as exactly as they are."""
        ...

    @property
    def dense(self) -> Callable[..., OutAndLSE]:
        """(query, key, value) [B, S, H, D]; the LSE [B, H_q, S_q]."""
        ...

    @property
    def packed(self) -> Callable[..., OutAndLSE]:
        """(query, key, value, `Packed`) [T, H, D]; the LSE [H_q, T_q]."""
        ...

    @property
    def paged(self) -> Callable[..., OutAndLSE]:
        """(query [T_q, H_q, D], keys and values [pages, page_size, H_kv, D | D_v], `PagedTables`); LSE [H_q, T_q]."""
        ...

    @property
    def latent(self) -> Callable[..., OutAndLSE]:
        """(query [T_q, H_q, D_c + D_r], rows [pages, page_size, 1, D_c + D_r], `PagedTables`); the LSE [H_q, T_q]."""
        ...

    def gradient(self, *tensors: Tensor, where: Packed | None) -> tuple[Tensor, Tensor, Tensor]:
        """(dquery, dkey, dvalue) from dout, query, key, value, out and the LSE; packed where `where` is given."""
        ...


def bind_flash_attention(request: AttentionRequest, kernels: Callable[[AttentionRequest], Any]) -> Bound:
    """Serve a dense, varlen, paged or mla request by a kernel with FlashAttention's arguments.

    Handled here: layouts, the sign of the scale, alignment, batches above 65,535, sinks from the LSE, new rows, empty
    calls, `out`, and the LSE of rows without keys.

    Args:
        kernels: makes the `FlashAttentionKernels` of one build for a request. It is called once, with a scale that is
            None or above 0; what it raises (BackendUnavailableError from `load`) is the bind's error.
    """
    bind_by_family = {"dense": _dense, "varlen": _packed, "paged": _paged, "mla": _latent}
    bind = bind_by_family[request.family]
    return with_positive_scale(request, lambda positive: bind(_Call(positive, kernels(positive))))


def bind_dropout(request: AttentionRequest, kernel: Callable[..., Any]) -> Bound:
    """Serve a dense or varlen request with dropout, whose random state only the library's own autograd knows.

    Args:
        kernel: the differentiable function of the family, told all that is no tensor; it returns out, or a tuple that
            begins with it.
    """
    swapped = request.layout == "BHSD" and request.family == "dense"

    def alone(*tensors: Tensor, **where: Any) -> Tensor:
        found = kernel(*tensors, **where)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result

    def forward(
        *tensors: Tensor, attn_mask: None = None, sinks: None = None, out: Tensor | None = None, **where: Any
    ) -> Tensor:
        given = tuple(t.transpose(1, 2) for t in tensors) if swapped else tensors
        result = differentiable(alone, Packed(**where) if where else None, *given)
        result = result.transpose(1, 2) if swapped else result
        return result if out is None else out.copy_(result)

    return Bound(forward)


def dense_by_packed(request: AttentionRequest, packed: Callable[..., OutAndLSE]) -> Callable[..., OutAndLSE]:
    """Make `FlashAttentionKernels.dense` of a build that has `packed` alone: a batch is B sequences of one length.

    Args:
        request: dense. packed: `FlashAttentionKernels.packed` of the build.

    Returns:
        A function of query, key, value [B, S, H, D], which returns out [B, S_q, H_q, D_v] and the LSE [B, H_q, S_q].
    """

    def dense(query: Tensor, key: Tensor, value: Tensor, *, lse: bool, **extra: Any) -> OutAndLSE:
        (B, S_q), S_k = query.shape[:2], key.shape[1]
        device = query.device
        where = Packed(
            uniform_cu_seqlens(request, B, S_q, device), uniform_cu_seqlens(request, B, S_k, device), S_q, S_k
        )
        result, found = packed(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), where, lse=lse, **extra)
        result = result.view(B, S_q, *result.shape[1:])
        return result, None if found is None else found.view(-1, B, S_q).transpose(0, 1)

    return dense


class _Call:
    """A request, and the functions that serve it."""

    def __init__(self, request: AttentionRequest, kernels: FlashAttentionKernels) -> None:
        self.request, self.kernels = request, kernels
        self.with_lse = request.lse or bool(request.grad)

    def attend(
        self,
        function: Callable[..., OutAndLSE],
        *inputs: Any,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        empties: bool = True,
    ) -> OutAndLSE:
        """A forward with its sinks, from its LSE where the kernel does not take them, and its LSE as polyattn's."""
        kernels = self.kernels
        if sinks is None and out is None:
            result, lse = function(*inputs, lse=self.with_lse)
            return (result, None) if lse is None else (result, self._natural(lse, empties))
        late = sinks is not None and (self.with_lse or not kernels.takes_sinks(sinks, inputs[0]))
        extra = {} if sinks is None or late else {"sinks": sinks}
        if out is not None and not late and kernels.writes_out and aligned(out):
            extra["out"] = out
        result, lse = function(*inputs, lse=self.with_lse or late, **extra)
        lse = None if lse is None else self._natural(lse, empties)
        if late and lse is not None:
            result, lse = merge([result], [lse.transpose(-1, -2)], sinks=sinks)
            lse = lse.transpose(-1, -2)
        if out is not None and "out" not in extra:
            result = out.copy_(result)
        return result, lse

    def _natural(self, lse: Tensor, empties: bool) -> Tensor:
        """-inf for rows without keys, where there may be such rows."""
        empty = self.kernels.empty
        return lse.masked_fill(lse == empty, -torch.inf) if empties and empty != -torch.inf else lse

    def gradient(self, dout: Tensor, *tensors: Tensor, where: Packed | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """From the out and the LSE that it is given; the LSE has heads before positions."""
        *others, lse = tensors
        if self.kernels.empty != -torch.inf:
            lse = lse.masked_fill(lse == -torch.inf, self.kernels.empty)
        tensors = normalise_unit_strides(align16(dout), *others)
        return gradient(self.kernels.gradient, where, *tensors, lse.contiguous())


def _dense(call: _Call) -> Bound:
    request, kernels = call.request, call.kernels
    swapped, empties = request.layout == "BHSD", may_have_empty_rows(request)
    in_pieces = functools.partial(by_samples, kernels.dense, MOST)

    def turned(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if swapped else tensor

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        tensors = normalise_unit_strides_bshd(turned(query), turned(key), turned(value))
        room = None if out is None else turned(out)
        kernel = kernels.dense if query.shape[0] <= MOST else in_pieces
        result, lse = call.attend(kernel, *tensors, sinks=sinks, out=room, empties=empties)
        result = turned(result) if out is None else out
        if not call.with_lse or lse is None:
            return result
        return result, lse if swapped else lse.transpose(1, 2)

    def backward(
        dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, attn_mask: None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (turned(t) for t in (dout, query, key, value, out))
        dq, dk, dv = call.gradient(*tensors, lse if swapped else lse.transpose(1, 2))
        return turned(dq), turned(dk), turned(dv)

    return Bound(forward, backward if request.grad else None, simple=_simple(call, swapped))


def _simple(call: _Call, swapped: bool) -> Callable[..., Tensor] | None:
    if call.with_lse or call.request.sinks:
        return None
    dense = call.kernels.dense

    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dense(query, key, value, lse=False)[0]

    function = call.kernels.simple or alone

    def simple(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = normalise_unit_strides_bshd(query, key, value)
        if query.shape[0] <= MOST:
            return function(query, key, value)
        result: Tensor = by_samples(function, MOST, query, key, value)[0]
        return result

    def turned(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return simple(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)

    return turned if swapped else simple


def _packed(call: _Call) -> Bound:
    request, packed = call.request, call.kernels.packed
    lone = 1 in (request.heads, request.kv_heads)
    in_pieces = functools.partial(packed_in_pieces, packed, call.kernels.empty)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        attn_mask: None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        where = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        if lone or query.shape[0] == 1 or key.shape[0] == 1:
            query, key, value = normalise_unit_strides(query, key, value)
        kernel = packed if cu_seqlens_q.shape[0] - 1 <= MOST else in_pieces
        result, lse = call.attend(kernel, query, key, value, where, sinks=sinks, out=out)
        return (result, lse.transpose(0, 1)) if call.with_lse and lse is not None else result

    def backward(*tensors: Tensor, attn_mask: None = None, **where: Any) -> tuple[Tensor, Tensor, Tensor]:
        *others, lse = tensors
        return call.gradient(*others, lse.transpose(0, 1), where=Packed(**where))

    return Bound(forward, backward if request.grad else None)


def _paged(call: _Call) -> Bound:
    request, kernel = call.request, call.kernels.paged
    swapped, odd = request.kv_layout == "HND", request.misaligned

    def forward(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: None = None,
        sinks: Tensor | None = None,
        k_scale: None = None,
        v_scale: None = None,
        out: Tensor | None = None,
    ) -> Any:
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(request, query, out)
        caches: tuple[Tensor, ...] = (key_cache, value_cache)
        if key is not None:
            caches, tables = append_new_kv(request, query, caches, tables, key, value)
        if swapped:
            caches = tuple(cache.transpose(1, 2) for cache in caches)
        query = align16(query) if odd else query
        if request.heads == 1 or query.shape[0] == 1:
            (query,) = normalise_unit_strides(query)
        inputs = (query, *(normalise_unit_strides(*caches) if request.kv_heads == 1 else caches), tables)
        result, lse = call.attend(kernel, *inputs, sinks=sinks, out=out)
        return (result, lse.transpose(0, 1)) if call.with_lse and lse is not None else result

    return Bound(forward)


def _latent(call: _Call) -> Bound:
    request, kernel = call.request, call.kernels.latent

    def forward(
        query: Tensor, cache: Tensor, *, tables: PagedTables, attn_mask: None = None, out: Tensor | None = None
    ) -> Any:
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(request, query, out)
        query = align16(query) if request.misaligned else query
        if request.heads == 1 or query.shape[0] == 1:
            (query,) = normalise_unit_strides(query)
        result, lse = call.attend(kernel, query, cache.unsqueeze(2), tables, out=out)
        return (result, lse.transpose(0, 1)) if call.with_lse and lse is not None else result

    return Bound(forward)


_MOST_KEPT = 1024
_kept: dict[Any, Tensor] = {}
_in_graphs: dict[Any, Tensor] = {}


def _cached(make: Callable[..., Tensor]) -> Callable[[AttentionRequest, int, int, torch.device], Tensor]:
    """Cache a small constant tensor. Tensors that exist before a graph capture stay alive for its replays; those made
    during capture belong to the graph's pool and are not cached."""

    @functools.wraps(make)
    def cached(request: AttentionRequest, *given: Any) -> Tensor:
        key = (make, given)
        found = _kept.get(key)
        if request.graph_capture:
            found = _in_graphs.get(key) if found is None else _in_graphs.setdefault(key, found)
            return make(request, *given) if found is None else found
        if found is None:
            if len(_kept) >= _MOST_KEPT:
                # None is given back: kernels of another stream may still have to read it.
                return make(request, *given)
            *numbers, device = given
            # Copied, which waits: the next call may come on another stream.
            found = _kept[key] = make(request, *numbers, torch.device("cpu")).to(device)
        return found

    return cached


@_cached
def uniform_cu_seqlens(request: AttentionRequest, count: int, length: int, device: torch.device) -> Tensor:
    """Give cu_seqlens of `count` sequences of `length` tokens on `device`: int32 [count + 1].

    Arguments go by position. The tensor is cached and not to be written. request: says whether its calls are recorded
    into graphs.
    """
    return torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device)


@_cached
def constant_int32(request: AttentionRequest, count: int, value: int, device: torch.device) -> Tensor:
    """Give int32 [count], all of them `value`, on `device`.

    Arguments go by position. The tensor is cached and not to be written. request: says whether its calls are recorded
    into graphs.
    """
    return torch.full((count,), value, dtype=torch.int32, device=device)
