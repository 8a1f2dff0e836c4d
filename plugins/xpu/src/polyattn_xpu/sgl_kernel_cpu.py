"""SGLang's CPU kernels on paged and latent caches: `torch.ops.sgl_kernel.{decode,extend}_attention_cpu`.

From their sources: a cache is [tokens, H_kv, D] and a table names tokens; lengths are int64; decode stores the new row
of each sequence at `loc` by itself and takes no sequence without keys; extend reads the keys before the new ones from
the cache and the new ones from its arguments. Builds differ in their arguments: what a build has beyond those that are
known here is switched off, if its type says how.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import append_new_kv, empty_result, load, with_positive_scale
from polyattn.contract import AttentionRequest, BackendUnavailableError, Bound, PagedTables

from .records.common import SGL_KERNEL_CPU

__all__ = ["IntelAMX"]

_SPLITS = 8
"""Parts of a sequence in decode, as SGLang has it."""

_SPELLINGS = {"v_cahce": "v_cache", "k_buffer": "k_cache", "v_buffer": "v_cache"}
"""Names of arguments that builds spell otherwise."""


class IntelAMX:
    """Binds paged and mla requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks the operators, or wants what is not known here.
        """
        return with_positive_scale(request, _bind)


def _bind(request: AttentionRequest) -> Bound:
    decode = request.s_relation == "one"
    name = "decode_attention_cpu" if decode else "extend_attention_cpu"
    # Importing the package registers its operators.
    load(SGL_KERNEL_CPU, "sgl_kernel:__name__")
    operator = _Operator(name, load(SGL_KERNEL_CPU, f"torch:ops.sgl_kernel.{name}"))
    attend = _decode if decode else _extend

    def forward(
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: None = None,
        sinks: None = None,
        k_scale: None = None,
        v_scale: None = None,
        out: Tensor | None = None,
    ) -> Any:
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(request, query, out)
        if key is not None:
            caches, tables = append_new_kv(request, query, caches, tables, key, value)
        lengths = tables.cu_seqlens_q.diff()
        # Padding rows have no keys, and a sequence may have no queries: neither is the kernels' business.
        mine = ((tables.seq_lens > 0) & (lengths > 0)).nonzero().flatten()
        room = out if out is not None and out.is_contiguous() else None
        result = query.new_empty(*query.shape[:2], request.dims[1]) if room is None else room
        result.zero_()
        if mine.numel():
            batch = _Batch(request, query, _rows(request, caches), tables, lengths, mine)
            attend(operator, batch, result)
        return result if out is None or room is not None else out.copy_(result)

    return Bound(forward)


class _Operator:
    """One of the operators, whatever else its build wants to be told.

    Raises:
        BackendUnavailableError: an argument that is not known here, and that no type says how to switch off.
    """

    def __init__(self, name: str, function: Any) -> None:
        self._function = function
        self._spelled = {_SPELLINGS.get(p, p): p for p in _parameters(function)}
        known = _DECODE if name.startswith("decode") else _EXTEND
        self._more = {
            spelled: _off(name, spelled, kind)
            for spelled, (kind, default) in _parameters(function).items()
            if _SPELLINGS.get(spelled, spelled) not in known and default is inspect.Parameter.empty
        }

    def __call__(self, **given: Any) -> None:
        self._function(**{self._spelled.get(name, name): value for name, value in given.items()}, **self._more)


def _parameters(function: Any) -> Mapping[str, tuple[str, Any]]:
    """Name -> (type, default) of an operator's arguments, in torch's words."""
    overload = getattr(function, "default", function)
    if hasattr(overload, "_schema"):
        none = inspect.Parameter.empty
        return {
            a.name: (str(a.real_type), a.default_value if a.has_default_value() else none)
            for a in overload._schema.arguments
        }
    return {p.name: (str(p.annotation), p.default) for p in inspect.signature(function).parameters.values()}


def _off(operator: str, name: str, kind: str) -> Any:
    """What switches an argument off: no tensor, no cross attention, a scale of 1, SGLang's window of -1 + 1."""
    if kind.startswith("Optional"):
        return None
    if kind == "float" and "scale" in name:
        return 1.0
    if kind == "bool":
        return "causal" in name
    if kind == "int" and "window" in name:
        return 0
    raise BackendUnavailableError(
        f"{operator} of the installed {SGL_KERNEL_CPU.distribution} wants {name} ({kind}), which this version of "
        f"polyattn does not know: use an older build, or torch_native"
    )


