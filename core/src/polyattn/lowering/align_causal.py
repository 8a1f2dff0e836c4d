"""`align_causal`: lengths that differ, by kernels that know square calls or one alignment only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import CALL, Lowering, Rewrite
from .lengths import RELATIONS, check_size, longer, of_one_kind, per_call, position_axis, with_mask
from .widths import odd_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AlignCausal"]

_Way = Literal["", "crop", "split", "drop", "pad"]


def _way(request: AttentionRequest) -> _Way:
    dense = request.family == "dense" and not request.segments  # which are of all queries and keys
    if not dense or request.zero_size or request.tree or request.transform:
        return ""
    fewer = request.s_relation in ("one", "fewer")
    if request.causal == "top_left":
        plain = request.window == (-1, -1) and not (request.chunk or request.alibi or request.dropout)
        return "crop" if fewer else "split" if request.s_relation == "more" and plain else ""
    if request.s_relation == "more" and (request.causal == "bottom_right" or request.chunk):
        return "drop"
    return "pad" if fewer else ""


class AlignCausal(Lowering):
    """Row i stands at the key position i (top-left) or i + S_k - S_q (bottom-right, S3). Rows and keys that nothing
    depends on are left away or added, and both are the same:

    - crop, top-left with fewer queries than keys: no row sees a key past S_q - 1, so those are left away;
    - split, top-left with more queries: the first S_k rows are a square causal call, the others see every key;
    - drop, bottom-right with more queries: the first S_q - S_k rows see nothing, and get out = 0, lse = -inf (S7);
    - pad, bottom-right with fewer queries: S_k - S_q rows of zeros before them, whose output is thrown away.
    """

    name = "align_causal"
    summary = "queries or keys are cropped, split or padded until their lengths agree"
    fields = frozenset({"causal", "s_relation"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        way = _way(request)
        causal = "bottom_right" if request.causal == "top_left" else request.causal
        # A view of some rows of a tensor may start between two boundaries.
        misaligned = request.misaligned or (way != "pad" and odd_rows(request))
        request = changed(request, misaligned=misaligned)
        square = changed(request, causal=causal, s_relation="equal")
        if way == "crop":
            yield Rewrite((square,), 0.0, detail="keys cropped to S_q, square causal")
        elif way == "drop":
            # The rows left away come back as zeros: the output is copied once.
            yield Rewrite((square,), 2.0, detail="the S_q - S_k rows that see no key are left away")
        elif way == "pad":
            # All of S_k rows are computed for the sake of S_q; only the tensors know how many times as much that is.
            cost = 64.0 if request.s_relation == "one" else 16.0
            yield Rewrite((square,), cost, detail="S_q padded to S_k in front: S_k / S_q times the computation")
        elif way == "split":
            others = [changed(request, causal="none", s_relation=r) for r in RELATIONS]
            # K and V are read twice, and the output is put together from its parts.
            detail = "the first S_k rows square causal, the others unmasked"
            yield Rewrite((square, *others), CALL + 4.0, detail=detail)

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from .split_rows import split_rows
        from .tensors import Route, adapt

        s, way, kernel = position_axis(request.layout), _way(request), inner[0]
        if way == "split":
            return split_rows(s, of_one_kind(inner, rewrite.inner))

        def around(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bound:
            S_q, S_k = query.shape[s], key.shape[s]
            more = abs(S_k - S_q)
            if way == "crop":
                keys = Route(lambda t: t.narrow(s, 0, S_q), lambda grad: longer(grad, s, back=more))
                return adapt(kernel, key=keys, value=keys, extra=with_mask(lambda m: m[..., :S_q]))
            if way == "drop":
                return adapt(
                    kernel,
                    query=Route(lambda t: t.narrow(s, more, S_k), lambda grad: longer(grad, s, front=more)),
                    out=Route(lambda t: t.narrow(s, more, S_k), lambda t: longer(t, s, front=more)),
                    lse=Route(
                        lambda t: t.narrow(s, more, S_k), lambda t: longer(t, s, front=more, value=float("-inf"))
                    ),
                    extra=with_mask(lambda m: m[..., more:, :]),
                )
            check_size(request, "padding S_q to S_k", query.numel() // S_q * S_k)
            # The rows added see keys, so that no kernel meets an empty row; their dout is 0, so they move no gradient.
            rows = Route(lambda t: longer(t, s, front=more), lambda t: t.narrow(s, more, S_q))
            attend = with_mask(lambda m: longer(m, 2, front=more, value=float(not m.is_floating_point())))
            return adapt(kernel, query=rows, out=rows, lse=rows, extra=attend)

        return per_call(inner, around)
