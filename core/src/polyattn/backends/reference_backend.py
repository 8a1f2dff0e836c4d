"""`reference`: the definition of the semantics as a backend, for what nothing else takes and for checking."""

from __future__ import annotations

import functools
from typing import Any

from .. import envvars
from ..contract import AttentionRequest, Bound, PagedTables
from ..semantics import reference
from ..semantics.reference import gated_delta_rule

__all__ = ["Reference"]


_KEPT = 2**28
"""Bytes of scores that a backward keeps: of longer calls it computes them again, block by block."""


class Reference:
    """Binds every family but block_sparse. Memory for scores is capped by POLYATTN_REFERENCE_MEMORY_GB per call."""

    def bind(self, request: AttentionRequest) -> Bound:
        cap = int(envvars.number("POLYATTN_REFERENCE_MEMORY_GB", 4.0) * 2**30)
        options: dict[str, Any] = {
            "causal": request.causal,
            "window": request.window,
            "chunk": request.chunk,
            "softcap": request.softcap,
            "scale": request.scale,
            "return_lse": request.lse,
            "max_bytes": cap,
        }
        trained: dict[str, Any] = {"dropout_p": request.dropout, "kept_bytes": _KEPT}
        if request.family == "dense":
            call = functools.partial(reference.attention, layout=request.layout, **trained, **options)
        elif request.family == "varlen":
            call = functools.partial(reference.varlen_attention, **trained, **options)
        elif request.family == "linear":
            form: dict[str, Any] = {
                "state_layout": request.state_layout or "KV",
                "every_state": request.state_out == "every",
            }
            return Bound(functools.partial(gated_delta_rule, scale=request.scale, **form))
        elif request.family == "paged":
            call = functools.partial(
                _cached,
                reference.paged_attention,
                kv_layout=request.kv_layout or "NHD",
                save_kv_cache=bool(request.save_kv_cache),
                **options,
            )
        else:
            call = functools.partial(_cached, reference.mla_attention, v_head_dim=request.v_head_dim, **options)
        return Bound(functools.partial(_into, call), traceable=request.family == "dense")


def _cached(call: Any, *tensors: Any, tables: PagedTables, **kw: Any) -> Any:
    page_table, seq_lens, cu_seqlens_q = tables[:3]
    return call(*tensors, page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, **kw)


def _into(call: Any, *tensors: Any, out: Any = None, **kw: Any) -> Any:
    result = call(*tensors, **{k: v for k, v in kw.items() if v is not None})
    if out is None:
        return result
    if isinstance(result, tuple):
        return out.copy_(result[0]), result[1]
    return out.copy_(result)
