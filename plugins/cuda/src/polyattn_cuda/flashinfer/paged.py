"""Family `paged` by FlashInfer's plan-and-run wrappers.

Prefill, extend and verification by its prefill wrapper (the fa3 template on Hopper where that serves, else fa2), decode
by its decode wrapper. A plan belongs to a step: sessions plan once for all layers, with fixed buffers where steps are
recorded; a call by itself plans for itself and waits for its lengths.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.adapters import append_new_kv, empty_result, load
from polyattn.contract import AttentionRequest, Bound, KVPart, PagedTables, Session, Slot, UnsupportedRequestError

from ..records.flashinfer import FLASHINFER
from .lengths import Lengths, Mask, flattened, mask_rule, sighted, tree_rule
from .results import blanked, delivered, natural, writable
from .scales import REACH, HostScale, loadable, prepared, scale_of, unscaled
from .sessions import PlannedSession
from .workbench import LENDER, Workbench, float_bytes, int_bytes

__all__ = ["FA3_DIMS", "Paged", "check_reach", "template"]

FA3_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
"""(D, D_v) of the Hopper template."""
_TENSOR_CORES = 4
"""Heads of a group from which on decode is faster on tensor cores (SGLang's rule; true on an H200 at 4)."""

_STORED = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def template(request: AttentionRequest) -> str:
    """Which of FlashInfer's templates serves: fa3 reads no FP8 caches beside 16-bit queries, takes no masks, and finds
    the rows of V in pages by the strides of K, so that both are of one width. Said to the wrappers, because what they
    choose by themselves depends on the version and, on Blackwell, has no LSE."""
    recent = not request.toolkit or request.toolkit >= (12, 3)
    hopper = request.arch == "sm90" and recent and request.dims in FA3_DIMS
    plain = request.mask == "none" and request.kv_dtype == "auto"
    return "fa3" if hopper and plain and (request.same_dims or request.family != "paged") else "fa2"


class Paged:
    """Binds paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        call = _Call(request)
        # The mask of a step is known to a plan where it is a tree's, and else to the layers only; so are further parts.
        plans = (request.mask == "none" or request.tree) and not request.kv_parts
        return Bound(call.forward, session=call.session if plans else None)


class _Keys(NamedTuple):
    """The keys of a call, or of one of its parts: those are seen by all queries of their group."""

    caches: Sequence[Tensor]
    lens: Lengths
    pages: Tensor
    shared: bool = False


_Part = tuple[Tensor, Tensor | None, Tensor | None]
"""(out, LSE of base 2 if the call needs one, the queries that see a key or None = all) over one set of keys."""


def check_reach(tokens: int, heads: int, width: int) -> None:
    """Refuse what the fa2 template and the decode kernels do not reach with their 32-bit offsets.

    Args:
        tokens, heads: of queries and outputs, or of packed keys and values. width: of a head, the larger one.

    Raises:
        UnsupportedRequestError: there are too many tokens.
    """
    if tokens * heads * width > REACH:
        raise UnsupportedRequestError(
            f"FlashInfer's fa2 template counts the numbers of its tensors in 32 bits, and this call has "
            f"{tokens} tokens of {heads} heads of {width}: it takes at most {REACH // (heads * width)} tokens at once. "
            f"Call it for fewer sequences or queries at a time, or name another backend"
        )


def _masked_last_page_len(lens: Lengths, page_size: int) -> Tensor:
    """int32 [N], as a plan with a mask needs them.

    FlashInfer finds where a sequence's mask begins by (pages - 1) * page_size + last_page_len, which is its length for
    a sequence without pages only if that is a whole page; its kernels take such a sequence for empty either way.
    """
    return lens.last_page_len.masked_fill(lens.kv_indptr.diff() == 0, page_size)


class _Call:
    """Everything of a request that is no tensor."""

    tables = ("kv_indptr", "last_page_len")

    def __init__(self, request: AttentionRequest) -> None:
        r = self.request = request
        self.prefill = load(FLASHINFER, "flashinfer:BatchPrefillWithPagedKVCacheWrapper")
        self.decode = load(FLASHINFER, "flashinfer:BatchDecodeWithPagedKVCacheWrapper")
        self.merge = load(FLASHINFER, "flashinfer:merge_state_in_place") if r.kv_parts else None
        self.hints = "uniform_q_len" in inspect.signature(self.prefill.plan).parameters  # type: ignore[attr-defined]
        # Of 0.7 and later, for decode: plans anew without touching the tables in a recorded wrapper's buffers.
        self.replan = load(FLASHINFER, "flashinfer.decode:fast_decode_plan") if self.hints else None
        self.host_scale = HostScale()
        self.scale, self.factor = scale_of(r)
        self.template, self.layout = template(r), r.kv_layout or "NHD"
        self.strides = (r.heads * r.head_dim, r.head_dim, 1)
        self.lse = r.lse or r.sinks or bool(r.kv_parts)
        self.scaled = bool(r.kv_scales)
        dtype = getattr(torch, r.dtype)
        self.dtypes = {"q_data_type": dtype, "kv_data_type": _STORED.get(r.kv_dtype, dtype)}
        self.decodes = r.s_relation == "one" and r.mask == "none" and r.same_dims
        self.tensor_cores = r.group >= _TENSOR_CORES or r.kv_dtype != "auto" or r.batch_invariant
        # Whether what is planned reads V by strides of its own: fa3, and decode without tensor cores, do not.
        self.strided = self.template == "fa2" and (self.tensor_cores or not self.decodes)
        # 0.7 loads its kernels for such caches when they are first called, and not while a graph is recorded.
        self.load_strided = not r.same_dims and hasattr(self.prefill, "prewarm_paged_kv_stride_variant")

    # ---------------------------------------------------------------------------------------------------------- plans

    def plan(
        self,
        bench: Workbench,
        lens: Lengths,
        pages: Tensor,
        nbytes: int,
        *,
        mask: Mask | None = None,
        heads: tuple[int, int] | None = None,
        causal: bool | None = None,
        fixed: dict[str, Tensor] | None = None,
        alike: bool = True,
    ) -> Any:
        """A wrapper with a plan.

        Args:
            pages: int32, of all sequences. nbytes: of its workspace. heads: H_q and H_kv where not the request's.
            causal: where not the request's. fixed: buffers of recorded steps. alike: K and V have the same strides.

        Raises:
            UnsupportedRequestError: there are more tokens than the kernels reach.
        """
        r = self.request
        heads = heads or (r.heads, r.kv_heads)
        head = dict(zip(("num_qo_heads", "num_kv_heads"), heads, strict=True))
        common: dict[str, Any] = {**head, **self.dtypes, "page_size": r.page_size, "sm_scale": self.scale}
        common["logits_soft_cap"] = r.softcap or None
        common["window_left"] = r.window[0] if mask is None else -1
        if r.batch_invariant:
            common["disable_split_kv"] = True
        decode = self.decodes and causal is None and lens.single
        plain = mask is None and alike
        fa3 = plain and not decode and self.template == "fa3"
        if not fa3:
            check_reach(lens.tokens, heads[0], max(r.dims))
        wrapper = self._wrapper(bench, decode, plain, nbytes, fixed)
        with bench.planning(wrapper):
            if fa3:
                bench.stage(wrapper, int_bytes(r, len(lens.listed("seq_lens")), lens.tokens))
            if decode:
                common |= {"indptr": lens.kv_indptr, "indices": pages, "last_page_len": lens.last_page_len}
                if fixed is not None and self.replan is not None and bench.planned(wrapper):
                    self.replan(wrapper, head_dim=r.head_dim, global_override_indptr_cpu=lens.kv_indptr, **common)
                else:
                    wrapper.plan(head_dim=r.head_dim, **common)
                return wrapper
            if fixed and self.hints and len(set(lens.queries.tolist())) == 1:
                common["uniform_q_len"] = int(lens.queries[0])
            wrapper.plan(
                qo_indptr=lens.cu_seqlens_q,
                paged_kv_indptr=lens.kv_indptr,
                paged_kv_indices=pages,
                paged_kv_last_page_len=lens.last_page_len if mask is None else _masked_last_page_len(lens, r.page_size),
                head_dim_qk=r.head_dim,
                head_dim_vo=r.dims[1],
                custom_mask=None if mask is None else mask.flat,
                causal=mask is None and (r.causal != "none" if causal is None else causal),
                **common,
            )
            if fixed and self.load_strided and not bench.planned(wrapper):
                wrapper.prewarm_paged_kv_stride_variant()
        return wrapper

    def _wrapper(
        self, bench: Workbench, decoding: bool, plain: bool, nbytes: int, fixed: dict[str, Tensor] | None
    ) -> Any:
        backend, tensor_cores = self.template if plain else "fa2", self.tensor_cores or not plain
        shared: dict[str, Any] = {"kv_layout": self.layout, "use_cuda_graph": fixed is not None}

        def decode(workspace: Tensor) -> Any:
            names = {"paged_kv_indptr_buffer": "kv_indptr", "paged_kv_indices_buffer": "pages",
                     "paged_kv_last_page_len_buffer": "last_page_len"}  # fmt: skip
            buffers = {name: fixed[own] for name, own in names.items()} if fixed else {}
            return self.decode(
                float_workspace_buffer=workspace, use_tensor_cores=tensor_cores, backend="fa2", **shared, **buffers
            )

        def prefill(workspace: Tensor) -> Any:
            names = {"qo_indptr_buf": "cu_seqlens_q", "paged_kv_indptr_buf": "kv_indptr",
                     "paged_kv_indices_buf": "pages", "paged_kv_last_page_len_buf": "last_page_len",
                     "custom_mask_buf": "mask", "mask_indptr_buf": "mask_indptr"}  # fmt: skip
            buffers = {name: fixed[own] for name, own in names.items() if own in fixed} if fixed else {}
            return self.prefill(float_workspace_buffer=workspace, backend=backend, **shared, **buffers)

        if decoding:
            return bench.wrapper((self.decode, self.layout, tensor_cores), decode, nbytes)
        return bench.wrapper((self.prefill, self.layout, backend), prefill, nbytes)

    def run(
        self,
        wrapper: Any,
        query: Tensor,
        caches: Sequence[Tensor],
        scales: Sequence[Tensor | None],
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(out, LSE of base 2 if this call needs one) of a planned wrapper, for `prepared` queries."""
        found = wrapper.run(
            q=query, paged_kv_cache=tuple(caches), out=out, return_lse=self.lse, **self.host_scales(*scales)
        )
        return found if self.lse else (found, None)

    def host_scales(self, k_scale: Tensor | None, v_scale: Tensor | None) -> dict[str, float | None]:
        """Those of an FP8 cache as a wrapper takes them."""
        scales = (("k_scale", k_scale), ("v_scale", v_scale))
        return {name: self.host_scale(scale) for name, scale in scales if scale is not None}

    # ---------------------------------------------------------------------------------------------------- single calls

    def forward(
        self,
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_parts: Sequence[KVPart] = (),
        out: Tensor | None = None,
    ) -> Any:
        """`polyattn.contract.PagedForward`."""
        r = self.request
        if not query.shape[0]:
            return empty_result(r, query, out)
        with LENDER.lend(query.device) as bench:
            lens, own = Lengths.read(tables, r.page_size), caches
            if key is not None:
                new = (unscaled(key, k_scale), unscaled(value, v_scale))
                own, tables = append_new_kv(r, query, caches, tables, *new)
            page_table = tables.page_table
            if self.decodes and not lens.single:
                # The decode wrapper has a query for each sequence; another kernel may give the same rows other bits.
                lens, page_table = lens.asked(page_table)
            heads_of_masks = 1 if attn_mask is None else attn_mask.shape[1]
            q, scales = prepared(query, self.factor, self.strides), (k_scale, v_scale)
            attend = self._attend if heads_of_masks == 1 else self._attend_by_head
            alone = not self.merge and heads_of_masks == 1
            whole: _Part | None = None
            for keys in [_Keys(own, lens, lens.page_list(page_table)), *self._shared(caches, kv_parts)]:
                if keys.lens.pages:
                    mask = None if keys.shared else attn_mask
                    part = attend(bench, q, keys, scales, mask, writable(out) if alone else None)
                    whole = part if whole is None else self._merged(whole, part)
            if whole is None:
                return empty_result(r, query, out)
            found, lse, alive = whole
            return delivered(r, found, natural(lse), alive, sinks, out)

    def _shared(self, caches: Sequence[Tensor], kv_parts: Sequence[KVPart]) -> Iterator[_Keys]:
        """The keys of further parts."""
        for part in kv_parts:
            pool = [cache for cache in (part.key_cache, part.value_cache) if cache is not None]
            lens = Lengths.read(part.tables, self.request.page_size)
            yield _Keys(pool or caches, lens, lens.page_list(part.page_table), shared=True)

    def _attend(
        self,
        bench: Workbench,
        query: Tensor,
        keys: _Keys,
        scales: Sequence[Tensor | None],
        attn_mask: Tensor | None,
        out: Tensor | None,
    ) -> _Part:
        """(out, LSE of base 2, the queries that see a key or None = all) over one set of keys."""
        r, lens, device = self.request, keys.lens, query.device
        mask = None if attn_mask is None else flattened(r, lens, mask_rule(attn_mask), device)
        causal = False if keys.shared else None
        asked = dataclasses.replace(r, causal="none") if keys.shared else r
        alive = sighted(asked, lens, device) if mask is None else mask.alive
        heads = query.shape[1], keys.caches[0].shape[1 if self.layout == "HND" else 2]
        nbytes = float_bytes(r, device, lens.seq_lens.shape[0], lens.tokens)
        alike = self.strided or keys.caches[0].stride() == keys.caches[1].stride()
        wrapper = self.plan(bench, lens, keys.pages, nbytes, mask=mask, heads=heads, causal=causal, alike=alike)
        return (*self.run(wrapper, query, keys.caches, scales, out), alive)

    def _attend_by_head(
        self, bench: Workbench, query: Tensor, keys: _Keys, scales: Any, attn_mask: Tensor | None, out: Tensor | None
    ) -> _Part:
        """The same for a mask of its own for each head, which FlashInfer's masks cannot be: a call for each."""
        if attn_mask is None:
            return self._attend(bench, query, keys, scales, None, out)
        axis, outs, lses = 1 if self.layout == "HND" else 2, [], []
        for head in range(query.shape[1]):
            of = [cache.narrow(axis, head // self.request.group, 1) for cache in keys.caches]
            own = keys._replace(caches=of)
            mask = attn_mask[:, head : head + 1]
            found, lse, alive = self._attend(bench, loadable(query[:, head : head + 1]), own, scales, mask, None)
            found, lse = blanked(found, lse, alive)
            outs.append(found)
            lses.append(lse)
        return torch.cat(outs, 1), torch.cat(lses, 1) if self.lse else None, None  # type: ignore[arg-type]

    def _merged(self, a: _Part, b: _Part) -> _Part:
        """Two results over different keys as one, by FlashInfer's own kernel: it reads and writes base 2."""
        (out, lse), (other, other_lse) = blanked(*a), blanked(*b)
        assert lse is not None
        assert other_lse is not None
        seen = (lse > -torch.inf) | (other_lse > -torch.inf)
        assert self.merge is not None
        self.merge(v=out, s=lse, v_other=other, s_other=other_lse)
        # A query of which no part has a key: older versions make it no number.
        return out, lse, seen[:, 0]

    # -------------------------------------------------------------------------------------------------------- sessions

    def session(self, slot: Slot) -> Session:
        """A serving side: one plan for all layers of a step."""
        r = self.request
        bits = slot.max_tokens * slot.max_pages * r.page_size // 8 + slot.max_sequences + 1
        nbytes = float_bytes(r, slot.device, slot.max_sequences, slot.max_tokens, recorded=slot.recorded)
        return PlannedSession(self, slot, nbytes, bits if r.mask != "none" else 0)

    def plan_step(
        self, bench: Workbench, lens: Lengths, pages: Tensor, nbytes: int, step: Any, fixed: dict[str, Tensor] | None
    ) -> tuple[Any, Tensor | None]:
        """A planned wrapper, and the queries that see a key or None = all."""
        mask = None
        if step.tree_mask is not None:
            mask = flattened(self.request, lens, tree_rule(step.tree_mask), bench.device)
        wrapper = self.plan(bench, lens, pages, nbytes, mask=mask, fixed=fixed)
        if fixed is not None:
            # Of recorded steps only padding sees nothing, and its rows have no meaning.
            return wrapper, None
        return wrapper, sighted(self.request, lens, bench.device) if mask is None else mask.alive

    def run_step(
        self,
        wrapper: Any,
        alive: Tensor | None,
        query: Tensor,
        caches: tuple[Tensor, ...],
        out: Tensor | None,
        given: Mapping[str, Any],
    ) -> Any:
        """A layer of a planned step: little is done here beyond the library's call, once for each layer and step."""
        if not self.strided and caches[0].stride() != caches[1].stride():
            # The kernels that were planned read V by the strides of K.
            return self.forward(query, *caches, out=out, **given)
        query = prepared(query, self.factor, self.strides)
        target = out if out is None else writable(out)
        if self.scaled:
            scales = self.host_scales(given.get("k_scale"), given.get("v_scale"))
            found = wrapper.run(q=query, paged_kv_cache=caches, out=target, return_lse=self.lse, **scales)
        else:
            found = wrapper.run(q=query, paged_kv_cache=caches, out=target, return_lse=self.lse)
        if alive is None and not self.lse and target is out:
            return found
        found, lse = found if self.lse else (found, None)
        return delivered(self.request, found, natural(lse), alive, given.get("sinks"), out)
