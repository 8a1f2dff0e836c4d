"""`gather_states`: states in slots of a pool by a kernel that takes one state for each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import CALL, Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GatherStates"]


class GatherStates(Lowering):
    """Copies the states out of their slots before the call, and back after it (S10).

    A sequence without a slot reads some state and writes none. Its output is set to 0, and so are its drafts' states.
    """

    name = "gather_states"
    summary = "states are copied out of the slots of a pool, and back"
    fields = frozenset({"state_slots"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.family == "linear" and request.state_slots and not request.transform:
            yield Rewrite((changed(request, state_slots=False),), CALL + 4.0, detail="gathered, and scattered back")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        run, writes = inner[0].forward, request.state_out != "every"

        def forward(
            query: Tensor, key: Tensor, value: Tensor, *, state: Tensor, state_slots: Tensor, **given: Any
        ) -> tuple[Tensor, Tensor]:
            slots, kept = state_slots.long().clamp(min=0), state_slots >= 0
            before = state[slots]
            if not len(slots):  # nobody whose slot the others could write
                out, last = run(query, key, value, state=before, **given)
                return out, state if writes else last
            out, last = run(query, key, value, state=before, **given)
            tokens, cu_seqlens = kept[:, None], given.get("cu_seqlens")
            if cu_seqlens is not None:
                lengths = cu_seqlens.diff().long()
                tokens = torch.repeat_interleave(kept, lengths, output_size=query.shape[1])[None]
            out.masked_fill_(~tokens[..., None, None], 0.0)
            if not writes:
                last = last.masked_fill(~kept[:, None, None, None, None], 0.0)
            else:
                # No slot is written with two values: sequences without one write what the first that has one writes.
                order = torch.arange(len(kept), device=kept.device).where(kept, kept.int().argmax())
                state[slots[order]] = last.to(state.dtype).where(kept[:, None, None, None], before)[order]
            return out, state if writes else last

        return Bound(forward)