_DECODE = frozenset(
    (
        "query",
        "k_cache",
        "v_cache",
        "output",
        "key",
        "value",
        "loc",
        "attn_logits",
        "req_to_token",
        "req_pool_indices",
        "seq_lens",
        "sm_scale",
        "logit_cap",
    )
)
_EXTEND = frozenset(
    (
        "q_extend",
        "k_extend",
        "v_extend",
        "o_extend",
        "k_cache",
        "v_cache",
        "req_to_token",
        "req_pool_indices",
        "seq_lens",
        "extend_seq_lens",
        "extend_start_loc",
        "max_len_extend",
        "sm_scale",
        "logit_cap",
    )
)


class _Batch:
    """A call, as the operators count: `mine` are the sequences that have queries and keys."""

    def __init__(
        self,
        request: AttentionRequest,
        query: Tensor,
        rows: tuple[Tensor, Tensor],
        tables: PagedTables,
        lengths: Tensor,
        mine: Tensor,
    ) -> None:
        self.query, (self.keys, self.values) = query.contiguous(), rows
        self.table, self.mine = tables.page_table.contiguous(), mine
        self.starts, self.lengths = tables.cu_seqlens_q[:-1][mine], lengths[mine]
        self.seq_lens = tables.seq_lens[mine].long()
        self.given: dict[str, Any] = {
            "k_cache": self.keys,
            "v_cache": self.values,
            "req_to_token": self.table,
            "req_pool_indices": mine,
            "seq_lens": self.seq_lens,
            "sm_scale": request.softmax_scale,
            "logit_cap": request.softcap,
        }

    def slots(self) -> Tensor:
        """int64 [T_q of mine], where the rows of the query tokens are: the last ones of their sequences."""
        sequence = torch.repeat_interleave(self.mine, self.lengths.long())
        back = torch.cat([torch.arange(n, 0, -1) for n in self.lengths.tolist()])
        ends = torch.repeat_interleave(self.seq_lens, self.lengths.long())
        return self.table[sequence, ends - back].long()


def _rows(request: AttentionRequest, caches: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values as [tokens, H_kv, D]; of latent rows the values begin where the keys do."""
    if request.family == "paged":
        keys, values = (cache.flatten(0, 1) for cache in caches)
        return keys, values
    rows = caches[0].flatten(0, 1).unsqueeze(1)
    return rows, rows[..., : request.dims[1]]


def _decode(operator: _Operator, batch: _Batch, result: Tensor) -> None:
    """One query for each sequence; the row of its own key is stored again where it is."""
    N, H, width = batch.mine.numel(), batch.query.shape[1], batch.values.shape[-1]
    rows, loc = batch.starts.long(), batch.slots()
    output = result.new_empty(N, H, width)
    parts = torch.empty(N, H, _SPLITS, width + 1, dtype=torch.float32)
    # Builds before May 2026 leave the LSE of a part without keys as they find it, and count it.
    parts[..., -1] = -torch.inf
    operator(
        query=batch.query[rows],
        output=output,
        key=batch.keys[loc],
        value=batch.values[loc],
        loc=loc,
        attn_logits=parts,
        **batch.given,
    )
    result[rows] = output


def _extend(operator: _Operator, batch: _Batch, result: Tensor) -> None:
    """The new keys come from the cache, where they are already; rows of sequences that are not `mine` stay zeros."""
    kept = torch.repeat_interleave(batch.starts.long(), batch.lengths.long())
    first = torch.repeat_interleave(batch.lengths.cumsum(0) - batch.lengths, batch.lengths.long())
    rows = kept + torch.arange(kept.numel()) - first
    whole = rows.numel() == batch.query.shape[0]
    loc = batch.slots()
    output = result if whole else result.new_empty(rows.numel(), *result.shape[1:])
    operator(
        q_extend=batch.query if whole else batch.query[rows],
        k_extend=batch.keys[loc],
        v_extend=batch.values[loc],
        o_extend=output,
        extend_seq_lens=batch.lengths.to(batch.table.dtype),
        extend_start_loc=(batch.lengths.cumsum(0) - batch.lengths).to(batch.table.dtype),
        max_len_extend=int(batch.lengths.max()),
        **batch.given,
    )
    if not whole:
        result[rows] = output
