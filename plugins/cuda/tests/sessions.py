"""The kit's cases through the sessions of a backend: each call is a step, planned, prepared and run for one layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyattn.serving.workspace import Limits, Workspaces
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated

__all__ = ["CallStep", "InSession"]


class CallStep:
    """The tables of one call as the step of an engine (`polyattn.contract.Session`)."""

    padding = 0

    def __init__(self, case: Case, mask: Tensor | None, tables: Mapping[str, Any]) -> None:
        r = case.request
        self.phase, self.page_size = r.phase, r.page_size
        self.page_table, self.seq_lens, self.cu_seqlens_q = (
            tables[name] for name in ("page_table", "seq_lens", "cu_seqlens_q")
        )
        self.max_seqlen_q, self.max_seqlen_k = tables["max_seqlen_q"], tables["max_seqlen_k"]
        self.sequences, self.tokens = self.seq_lens.shape[0], int(self.cu_seqlens_q[-1])
        self.tree_mask = None if not r.tree or mask is None else self._trees(mask)
        counts = -(-self.seq_lens // r.page_size)
        self.kv_indptr = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        owned = [row[:count] for row, count in zip(self.page_table, counts.tolist(), strict=True)]
        self.kv_indices = torch.cat(owned) if owned else self.page_table.new_empty(0)
        self.last_page_len = torch.minimum(self.seq_lens - (counts - 1) * r.page_size, self.seq_lens)
        self.slots = self._slots()

    def _trees(self, mask: Tensor) -> Tensor:
        """bool [N, N_d, N_d], the last columns of each sequence's mask."""
        drafts = self.cu_seqlens_q.diff().tolist()
        mask = mask.expand(self.sequences, -1, -1, -1)
        trees = torch.ones(self.sequences, max(drafts), max(drafts), dtype=torch.bool)
        for n, (s_q, s_k) in enumerate(zip(drafts, self.seq_lens.tolist(), strict=True)):
            if s_k:
                trees[n, :s_q, :s_q] = mask[n, 0, :s_q, s_k - s_q : s_k]
        return trees

    def _slots(self) -> Tensor:
        """int64 [T_q]; of padding rows on page 0."""
        found = []
        for n, s_q in enumerate(self.cu_seqlens_q.diff().tolist()):
            place = torch.arange(-s_q, 0) + int(self.seq_lens[n])
            page = self.page_table[n].long()[(place // self.page_size).clamp(min=0)] if self.seq_lens[n] else 0
            found.append((page * self.page_size + place % self.page_size) if self.seq_lens[n] else place * 0)
        return torch.cat(found)

    def host(self, name: str) -> Tensor:
        found: Tensor = getattr(self, name).cpu()
        return found


class InSession(Emulated):
    """As `Emulated`, by `Bound.session` wherever a request has one and its step can be planned."""

    def cases(self, per_row: int = 12, **which: Any) -> list[Case]:
        made = [c for c in super().cases(per_row, **which) if c.check == "values"]
        # Parts are calls of their own, masks that are no trees the layers'; and no page here is that of padding.
        made = [c for c in made if not c.request.kv_parts and (c.request.tree or c.request.mask == "none")]
        return [c for c in made if not c.request.zero_size and not (c.new_rows and any(not k for _, k in c.lengths))]

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        bound = self.bind(**_fields(case))
        given = {("attn_mask" if name == "mask" else name): t for name, t in tensors.items()}
        new_rows = given.get("key") is not None and not case.request.save_kv_cache
        if bound.session is None or new_rows:
            return super().call(case, tensors, extra, out)
        step = CallStep(case, given.get("attn_mask"), extra)
        limits = Limits(step.sequences, max(step.tokens, 1), case.request.page_size * extra["page_table"].shape[1])
        slot = Workspaces(self.device).slot("step", "session", limits, extra["page_table"].shape[1])
        session = bound.session(slot)
        session.plan(step)
        session.prepare(step)
        names = ("query", "cache") if case.request.family == "mla" else ("query", "key_cache", "value_cache")
        tables = {name: value for name, value in extra.items() if name != "kv_parts"}
        positional = [given.pop(name) for name in names]
        return session.forward(*positional, **given, **tables, out=out)


def _fields(case: Case) -> dict[str, Any]:
    """The case's request without the facts of a machine."""
    return {n: v for n, v in vars(case.request).items() if n not in ("platform", "arch", "toolkit", "features")}
