"""`kv_parts_by_lse`: shared prefixes and split KV by any kernel that returns its LSE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound, KVPart
from ..contract.request import changed
from .base import CALL, Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KVPartsByLSE"]


class KVPartsByLSE(Lowering):
    """Calls the kernel for the call's own keys and for each part, and merges the results by their LSE (S6, S9).

    A part has its own grouping of the queries, each group over one row of keys: a prefix is read once for all the
    sequences that share it.
    """

    name = "kv_parts_by_lse"
    summary = "a call for each part of the keys, merged by LSE"
    fields = frozenset({"kv_parts"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        # Positions across parts mean nothing, so nothing that counts them can be kept.
        counts = request.window != (-1, -1) or request.chunk or request.alibi or request.tree
        if not request.kv_parts or request.family not in ("paged", "mla") or counts:
            return
        own = changed(request, kv_parts=0, lse=True, sinks=False)
        alone = request.s_relation == "one"
        # A group may be longer than the row of keys that it sees.
        part = changed(
            own,
            phase="decode" if alone else "extend",
            s_relation="one" if alone else "more",
            causal="none",
            mask="none",
            save_kv_cache=None,
            chunked_prefix=False,
            spec_topk=0,
        )
        if request.s_relation == "more":
            own = changed(own, s_relation="one" if request.phase == "decode" else "fewer")
        count = request.kv_parts
        detail = f"{count} part{'s' if count > 1 else ''} besides the call's own keys"
        yield Rewrite((own, part), count * (CALL + 2.0) + 1.0, detail=detail)

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from .pages import merged

        own, kernel = inner
        names = ("key_cache", "value_cache") if request.family == "paged" else ("cache",)

        def forward(
            query: Tensor,
            *caches: Tensor,
            kv_parts: Sequence[KVPart],
            sinks: Tensor | None = None,
            out: Tensor | None = None,
            **given: Any,
        ) -> Any:
            # First, because it may write new rows into pages that a part reads.
            results = [own.forward(query, *caches, **given)]
            scales = {name: given[name] for name in ("k_scale", "v_scale") if name in given}
            for part in kv_parts:
                pool = [getattr(part, name) for name in names]
                own_pool = caches if pool[0] is None else pool
                results.append(kernel.forward(query, *own_pool, tables=part.tables, **scales))
            return merged(request, results, sinks, out)

        return Bound(forward, traceable=own.traceable and kernel.traceable)
