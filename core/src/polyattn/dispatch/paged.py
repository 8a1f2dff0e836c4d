"""`paged_attention` and `mla_attention`: attention over a paged cache, dense or latent.

Every call is checked anew, and what it asks for is remembered by its facts: an engine that decodes thousands of steps
binds through `polyattn.serving`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..adapters.alignment import aligned
from ..adapters.device import capturing
from ..adapters.strides import with_unit_last_stride
from ..contract import AttentionRequest, KVPart, PagedTables, scalars
from ..contract.families import FAMILY_SPECS
from ..contract.lengths import extent_of
from ..contract.request import made
from ..epoch import EPOCH
from ..errors import InvalidInputError
from ..selection import overrides
from ..semantics import validation
from .binding import Asked, device_facts, dtype_name, explained_by, remembered
from .bound_table import SIGNATURES_KEPT
from .call_key import Static, backend_name, site_of, torch_deterministic, without_autocast
from .compile.errors import INFERENCE_ONLY
from .compile.facts import counted
from .compile.trace_cached import CachedCall, trace_cached, trained, value_dim
from .device_facts import forward_mode

__all__ = ["mla_attention", "paged_attention", "served"]


def _step(call: CachedCall) -> dict[str, Any]:
    """The fields that say what step of an engine a call is."""
    parts, tree, chunked = call.given["kv_parts"], call.more["tree"], call.more["chunked_prefix"]
    decode = call.tables.max_seqlen_q == 1 and not tree and not chunked
    # Groups of a part may be longer than the queries of a sequence, and than the keys they see.
    grouped = any(part.max_seqlen_q > 1 for part in parts)
    return {
        "phase": "verify" if tree else "decode" if decode else "extend",
        "s_relation": "more" if grouped else "one" if decode else "fewer",
        "tree": bool(tree),
        "chunked_prefix": bool(chunked),
        "kv_parts": len(parts),
    }


def _row_major(part: KVPart) -> KVPart:
    return KVPart(*_kernel_tables(part.tables)[:5], *part[5:])


def _kernel_tables(tables: PagedTables) -> PagedTables:
    """Checked tables as kernels read them."""
    table, lens, starts, longest_q, longest_k = tables[:5]
    if table.stride(-1) == lens.stride(-1) == 1 and type(longest_q) is type(longest_k) is int:
        return tables
    return PagedTables(
        with_unit_last_stride(table), with_unit_last_stride(lens), starts, int(longest_q), int(longest_k)
    )


def _no_grad(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise InvalidInputError(INFERENCE_ONLY)
    if forward_mode(*tensors):
        raise InvalidInputError(
            "attention over a paged cache is inference only, and forward-mode AD (torch.func.jvp, jacfwd, a dual "
            "tensor) goes through this call; give it tensors without a tangent, or use attention()"
        )


def _packed(static: Static, *_: Any) -> Static:
    return static.checked(("THD",))


def _request(
    call: CachedCall, static: Static, pools: dict[str, Tensor], page_axis: int, v_head_dim: int, **fields: Any
) -> AttentionRequest:
    """Check what calls over both kinds of caches have beside their caches and new rows; what such a call asks for."""
    tables, given, more = call.tables, call.given, call.more
    query, mask, parts = call.tensors[0], given["attn_mask"], given["kv_parts"]
    for name in ("tree", "chunked_prefix"):
        scalars.flag(name, more[name])
    options = (*tables[3:5], mask, given.get("sinks"), given["out"], v_head_dim, call.tensors)
    validation.check_serving_options(query, tables.page_table.shape[0], *options)
    validation.check_kv_parts(query, parts, static.window, static.chunk, pools, page_axis, given.get("k_scale"))
    if more["tree"]:
        validation.check_tree(mask, tables, more["chunked_prefix"], parts)
    _no_grad(*trained(call))
    facts = {
        "family": call.family,
        "heads": query.shape[1],
        "head_dim": query.shape[2],
        "v_head_dim": int(v_head_dim),
        "page_size": call.tensors[1].shape[page_axis],
        "zero_size": not query.shape[0],
        "large": max(tensor.numel() for tensor in call.tensors) >= 2**31,
        "graph_capture": capturing(query.device.type),
        "mask": "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
        **_step(call),
    }
    return _known_request(EPOCH.value, static, query.dtype, query.device, torch_deterministic(), **facts, **fields)


@functools.lru_cache(maxsize=SIGNATURES_KEPT)
def _known_request(
    epoch: int, static: Static, dtype: torch.dtype, device: torch.device, exact: bool, **fields: Any
) -> AttentionRequest:
    return made(**static.fields(exact), **device_facts(device), dtype=dtype_name(dtype), **fields).normalised()


_LATER = ("alibi", "token_indices")
"""What was added to the contract later, and is left out where it is not given; so are parts."""


def _paged_request(call: CachedCall, static: Static) -> AttentionRequest:
    """Check a paged call; what it asks for."""
    (query, key_cache, value_cache), tables, given, more = call[1:5]
    key, value, alibi = given["key"], given["value"], given["alibi"]
    save, layout = more["save_kv_cache"], more["kv_layout"]
    scalars.flag("save_kv_cache", save)
    validation.check_paged(query, key_cache, value_cache, tables, layout)
    if save and (key is None or value is None):
        raise InvalidInputError("save_kv_cache=True writes new keys and values: pass key and value [T_q, H_kv, D]")
    h, p = (2, 1) if layout == "NHD" else (1, 2)
    heads = key_cache.shape[h]
    granularity = validation.check_storage(query, key_cache, value_cache, given["k_scale"], given["v_scale"], heads)
    v_head_dim = value_dim(call.tensors, more)
    validation.check_new_keys(query, key, value, heads, v_head_dim)
    if save:
        validation.check_saving(key_cache, value_cache, tables, key_cache.shape[p])
    validation.check_alibi(alibi, query, query.shape[1])
    fields: dict[str, Any] = {
        "kv_heads": heads,
        "kv_dtype": "fp4_e2m1" if key_cache.dtype == torch.uint8 else dtype_name(key_cache.dtype),
        "kv_layout": layout,
        "kv_scales": granularity,
        "save_kv_cache": None if key is None else bool(save),
        "sinks": given["sinks"] is not None,
        "alibi": alibi is not None,
        "misaligned": not aligned(*(tensor for tensor in (query, key, value) if tensor is not None)),
    }
    pools = {"key_cache": key_cache, "value_cache": value_cache}
    return _request(call, static, pools, p, v_head_dim, **fields)


def _mla_request(call: CachedCall, static: Static) -> AttentionRequest:
    """Check a latent call; what it asks for."""
    (query, cache), tables, given, more = call[1:5]
    form = validation.check_mla(query, cache, more["v_head_dim"])
    if static.scale is None:
        raise InvalidInputError(
            "mla_attention needs an explicit scale: that of the uncompressed heads, for example 192 ** -0.5 "
            "(the default of a 576-wide row would be wrong)"
        )
    validation.check_page_table(query, tables, cache.shape[0], cache.shape[1])
    lists, causal = given["token_indices"], static.causal
    return _request(
        call,
        static,
        {"cache": cache},
        1,
        more["v_head_dim"],
        kv_heads=1,
        kv_dtype=form.kv_dtype if form else "auto",
        kv_scales=form.kv_scales if form else "",
        misaligned=not aligned(query),
        token_topk=0 if lists is None else validation.check_token_indices(query, lists, tables, causal),
    )


_REQUESTS = {"paged": _paged_request, "mla": _mla_request}
_MORE = ("kv_layout", "save_kv_cache", "v_head_dim", "tree", "chunked_prefix")


def _run(call: CachedCall) -> Any:
    seen = torch.compiler.is_compiling() or counted()
    return trace_cached(call) if seen else served(call, overrides.SCOPE.get())


def served(call: CachedCall, scope: overrides.Scope) -> Any:
    """Check a call over a cache and run it."""
    request = _REQUESTS[call.family](call, site_of(_packed, call.static, None, scope))
    chosen = remembered(request, backend_name(call.backend), scope, EPOCH.value)
    # A backend that is older than one of these need not know the keyword.
    given = {name: one for name, one in call.given.items() if one is not None or name not in _LATER}
    if parts := given.pop("kv_parts"):
        given["kv_parts"] = [_row_major(part) for part in parts]
    run = chosen.ranged(FAMILY_SPECS[call.family].call, chosen.bound.forward)
    return without_autocast(run, *call.tensors, tables=_kernel_tables(call.tables), **given)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    key: Tensor | None = None,
    value: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool | str = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    kv_layout: str = "NHD",
    save_kv_cache: bool = False,
    kv_parts: Sequence[KVPart] = (),
    tree: bool = False,
    chunked_prefix: bool = False,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    out: Tensor | None = None,
    chunk: int = 0,
    alibi: Tensor | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Attention of packed queries over a paged KV cache; the queries are the last tokens of their sequences.

    Args:
        query: [T_q, H_q, D].
        key_cache, value_cache: [pages, page_size, H_kv, D | D_v] (NHD) or [pages, H_kv, page_size, D | D_v] (HND); the
            query's dtype, float8 or int8 with `k_scale`, `v_scale`, or uint8 [..., D/2] for FP4 (two numbers a byte,
            low four bits first; `polyattn.semantics.kv_quant` packs them).
        page_table: int32 [N, max_pages]. seq_lens: int32 [N], keys per sequence with the new ones.
        cu_seqlens_q: int32 [N+1]. max_seqlen_q, max_seqlen_k: host ints.
        key, value: [T_q, H_kv, D | D_v] new keys and values, written to the cache first if `save_kv_cache`: into two
            caches that share no memory, each to a slot of its own.
        k_scale, v_scale: dequantisation factors, one number, [H_kv] or one per token and head in the layout of the
            cache; FP4: one per 16 numbers, [pages, page_size, H_kv, D/16], e4m3 or float32.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k].
        kv_parts: more keys that groups of the queries see whole, see `polyattn.KVPart`: shared prefixes, split KV.
            `causal` and `attn_mask` speak of the call's own keys; `window` excludes parts.
        tree: the last S_q columns of the bool `attn_mask` are a tree of drafts, everything before is visible (S8).
        chunked_prefix: attend the keys before the queries in chunks, for a bound on a kernel's memory.
        The rest as `polyattn.attention`; chunk and alibi count along each sequence.

    Returns:
        out [T_q, H_q, D_v], or (out, lse [T_q, H_q]).

    Raises:
        As `polyattn.attention`; InvalidInputError when gradients are wanted.
    """
    static = Static(causal, window, softcap, scale, "THD", 0.0, return_lse, deterministic, chunk, None, batch_invariant)
    tables = PagedTables(page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    given: dict[str, Any] = {"key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks, "alibi": alibi}
    given |= {"k_scale": k_scale, "v_scale": v_scale, "out": out, "kv_parts": kv_parts}
    more = {"kv_layout": kv_layout, "save_kv_cache": save_kv_cache, "tree": tree, "chunked_prefix": chunked_prefix}
    return _run(CachedCall("paged", (query, key_cache, value_cache), tables, given, more, static, backend))


def mla_attention(
    query: Tensor,
    cache: Tensor,
    *,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    v_head_dim: int = 512,
    causal: bool | str = True,
    window: tuple[int, int] = (-1, -1),
    attn_mask: Tensor | None = None,
    kv_parts: Sequence[KVPart] = (),
    tree: bool = False,
    chunked_prefix: bool = False,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    out: Tensor | None = None,
    chunk: int = 0,
    token_indices: Tensor | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Multi-head latent attention over a paged latent cache, absorbed form.

    Args:
        query: [T_q, H_q, D_c + D_r], the absorbed nope part, then the rope part.
        cache: [pages, page_size, D_c + D_r], one latent row per token for all heads, or rows in one of the formats of
            `polyattn.semantics.kv_quant.LATENT_FORMATS`, as `mla_pack` makes them.
        page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, attn_mask: as `paged_attention`.
        kv_parts, tree, chunked_prefix, chunk: as `paged_attention`.
        scale: of the uncompressed heads, never of the latent row (S2).
        v_head_dim: D_c, the leading part of a row that is the value.
        token_indices: int32 [T_q, topk], the positions in its own sequence of the tokens that each query sees, in any
            order and none twice; -1 = none. Each is one that `causal` lets the query see. None = all of them.

    Returns:
        out [T_q, H_q, D_c], or (out, lse [T_q, H_q]).

    Raises:
        As `paged_attention`.
    """
    static = Static(causal, window, 0.0, scale, "THD", 0.0, return_lse, deterministic, chunk, None, batch_invariant)
    tables = PagedTables(page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    given = {"attn_mask": attn_mask, "out": out, "kv_parts": kv_parts, "token_indices": token_indices}
    more = {"v_head_dim": v_head_dim, "tree": tree, "chunked_prefix": chunked_prefix}
    return _run(CachedCall("mla", (query, cache), tables, given, more, static, backend))


def _asked(family: str, backend: Any, **given: Any) -> Asked:
    static = Static(layout="THD", **{name: given.pop(name) for name in Static._fields if name in given})
    tables = PagedTables(**{name: given.pop(name) for name in PagedTables._fields[:5]})
    tensors = tuple(given.pop(one.name) for one in FAMILY_SPECS[family].positional)
    more = {name: given.pop(name) for name in _MORE if name in given}
    request = _REQUESTS[family](CachedCall(family, tensors, tables, given, more, static, backend), _packed(static))
    return request, backend_name(backend), extent_of(request)(tables=tables)


explained_by(paged_attention, functools.partial(_asked, "paged"))
explained_by(mla_attention, functools.partial(_asked, "mla"))
