"""`draft_by_draft`: the states of all draft tokens by a kernel that gives the last one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import CALL, Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DraftByDraft"]


class DraftByDraft(Lowering):
    """Decodes the draft tokens one after the other, each from the state of its parent (S10)."""

    name = "draft_by_draft"
    summary = "draft tokens are decoded one by one, each from the state after its parent"
    fields = frozenset({"state_out", "tree", "phase", "s_relation", "spec_topk"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        served = request.family == "linear" and request.state_out == "every"
        if not served or request.transform or request.state_slots or request.zero_size or request.grad:
            return
        one = changed(request, state_out="", tree=False, phase="decode", s_relation="one", spec_topk=0, misaligned=True)
        # A call for each token, each with the whole state.
        yield Rewrite((one.normalised(),), 8 * CALL, detail="a call for each draft token")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        run, D, (_, D_v) = inner[0].forward, request.head_dim, request.dims
        sizes = (D_v, D) if request.state_layout == "VK" else (D, D_v)
        per_token = ("gate", "beta")

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            state: Tensor | None = None,
            parents: Tensor | None = None,
            out: Tensor | None = None,
            **given: Any,
        ) -> tuple[Tensor, Tensor]:
            B, S, heads = value.shape[:3]
            if state is None:
                wide = torch.float64 if value.dtype == torch.float64 else torch.float32
                state = torch.zeros(B, heads, *sizes, dtype=wide, device=value.device)
            # The first state is that before the drafts, which a parent of -1 means.
            states, outs, rows = [state], [], torch.arange(B, device=value.device)
            for t in range(S):
                before = states[-1] if parents is None else torch.stack(states)[parents[:, t].long() + 1, rows]
                at = slice(t, t + 1)
                tokens = {name: each[:, at] if name in per_token else each for name, each in given.items()}
                found, after = run(query[:, at], key[:, at], value[:, at], state=before, **tokens)
                outs.append(found)
                states.append(after)
            whole = torch.cat(outs, 1)
            return (whole if out is None else out.copy_(whole)), torch.stack(states[1:], 1)

        return Bound(forward)
