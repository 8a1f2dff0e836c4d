"""`paged_attention` and `mla_attention`: attention over a paged cache, dense or latent.

Every call is checked anew, and what it asks for is remembered by its facts: an engine that decodes thousands of steps
binds through `polyattn.serving`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..adapters.alignment import aligned
from ..adapters.device import capturing
from ..adapters.strides import with_unit_last_stride
from ..contract import AttentionRequest, KVPart, PagedTables, scalars
from ..contract.lengths import extent_of
from ..contract.request import made
from ..epoch import EPOCH
from ..errors import InvalidInputError
from ..selection import overrides
from ..semantics import validation
from .binding import Asked, device_facts, dtype_name, explained_by, remembered
from .bound_table import SIGNATURES_KEPT
from .call_key import Static, backend_name, site_of, torch_deterministic
from .device_facts import forward_mode

__all__ = ["mla_attention", "paged_attention"]


def _steps(longest: int, *, tree: bool, chunked_prefix: bool, kv_parts: Sequence[KVPart]) -> dict[str, Any]:
    """The fields that say what step of an engine a call is."""
    decode = longest == 1 and not tree and not chunked_prefix
    # Groups of a part may be longer than the queries of a sequence, and than the keys they see.
    grouped = any(part.max_seqlen_q > 1 for part in kv_parts)
    return {
        "phase": "verify" if tree else "decode" if decode else "extend",
        "s_relation": "more" if grouped else "one" if decode else "fewer",
        "tree": bool(tree),
        "chunked_prefix": bool(chunked_prefix),
        "kv_parts": len(kv_parts),
    }


def _mask_kind(attn_mask: Tensor | None) -> str:
    return "none" if attn_mask is None else "bool" if attn_mask.dtype == torch.bool else "additive"


def _parts(parts: Sequence[KVPart]) -> dict[str, Any]:
    # A backend that knows no parts need not know the keyword.
    return {"kv_parts": [_row_major(part) for part in parts]} if parts else {}


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
        raise InvalidInputError(
            "attention over a paged cache is inference only; run it under torch.no_grad(), or train with attention()"
        )
    if forward_mode(*tensors):
        raise InvalidInputError(
            "attention over a paged cache is inference only, and forward-mode AD (torch.func.jvp, jacfwd, a dual "
            "tensor) goes through this call; give it tensors without a tangent, or use attention()"
        )


def _static(*given: Any) -> Static:
    """(causal, window, softcap, scale, return_lse, deterministic, chunk, role, batch_invariant), checked."""
    found: Static = site_of(_packed, (*given[:4], "THD", 0.0, *given[4:]))
    return found


def _packed(static: Static, *_: Any) -> Static:
    return static.checked(("THD",))


def _request(static: Static, query: Tensor, **fields: Any) -> AttentionRequest:
    device = query.device
    facts = {"heads": query.shape[1], "zero_size": not query.shape[0], "graph_capture": capturing(device.type)}
    return _known_request(EPOCH.value, static, query.dtype, device, torch_deterministic(), **facts, **fields)


@functools.lru_cache(maxsize=SIGNATURES_KEPT)
def _known_request(
    epoch: int, static: Static, dtype: torch.dtype, device: torch.device, exact: bool, **fields: Any
) -> AttentionRequest:
    return made(**static.fields(exact), **device_facts(device), dtype=dtype_name(dtype), **fields).normalised()


_GIVEN = ("key", "value", "attn_mask", "sinks", "k_scale", "v_scale", "out")
"""Optional tensors of a paged call, as kernels take them."""


def _paged_request(
    static: Static,
    tables: PagedTables,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    kv_layout: str,
    save_kv_cache: bool,
    alibi: Tensor | None,
    **given: Any,
) -> AttentionRequest:
    """Check a paged call; what it asks for. given: `_GIVEN`, and the steps of `_steps`."""
    key, value, attn_mask, sinks, k_scale, v_scale, out = (given.pop(name) for name in _GIVEN)
    scalars.flag("save_kv_cache", save_kv_cache)
    validation.check_paged(query, key_cache, value_cache, tables, kv_layout)
    if save_kv_cache and (key is None or value is None):
        raise InvalidInputError("save_kv_cache=True writes new keys and values: pass key and value [T_q, H_kv, D]")
    h, p = (2, 1) if kv_layout == "NHD" else (1, 2)
    heads = key_cache.shape[h]
    granularity = validation.check_storage(query, key_cache, value_cache, k_scale, v_scale, heads)
    fp4 = key_cache.dtype == torch.uint8
    v_head_dim = value_cache.shape[3] * (2 if fp4 else 1)
    validation.check_new_keys(query, key, value, heads, v_head_dim)
    if save_kv_cache:
        validation.check_saving(key_cache, value_cache, tables, key_cache.shape[p])
    validation.check_alibi(alibi, query, query.shape[1])
    pools = {"key_cache": key_cache, "value_cache": value_cache}
    _check_rest(static, tables, query, pools, p, v_head_dim, attn_mask, sinks, out, scales=k_scale, **given)
    _no_grad(query, key_cache, value_cache, key, value, sinks, attn_mask, alibi)
    return _request(
        static,
        query,
        family="paged",
        kv_heads=heads,
        head_dim=query.shape[2],
        v_head_dim=v_head_dim,
        kv_dtype="fp4_e2m1" if fp4 else dtype_name(key_cache.dtype),
        page_size=key_cache.shape[p],
        kv_layout=kv_layout,
        kv_scales=granularity,
        save_kv_cache=None if key is None else bool(save_kv_cache),
        mask=_mask_kind(attn_mask),
        sinks=sinks is not None,
        alibi=alibi is not None,
        large=max(query.numel(), key_cache.numel(), value_cache.numel()) >= 2**31,
        misaligned=not aligned(*(tensor for tensor in (query, key, value) if tensor is not None)),
        **_steps(tables.max_seqlen_q, **given),
    )


def _check_rest(
    static: Static,
    tables: PagedTables,
    query: Tensor,
    pools: dict[str, Tensor],
    page_axis: int,
    v_head_dim: int,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
    *,
    scales: Tensor | None,
    tree: bool,
    chunked_prefix: bool,
    kv_parts: Sequence[KVPart],
) -> None:
    """What calls over both kinds of caches have beside their caches and new rows."""
    for name, flag in (("tree", tree), ("chunked_prefix", chunked_prefix)):
        scalars.flag(name, flag)
    options = (tables.max_seqlen_q, tables.max_seqlen_k, attn_mask, sinks, out, v_head_dim, (query, *pools.values()))
    validation.check_serving_options(query, tables.page_table.shape[0], *options)
    validation.check_kv_parts(query, kv_parts, static.window, static.chunk, pools, page_axis, scales)
    if tree:
        validation.check_tree(attn_mask, tables, chunked_prefix, kv_parts)


def _run(
    call: str, request: AttentionRequest, backend: Any, tables: PagedTables, *tensors: Tensor, **given: Any
) -> Any:
    """Serve a checked call. given: of its kernel; what was added to the contract later is left out where it is None."""
    chosen = remembered(request, backend_name(backend), overrides.SCOPE.get(), EPOCH.value)
    return chosen.ranged(call, chosen.bound.forward)(*tensors, tables=_kernel_tables(tables), **given)


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
    static = _static(causal, window, softcap, scale, return_lse, deterministic, chunk, None, batch_invariant)
    tables = PagedTables(page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    given: dict[str, Any] = dict(zip(_GIVEN, (key, value, attn_mask, sinks, k_scale, v_scale, out), strict=True))
    steps: dict[str, Any] = {"tree": tree, "chunked_prefix": chunked_prefix, "kv_parts": kv_parts}
    how: dict[str, Any] = {"kv_layout": kv_layout, "save_kv_cache": save_kv_cache, "alibi": alibi}
    request = _paged_request(static, tables, query, key_cache, value_cache, **given, **steps, **how)
    given |= _parts(kv_parts) if alibi is None else {**_parts(kv_parts), "alibi": alibi}
    return _run("paged_attention", request, backend, tables, query, key_cache, value_cache, **given)


def _asked(backend: Any, given: dict[str, Any], request_of: Callable[..., AttentionRequest]) -> Asked:
    names = ("causal", "window", "softcap", "scale", "return_lse", "deterministic", "chunk")
    said = [given.pop(name, 0.0) for name in names]
    static = _static(*said, None, given.pop("batch_invariant"))
    tables = PagedTables(**{name: given.pop(name) for name in PagedTables._fields[:5]})
    request = request_of(static, tables, **given)
    return request, backend_name(backend), extent_of(request)(tables=tables)


explained_by(paged_attention, lambda backend, **given: _asked(backend, given, _paged_request))


def _mla_request(
    static: Static,
    tables: PagedTables,
    query: Tensor,
    cache: Tensor,
    *,
    v_head_dim: int,
    attn_mask: Tensor | None,
    token_indices: Tensor | None,
    out: Tensor | None,
    **steps: Any,
) -> AttentionRequest:
    """Check a latent call; what it asks for."""
    form = validation.check_mla(query, cache, v_head_dim)
    if static.scale is None:
        raise InvalidInputError(
            "mla_attention needs an explicit scale: that of the uncompressed heads, for example 192 ** -0.5 "
            "(the default of a 576-wide row would be wrong)"
        )
    validation.check_page_table(query, tables, cache.shape[0], cache.shape[1])
    _check_rest(static, tables, query, {"cache": cache}, 1, v_head_dim, attn_mask, None, out, scales=None, **steps)
    listed = 0 if token_indices is None else validation.check_token_indices(query, token_indices, tables, static.causal)
    _no_grad(query, cache, attn_mask)
    return _request(
        static,
        query,
        family="mla",
        kv_heads=1,
        head_dim=query.shape[2],
        v_head_dim=int(v_head_dim),
        kv_dtype=form.kv_dtype if form else "auto",
        kv_scales=form.kv_scales if form else "",
        page_size=cache.shape[1],
        large=max(query.numel(), cache.numel()) >= 2**31,
        misaligned=not aligned(query),
        mask=_mask_kind(attn_mask),
        token_topk=listed,
        **_steps(tables.max_seqlen_q, **steps),
    )


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
    static = _static(causal, window, 0.0, scale, return_lse, deterministic, chunk, None, batch_invariant)
    tables = PagedTables(page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    steps: dict[str, Any] = {"tree": tree, "chunked_prefix": chunked_prefix, "kv_parts": kv_parts}
    steps["token_indices"] = token_indices
    request = _mla_request(static, tables, query, cache, v_head_dim=v_head_dim, attn_mask=attn_mask, out=out, **steps)
    given = {"attn_mask": attn_mask, "out": out, **_parts(kv_parts)}
    given |= {} if token_indices is None else {"token_indices": token_indices}
    return _run("mla_attention", request, backend, tables, query, cache, **given)


explained_by(mla_attention, lambda backend, **given: _asked(backend, given, _mla_request))
