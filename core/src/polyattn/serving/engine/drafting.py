"""Drafts of a small model for the target to verify."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ..attention.phases import Verifier
from ..kv_cache.pool import KVCacheConfig
from ..memory import Memory, Runner, check_runner
from ..speculative import Beam, TreeDraft
from ..step.batch import ForwardMode
from ..step.tree import DraftTree
from .scheduler import Request

__all__ = ["Drafter", "Speculative"]


@dataclasses.dataclass(frozen=True)
class Speculative:
    """Speculative decoding with a draft model.

    Attributes:
        runner: the draft model, of the target's vocabulary.
        steps: levels that are drafted. topk: continuations of each node: 1 = a chain, more = a tree.
        draft_tokens: nodes that are verified, the last accepted token included; 0 = steps + 1 of a chain, and
            steps * topk + 1 of a tree.
        verify: whose backend verifies, "prefill" or "decode"; None = configuration, then "prefill".

    Raises:
        InvalidInputError: a count that drafts cannot have.
    """

    runner: Runner
    steps: int = 3
    topk: int = 1
    draft_tokens: int = 0
    verify: Verifier | None = None

    def __post_init__(self) -> None:
        check_runner("the draft model", self.runner)
        for name, least in (("steps", 1), ("topk", 1), ("draft_tokens", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidInputError(f"speculative {name}={value!r}; {least} or more is needed, a whole number")
        if not self.draft_tokens:
            object.__setattr__(self, "draft_tokens", self.steps * self.topk + 1)
        most = 1 + self.topk + (self.steps - 1) * self.topk**2
        if not 2 <= self.draft_tokens <= most or (self.topk == 1 and self.draft_tokens != most):
            allowed = f"{most}, one more than steps" if self.topk == 1 else f"2 to {most}"
            raise InvalidInputError(
                f"speculative draft_tokens={self.draft_tokens} with steps={self.steps} and topk={self.topk}; allowed: "
                f"{allowed}"
            )


class Drafter:
    """The draft model and its caches.

    A request's row holds the tokens that were accepted; it is brought up to date before each draft, so that prefills,
    preemption and forks of the target need no counterpart here. Branches of a draft are forks of that row, which copy
    only the page they write, and are gone when the draft is made.

    Its pool has room for every row at full length: it is small, and never a reason to wait.
    """

    def __init__(
        self, spec: Speculative, cache: KVCacheConfig, *, rows: int, max_tokens: int, step_tokens: int, **more: Any
    ) -> None:
        self.spec, self._budget = spec, max(step_tokens, rows)
        branches = 2 * rows * spec.topk  # those of a level, and those of the level before
        size = cache.page_size
        pages = 1 + rows * -(-max_tokens // size) + branches * (2 + spec.steps // size)
        self.memory = Memory(
            spec.runner,
            cache,
            pages=pages,
            rows=rows + branches,
            max_tokens=max_tokens,
            step_tokens=max(self._budget, rows * spec.topk),
            prefixes=False,
            **more,
        )

    def release(self, request: Request) -> None:
        """Forget a request."""
        if request.draft_row >= 0:
            self.memory.table.remove(request.draft_row)
            request.draft_row = -1

    def draft(self, requests: Sequence[Request]) -> tuple[DraftTree, Tensor]:
        """Trees for the tokens that follow each request, its last token as their root.

        Returns:
            (tree, tokens int64 [N, N_d]).
        """
        spec, table = self.spec, self.memory.table
        log_probs = self._catch_up(requests)[:, None]
        root = torch.tensor([request.tokens[-1] for request in requests], device=self.memory.device)
        growing = TreeDraft(root, spec.topk)
        kept = set(table.rows)
        try:
            self._grow(requests, growing, growing.grow(log_probs))
        finally:
            for row in set(table.rows) - kept:
                table.remove(row)
        return growing.best(spec.draft_tokens)

    def _grow(self, requests: Sequence[Request], growing: TreeDraft, beam: Beam) -> None:
        """The further levels of a draft; the rows of the last one are left to the caller."""
        spec, table = self.spec, self.memory.table
        nodes: list[dict[int, int]] = [{0: request.draft_row} for request in requests]
        for level in range(1, spec.steps):
            first = 1 + (level - 1) * spec.topk
            grown = [
                {first + j: table.fork(rows[parent]) for j, parent in enumerate(parents)}
                for rows, parents in zip(nodes, beam.tree.parents[:, -spec.topk :].tolist(), strict=True)
            ]
            self._drop(nodes)
            nodes = grown
            branches = [row for rows in nodes for row in rows.values()]
            self.memory.extend(branches, 1)
            ids = beam.tokens[:, -spec.topk :].flatten()
            logits = self.memory.forward(ForwardMode.DECODE, branches, [1] * len(branches), ids)
            beam = growing.grow(_log_probs(logits).view(len(requests), spec.topk, -1))

    def _drop(self, nodes: list[dict[int, int]]) -> None:
        for rows in nodes:
            for node, row in rows.items():
                if node:  # node 0 is the request's own row
                    self.memory.table.remove(row)

    def _catch_up(self, requests: Sequence[Request]) -> Tensor:
        """Run what the draft model has not seen; log-probabilities after each request's last token, [N, V]."""
        table = self.memory.table
        for request in requests:
            if request.draft_row < 0:
                request.draft_row = table.add()
        found: dict[int, Tensor] = {}
        while len(found) < len(requests):
            left, rows, counts, ids, ends = self._budget, [], [], [], []
            fresh = False
            for n, request in enumerate(requests):
                start = table.length(request.draft_row)
                count = min(left, len(request.tokens) - start)
                if count < 1:
                    continue
                fresh |= not start
                rows.append(request.draft_row)
                counts.append(count)
                ids += request.tokens[start : start + count]
                if start + count == len(request.tokens):
                    ends.append((n, len(ids) - 1))
                left -= count
            self.memory.extend(rows, counts)
            mode = ForwardMode.EXTEND if fresh else ForwardMode.DRAFT_EXTEND
            logits = self.memory.forward(mode, rows, counts, ids, keep=[end for _, end in ends] or [0])
            found.update({n: row for (n, _), row in zip(ends, logits, strict=False)})
            table.slide_all(rows)
        return _log_probs(torch.stack([found[n] for n in range(len(requests))]))


def _log_probs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)
