"""A call of the kit as a step of an engine: what a backend that plans is recorded through."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..contract import PagedTables, Session, Slot
from ..serving.attention.workspace import Limits, Workspaces
from ..serving.step.batch import ForwardMode
from ..serving.step.staging import Memory
from ..serving.step.step_metadata import Step
from .cases import Case
from .families import FAMILIES

__all__ = ["CallStep", "planned", "slot_of"]

_MODES = {"decode": ForwardMode.DECODE, "verify": ForwardMode.TARGET_VERIFY}


class CallStep(Step):
    """The tables of one call as the step of an engine (`polyattn.contract.Session`): its views are those of every
    step, and all of its tensors are where the page table is.

    Args:
        tensors, tables: of the call.
    """

    def __init__(self, case: Case, tensors: Mapping[str, Tensor], tables: PagedTables) -> None:
        self.page_table, self.seq_lens, self.cu_seqlens_q = tables[:3]
        device, sequences = self.page_table.device, len(case.lengths)
        super().__init__(Memory(device, False, sequences), ("call",))
        r = case.request
        self.mode, self.phase = _MODES.get(r.phase, ForwardMode.EXTEND), _MODES.get(r.phase, ForwardMode.EXTEND).phase
        self.group, self.window, self.padding, self.page_size = 0, -1, 0, r.page_size
        self._queries, self._lens = [q for q, _ in case.lengths], [k for _, k in case.lengths]
        self._starts = [0, *itertools.accumulate(self._queries)]
        self.sequences, self.tokens = sequences, sum(self._queries)
        self.max_seqlen_q, self.max_seqlen_k = tables.max_seqlen_q, tables.max_seqlen_k
        rows = [row[:count] for row, count in zip(self.page_table.tolist(), self._page_counts(), strict=True)]
        pages = [torch.tensor(row, dtype=torch.int32, device="cpu") for row in rows]
        self._pages = lambda: pages
        places = [list(range(max(keys - new, 0), keys)) or [-1] * new for new, keys in case.lengths]
        slots = [[self._slot(row, place) for place in of] for row, of in zip(rows, places, strict=True)]
        self._slots = torch.tensor([*itertools.chain(*slots)], dtype=torch.int64, device=device)
        self._positions = torch.tensor([*itertools.chain(*places)], dtype=torch.int64, device=device).clamp_(min=0)
        every = torch.arange(sequences, dtype=torch.int32, device=device)
        self.requests = every, torch.ones_like(every)  # a row of the request table for each, none of them padding
        self.tree_mask = None
        if r.tree:
            self.tree_mask = trees = self._trees(tensors["mask"])
            # A draft sees those above it and itself: it is as deep as they are many.
            depths = [seen[:new].sum(-1) for seen, new in zip(trees, self._queries, strict=True)]
            prefix = [keys - new for new, keys in case.lengths for _ in range(new)]
            self._positions = (torch.tensor(prefix, device=device) + torch.cat(depths) - 1).clamp_(min=0)

    def _slot(self, pages: list[int], place: int) -> int:
        """Return the slot of a token of a row with these pages; of one without keys on page 0."""
        return 0 if place < 0 else pages[place // self.page_size] * self.page_size + place % self.page_size

    def _trees(self, mask: Tensor) -> Tensor:
        """bool [N, N_d, N_d], the last columns of each sequence's mask."""
        drafts = max(self._queries)
        mask = mask.expand(self.sequences, -1, -1, -1)
        trees = torch.ones(self.sequences, drafts, drafts, dtype=torch.bool, device=mask.device)
        for n, (s_q, s_k) in enumerate(zip(self._queries, self._lens, strict=True)):
            if s_k:
                trees[n, :s_q, :s_q] = mask[n, 0, :s_q, s_k - s_q : s_k]
        return trees


def slot_of(step: Step, *, recorded: bool) -> Slot:
    """A slot for this step alone."""
    columns, device = max(step.page_table.shape[1], 1), step.page_table.device
    limits = Limits(step.sequences, max(step.tokens, 1), step.page_size * columns)
    return Workspaces(device).slot("kit", "session", limits, columns, recorded=recorded)


def planned(
    make: Callable[[Slot], Session],
    case: Case,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    *,
    recorded: bool,
) -> Callable[..., Any]:
    """A call through a session that has planned and prepared it: what is left is what a graph records."""
    extra = FAMILIES[case.request.family].keywords(extra)
    step = CallStep(case, tensors, extra["tables"])
    session = make(slot_of(step, recorded=recorded))
    session.plan(step)
    session.prepare(step)
    given: dict[str, Any] = {("attn_mask" if name == "mask" else name): tensor for name, tensor in tensors.items()}
    positional = [given.pop(name) for name in FAMILIES[case.request.family].positional]
    return lambda **more: session.forward(*positional, **given, **extra, **more)
