"""`trim_window`: sliding windows by kernels without windows. Keys that no query sees are not given to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite
from .lengths import combined, longer, per_call, position_axis, with_mask
from .widths import odd_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TrimWindow"]


def _one_at_the_end(request: AttentionRequest) -> bool:
    return request.s_relation == "one" and request.causal == "none"


def _trims(request: AttentionRequest) -> bool:
    """Return whether keys before the window are left away: the queries are the end of a longer sequence."""
    return request.s_relation in ("one", "fewer") and request.causal != "top_left" and request.window[0] >= 0


class TrimWindow(Lowering):
    """A window (left, right) shows a query at p the keys from p - left to p + right (S4).

    - One query at the end sees the last left + 1 keys and no others: with those alone it needs no window. The right
      bound says nothing, since no key comes after the query.
    - S_q queries at the end see none before the last S_q + left keys. Which of these each of them sees is said by a
      bool mask. The same mask serves where no key can be left away.
    - One query over a cache with a token to a page: as the first, by moving the page table. Of larger pages the first
      one would be seen in part, which no table can say.
    """

    name = "trim_window"
    summary = "keys before the window are left away, and a mask says the rest"
    fields = frozenset({"window"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        left, right = request.window
        # Blocks of chunked attention count from the first key, so that one stays.
        if left == right == -1 or request.chunk or request.tree or request.transform or request.zero_size:
            return
        if request.kv_parts or request.segments:  # a window has no meaning across parts, and segments are of all keys
            return
        # A view of the last keys may start between two boundaries.
        misaligned = request.misaligned or (request.family == "dense" and _trims(request) and odd_rows(request))
        plain = changed(request, window=(-1, -1), misaligned=misaligned)
        if _one_at_the_end(request):
            detail = f"the last {left + 1} keys" if left >= 0 else "the last query is not bounded on the right"
            if request.family == "dense":
                yield Rewrite((changed(plain, s_relation="one" if left else "equal"),), 0.0, detail=detail)
            elif request.family in ("paged", "mla") and request.page_size == 1:
                # Only tables are written.
                yield Rewrite((plain,), 0.5, detail=detail)
        elif request.family == "dense" and not (request.alibi and request.causal == "top_left"):
            detail = f"{f'the last S_q + {left} keys, ' if _trims(request) else ''}window {request.window} as a mask"
            plain = changed(plain, causal="none", mask="bool" if request.mask == "none" else request.mask)
            if _trims(request) and left == 0:
                plain = changed(plain, s_relation="equal")
            # The mask is written, and read by the kernel.
            yield Rewrite((plain,), 2.0, detail=detail)

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from ..semantics.reference import visible
        from .last_tokens import last_tokens
        from .tensors import Route, adapt

        if request.family != "dense":
            return last_tokens(inner[0], request.window[0] + 1) if request.window[0] >= 0 else inner[0]
        s, left = position_axis(request.layout), request.window[0]

        def around(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bound:
            S_q, S_k = query.shape[s], key.shape[s]
            first = max(S_k - S_q - left, 0) if _trims(request) else 0
            kept = S_k - first
            keys = Route(lambda t: t.narrow(s, first, kept), lambda grad: longer(grad, s, front=first))

            def masked(given: Mapping[str, Any]) -> Mapping[str, Any]:
                given = with_mask(lambda m: m[..., first:])(given)
                if _one_at_the_end(request):
                    return given
                seen = visible(S_q, kept, causal=request.causal, window=request.window, device=query.device)
                return {**given, "attn_mask": combined(given.get("attn_mask"), seen)}

            return adapt(inner[0], key=keys, value=keys, extra=masked)

        return per_call(inner, around)
