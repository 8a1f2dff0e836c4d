"""A step as npu_fused_infer_attention_score_v2 is told it: lengths as numbers of the host, in one call or several.

Packed queries (TND) take running sums of queries and the keys of each sequence; padded ones (BSND, BNSD) take both for
each sequence. A single query ignores modes and bands, so sequences of one query are calls of their own where a window
is asked for; others are padded among those of about their length, to at most twice as many rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, PagedTables

from .records.inference import PAGE
from .sparsity import BAND, Sparsity, by_position

__all__ = ["Group", "Lengths", "groups"]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Of each sequence: `starts` of its queries [N + 1] and `keys` [N]."""

    starts: list[int]
    keys: list[int]

    @classmethod
    def read(cls, tables: PagedTables) -> Lengths:
        """Those of a call: the caller's, or else the device is waited for, once."""
        if tables.host is not None:
            return cls(tables.listed("cu_seqlens_q"), tables.listed("seq_lens"))
        both, count = torch.cat([tables.cu_seqlens_q, tables.seq_lens]).tolist(), tables.cu_seqlens_q.shape[0]
        return cls(both[:count], both[count:])

    @classmethod
    def of(cls, step: Any) -> Lengths:
        """Those of a serving step, as the host knows them."""
        return cls(step.host("cu_seqlens_q").tolist(), step.host("seq_lens").tolist())

    def queries(self, sequence: int) -> int:
        return self.starts[sequence + 1] - self.starts[sequence]


@dataclasses.dataclass(frozen=True)
class Group:
    """Sequences of one call.

    Attributes:
        layout: input_layout. rows: the most queries of a sequence. lens: actual_seq_qlen and actual_seq_kvlen.
        sequences: int64, which of the step's; None = all, in order. tokens: int64, their queries among the step's, for
            padded ones [sequences, rows]; None = all, in order. filled: bool [sequences, rows], rows that are queries;
            None = all. rule: which keys are seen.
    """

    layout: str
    rows: int
    lens: dict[str, list[int]]
    sequences: Tensor | None
    tokens: Tensor | None
    filled: Tensor | None
    rule: Sparsity

    def table(self, page_table: Tensor) -> Tensor:
        """int32 [sequences, columns], the pages of these sequences."""
        own = page_table if self.sequences is None else page_table[self.sequences]
        return own[:, : max(-(-max(self.lens["actual_seq_kvlen"]) // PAGE), 1)].contiguous()

    def take(self, packed: Tensor) -> Tensor:
        """The queries [T_q, H_q, D] of these sequences, as the layout has them."""
        own = packed if self.tokens is None else packed[self.tokens]
        if self.layout == "TND":
            return own
        own = own.view(-1, self.rows, *packed.shape[1:])
        return own.transpose(1, 2) if self.layout == "BNSD" else own

    def packed(self, result: Tensor) -> Tensor:
        """A result for `take(...)` as [queries, ...], in their order."""
        if self.layout == "TND":
            return result
        own = result.transpose(1, 2) if self.layout == "BNSD" else result
        return own.flatten(0, 1) if self.filled is None else own[self.filled]

    def places(self) -> Tensor | None:
        """int64 [queries], where `packed(...)` belongs among the step's; None = they are all, in order."""
        if self.tokens is None or self.filled is None:
            return None if self.tokens is None else self.tokens.flatten()
        return self.tokens[self.filled]


def groups(request: AttentionRequest, lens: Lengths, packs: bool, device: torch.device) -> list[Group]:
    """The calls of a step: every sequence that has queries and keys is in one of them.

    Args:
        packs: whether packed queries are taken, of these widths and from such pages.
    """
    live = [n for n, keys in enumerate(lens.keys) if keys and lens.queries(n)]
    if not live:
        return []
    windowed = request.window != (-1, -1)
    packs_singles = packs and request.dims[0] != request.dims[1]
    longest = max(map(lens.queries, live))
    if packs and (packs_singles or (longest > 1 and not windowed)):
        return [_packed(request, lens, live, device)]
    by_size: dict[int, list[int]] = {}
    for n in live:
        count = lens.queries(n)
        by_size.setdefault(2 if packs and count > 1 else count.bit_length(), []).append(n)
    return [
        _packed(request, lens, own, device) if packs and size > 1 else _padded(request, lens, own, device)
        for size, own in sorted(by_size.items())
    ]


def _index(numbers: Iterable[Any], device: torch.device) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64).to(device, non_blocking=True)


def _packed(request: AttentionRequest, lens: Lengths, own: list[int], device: torch.device) -> Group:
    counts = [lens.queries(n) for n in own]
    sequences = None if len(own) == len(lens.keys) else _index(own, device)
    tokens = None
    if sum(counts) != lens.starts[-1]:
        tokens = _index((t for n in own for t in range(lens.starts[n], lens.starts[n + 1])), device)
    both = {"actual_seq_qlen": list(accumulate(counts)), "actual_seq_kvlen": [lens.keys[n] for n in own]}
    rule = by_position(request, device) if max(counts) > 1 else Sparsity()
    assert rule is not None
    return Group("TND", max(counts), both, sequences, tokens, None, rule)


def _padded(request: AttentionRequest, lens: Lengths, own: list[int], device: torch.device) -> Group:
    counts, keys = [lens.queries(n) for n in own], [lens.keys[n] for n in own]
    rows, layout = max(counts), "BNSD" if request.kv_layout == "HND" else "BSND"
    even = min(counts) == rows
    tokens = filled = None
    if not even or sum(counts) != lens.starts[-1]:
        # A row past the end repeats the last query.
        both = zip(own, counts, strict=True)
        tokens = _index(([lens.starts[n] + min(i, count - 1) for i in range(rows)] for n, count in both), device)
        if not even:
            filled = torch.tensor([[i < count for i in range(rows)] for count in counts]).to(device, non_blocking=True)
    sequences = None if len(own) == len(lens.keys) else _index(own, device)
    rule = by_position(request, device)
    assert rule is not None
    if rows == 1:
        rule = _last_keys(rule, keys, device) if rule.mode == BAND else Sparsity()
    return Group(layout, rows, {"actual_seq_qlen": counts, "actual_seq_kvlen": keys}, sequences, tokens, filled, rule)


def _last_keys(band: Sparsity, keys: list[int], device: torch.device) -> Sparsity:
    """What single queries see of a band, as a mask [sequences, 1, 1, columns]: bands mean nothing to them."""
    ends = torch.tensor(keys, dtype=torch.int32).to(device, non_blocking=True)[:, None]
    place = torch.arange(-(-max(keys) // PAGE) * PAGE, dtype=torch.int32, device=device)
    hidden = (place < ends - 1 - band.before) | (place >= ends)
    return Sparsity(mask=hidden[:, None, None])
