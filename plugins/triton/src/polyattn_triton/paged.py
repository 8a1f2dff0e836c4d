"""Family `paged`: the adapter between polyattn's paged calls and the kernels that serve them.

Few queries over many keys go to `kernels.decode`, which splits the keys among the chip; many queries to
`kernels.extend`, in ranges of keys that are merged where they are not many enough to fill the chip. Both read pages
where they lie, of any size, NHD and HND, and take every option that the request can have. On a Hopper, `hopper.extend`
serves what it takes of the latter, in ranges or whole. Further parts (`kv_parts`) are calls of their own, merged by
their LSEs: a prefix that several sequences share is read once for all of their queries, and `hopper` cuts its keys
where their tiles alone would leave processors idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Bound, KVPart, PagedTables, Session, Slot

from . import runtime
from .hopper import extend as hopper
from .kernels.decode import Config, decode, items_for
from .kernels.extend import config_for as extend_config
from .kernels.extend import extend
from .kernels.extend import ranges_for as extend_ranges
from .kernels.merge import merge
from .kernels.rules import bounds
from .kernels.splits import Items
from .kernels.write import write_kv

__all__ = ["Paged"]

_FEW = 64
"""Rows of a sequence (queries times heads of a group) that are one tile of `decode`."""
_EXTEND_ROWS = 128
"""Of a tile of `extend`: how many programs it would have follows from them."""
_LONG = 1024
"""Keys from which on splitting them pays for what it costs."""
_NARROW = 64
"""Head dims up to which 64 rows are merged in no time."""
_AHEAD = 4
"""Keys to a query from which on ranges of them are mostly seen by all queries: under a causal mask others are half
empty."""


class Paged:
    """The target that `records/softmax.py` names."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: CPU tensors, in a process that compiles its kernels.
        """
        if request.platform == "cpu":
            runtime.check_device(torch.device("cpu"))
        call = _Call(request)
        return Bound(call.forward, session=call.session)


class _Call:
    """Everything of a request that is no tensor."""

    def __init__(self, request: AttentionRequest) -> None:
        r = self.request = request
        self.hnd = r.kv_layout == "HND"
        self.causal = r.causal != "none"
        self.scale = r.softmax_scale
        self.storage: dict[str, Any] = {
            "page_size": r.page_size,
            "hnd": self.hnd,
            "kv_dtype": r.kv_dtype,
            "kv_scales": r.kv_scales,
        }
        self.logits: dict[str, Any] = {"scale": self.scale, "softcap": r.softcap}
        self.seen: dict[str, Any] = {"causal": self.causal, "window": r.window, "chunk": r.chunk, "tree": r.tree}
        self.single = r.s_relation == "one"
        self.window = bounds(self.causal, r.window, r.chunk)
        self.on_hopper = r.platform == "cuda" and hopper.takes(r)
        self.parts_on_hopper = r.platform == "cuda" and not r.batch_invariant and hopper.takes_parts(r)
        self.mask = "" if r.mask == "none" else "tree" if r.tree and r.mask == "bool" else r.mask
        self.cut_on_hopper = self.on_hopper and not self.mask and r.window[0] < 0
        padded = any(width & (width - 1) for width in r.dims)
        self.scattered = r.page_size == 1 and r.kv_storage == r.dtype and not padded and not self.mask
        # Fewer are a small tile of `decode`; of 8 bits or narrow heads, and under a mask, half a tile of `extend` takes
        # no less.
        self.small = _FEW // 2 if r.kv_storage == r.dtype and not self.mask and r.head_dim > _NARROW else _FEW

    # ------------------------------------------------------------------------------------------------ which kernel

    def few(self, device: torch.device, sequences: int, heads: int, group: int, longest: tuple[int, int]) -> bool:
        """Whether `decode` is to serve sequences of at most `longest` (queries, keys)."""
        r, max_seqlen_q = self.request, longest[0]
        if r.batch_invariant:
            # Must not depend on what else is in the batch.
            return r.s_relation == "one" or r.phase in ("decode", "verify")
        return max_seqlen_q * group <= _FEW or self._idle(device, sequences, heads, group, longest)

    def _idle(self, device: torch.device, sequences: int, heads: int, group: int, longest: tuple[int, int]) -> bool:
        """Whether whole tiles of `extend` would leave half a device idle, and keys are enough to share them out."""
        programs = sequences * -(-longest[0] * group // _EXTEND_ROWS) * heads
        return 2 * programs <= runtime.processors(device) and longest[1] >= _LONG

    def ranges(self, device: torch.device, sequences: int, heads: int, group: int, longest: tuple[int, int]) -> int:
        """Into how many ranges the keys of such sequences are cut, for `hopper.extend` or `extend`; 1: they are not."""
        r, (max_seqlen_q, max_seqlen_k) = self.request, longest
        reach = r.chunk or r.window[0]
        span = max_seqlen_k if reach < 0 else min(max_seqlen_k, max_seqlen_q + reach)
        if r.batch_invariant or max_seqlen_q * group <= self.small or span < _AHEAD * max_seqlen_q:
            return 1
        if self.cut_on_hopper and hopper.on_hopper(device):
            dtype = getattr(torch, r.dtype)
            return hopper.ranges_for(
                device, dtype, sequences, max_seqlen_q, max_seqlen_k, heads, group, r.head_dim, r.page_size
            )
        # Where each key has a page of its own, `decode` with its small tiles waits for them as well as ranges do, and
        # needs no merging after it.
        idle = not self.scattered and self._idle(device, sequences, heads, group, longest)
        return extend_ranges(device, sequences, max_seqlen_q, span, heads, group) if idle else 1

    # ------------------------------------------------------------------------------------------------------ calls

    def forward(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_parts: Sequence[KVPart] = (),
        out: Tensor | None = None,
        plan: tuple[Items, Config] | None = None,
    ) -> Any:
        """`polyattn.contract.PagedForward`; `plan`: of a session's step, for the call's own keys."""
        r = self.request
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        sinks = None if sinks is None else sinks.contiguous()
        T_q, H_q, _ = query.shape
        if out is None:
            out = query.new_empty(T_q, H_q, r.dims[1])
        lse = query.new_empty(T_q, H_q, dtype=torch.float32) if r.lse else None
        if key is not None and r.save_kv_cache:
            write_kv(key, value, key_cache, value_cache, tables=tables, **self.storage, **scales)
            key = value = None
        own: dict[str, Any] = {"key": key, "value": value, "attn_mask": attn_mask, "plan": plan, **scales, **self.seen}
        if not kv_parts:
            self._attend(query, key_cache, value_cache, tables, sinks=sinks, out=out, lse=lse, **own)
        else:
            parts = [
                (
                    part.tables,
                    key_cache if part.key_cache is None else part.key_cache,
                    value_cache if part.value_cache is None else part.value_cache,
                )
                for part in kv_parts
            ]
            cuts = [self._cuts(query, *part) for part in parts]
            count = 1 + sum(max(n, 1) for n in cuts)
            outs = query.new_empty(count, T_q, H_q, r.dims[1], dtype=torch.float32)
            lses = query.new_empty(count, T_q, H_q, dtype=torch.float32)
            self._attend(query, key_cache, value_cache, tables, out=outs[0], lse=lses[0], **own)
            first = 1
            for (theirs, *pools), n in zip(parts, cuts, strict=True):
                if n:
                    to = slice(first, first + n)
                    self._extend_on_hopper(query, *pools, theirs, causal=False, out=outs[to], lse=lses[to], cuts=n)
                else:
                    self._attend(query, *pools, theirs, out=outs[first], lse=lses[first], causal=False, **scales)
                first += max(n, 1)
            merge(outs, lses, sinks=sinks, out=out, lse=lse)
        return out if lse is None else (out, lse)

    def _attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        tables: PagedTables,
        *,
        plan: tuple[Items, Config] | None = None,
        **given: Any,
    ) -> None:
        """One call over one set of tables."""
        if not query.shape[0]:
            return
        r = self.request
        heads = key_cache.shape[1 if self.hnd else 2]
        longest = (tables.max_seqlen_q, tables.max_seqlen_k)
        batch = (query.device, tables.seq_lens.shape[0], heads, query.shape[1] // heads, longest)
        ranges = self.ranges(*batch) if plan is None else 1
        if ranges > 1:
            outs = query.new_empty(ranges, *query.shape[:2], r.dims[1], dtype=torch.float32)
            lses = query.new_empty(ranges, *query.shape[:2], dtype=torch.float32)
            cut = {"out": outs, "lse": lses, "cuts": ranges}
            if self.cut_on_hopper and self._fits_hopper(key_cache, value_cache, tables, given):
                self._extend_on_hopper(query, key_cache, value_cache, tables, causal=self.causal, **cut)
            else:
                cut = given | {"tables": tables, **self.storage, **self.logits, **cut, "sinks": None}
                extend(query, key_cache, value_cache, **cut)
            merge(outs, lses, sinks=given.get("sinks"), out=given["out"], lse=given["lse"])
        elif plan is not None or self.few(*batch):
            given |= {"tables": tables, **self.storage, **self.logits}
            given |= {"invariant": r.batch_invariant, "single": self.single}
            decode(query, key_cache, value_cache, plan=plan, **given)
        elif self._fits_hopper(key_cache, value_cache, tables, given):
            self._extend_on_hopper(
                query, key_cache, value_cache, tables, causal=self.causal, left=r.window[0],
                attn_mask=given["attn_mask"], sinks=given["sinks"], out=given["out"], lse=given["lse"],
            )  # fmt: skip
        else:
            given |= {"tables": tables, **self.storage, **self.logits}
            config = None
            if r.batch_invariant:
                mask = self.mask if given.get("attn_mask") is not None else ""
                config = extend_config(query, key_cache, value_cache, 1 << 20, page_size=r.page_size, mask=mask)
            extend(query, key_cache, value_cache, config=config, **given)

    def _extend_on_hopper(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: PagedTables, **given: Any
    ) -> None:
        hopper.extend(
            query, key_cache, value_cache, tables=tables, page_size=self.request.page_size, hnd=self.hnd,
            scale=self.scale, **given,
        )  # fmt: skip

    def _cuts(self, query: Tensor, tables: PagedTables, key_cache: Tensor, value_cache: Tensor) -> int:
        """Into how many ranges of keys `hopper.extend` cuts a further part; 0: it is not for this one."""
        r = self.request
        if not (
            self.parts_on_hopper
            and query.shape[0]
            # Fewer are one tile of `decode`.
            and tables.max_seqlen_q * r.group > _FEW
            and tables.page_table.shape[1] > 0
            and hopper.fits(key_cache, value_cache, None, hnd=self.hnd)
        ):
            return 0
        sequences = tables.seq_lens.shape[0]
        return hopper.cuts_for(
            query.device, sequences, tables.max_seqlen_q, tables.max_seqlen_k, r.kv_heads, r.group, r.head_dim
        )

    def _fits_hopper(self, key_cache: Tensor, value_cache: Tensor, tables: PagedTables, given: dict[str, Any]) -> bool:
        """Whether `hopper.extend` computes this call. By the request and its caches alone, or where nothing depends on
        it: a batch without pages has no keys."""
        return (
            self.on_hopper
            # New rows that stay out of the cache are read beside it.
            and given.get("key") is None
            and tables.page_table.shape[1] > 0
            and hopper.fits(key_cache, value_cache, given["out"], hnd=self.hnd)
        )

    # --------------------------------------------------------------------------------------------------- sessions

    def session(self, slot: Slot) -> Session:
        """A serving side that shares the work of a step out once, not in every layer."""
        return _Session(self, slot)


class _Session:
    """`polyattn.contract.Session`: `plan` cuts the step by what the host knows, `prepare` by its lengths."""

    def __init__(self, call: _Call, slot: Slot) -> None:
        self._call, self._slot = call, slot
        self._plan: tuple[Items, Config] | None = None

    def plan(self, step: Any) -> None:
        call, slot = self._call, self._slot
        r = call.request
        longest = (step.max_seqlen_q, step.max_seqlen_k)
        self._plan = None
        batch = (slot.device, step.sequences, r.kv_heads, r.group, longest)
        if call.ranges(*batch) > 1 or not call.few(*batch):
            return
        self._plan = items_for(
            r.dims,
            getattr(torch, r.dtype),
            slot.device,
            heads=(r.heads, r.kv_heads),
            sequences=step.sequences,
            max_seqlen_q=step.max_seqlen_q,
            max_seqlen_k=step.max_seqlen_k,
            window=call.window,
            chunk=r.chunk,
            kv_dtype=r.kv_dtype,
            invariant=r.batch_invariant,
            single=call.single,
            allocate=slot.workspace,
        )

    def prepare(self, step: Any) -> None:
        if self._plan is not None:
            self._plan[0].share_out(step.seq_lens, step.cu_seqlens_q)

    def forward(self, *tensors: Tensor, **given: Any) -> Any:
        return self._call.forward(*tensors, **given, plan=self._plan)
