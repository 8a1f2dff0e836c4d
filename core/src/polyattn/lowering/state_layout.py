"""`state_layout`: a recurrent state with its axes the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StateLayout"]

_OTHER = {"KV": "VK", "VK": "KV"}


class StateLayout(Lowering):
    """Gives a kernel the transpose of the state, as a view, and takes the transpose of the new one (S10)."""

    name = "state_layout"
    summary = "the state of linear attention is transposed, KV or VK"
    fields = frozenset({"state_layout"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        # A pool is updated where it is: its states are gathered first.
        served = request.family == "linear" and request.state_layout in _OTHER and not request.state_slots
        if not served or request.transform:
            return
        other = _OTHER[request.state_layout]
        # The state is read and written once more.
        yield Rewrite((changed(request, state_layout=other),), 2.0, detail=f"{request.state_layout} -> {other}")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        run = inner[0].forward

        def forward(*tensors: Tensor, state: Tensor | None = None, **given: Any) -> tuple[Tensor, Tensor]:
            out, last = run(*tensors, state=None if state is None else state.mT.contiguous(), **given)
            return out, last.mT.contiguous()

        return Bound(forward)
