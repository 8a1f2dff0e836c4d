"""Random schedules of an engine, drawn from a seed: what is served beside a request, when it comes, how many run and
how many pages there are. Under `batch_invariant` the attention of a request's tokens has the same bits in all of them.

    python -m tests.serving.schedules 1000      # so many; prints what they had
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import torch
from torch import Tensor

from polyattn.serving.engine import Engine, EngineConfig, SamplingParams
from polyattn.serving.kv_cache.pool import KVCacheConfig

from .toy_model import VOCAB, ToyRunner

PIECE = 8
"""Tokens of a prompt that run together: every engine here has room for so many beside those that decode."""
_PROMPTS = tuple([number, *random.Random(number).choices(range(VOCAB), k=length)] for number, length in enumerate(
    (0, 3, 7, 8, 15, 16, 24, 33)
))  # fmt: skip
"""Of all schedules. The first token says which it is, so that equal tokens before a place are one request's."""


@dataclasses.dataclass
class Seen:
    """What the schedules had, and where bits differed: (tokens before, layer)."""

    schedules: int = 0
    calls: int = 0
    again: int = 0
    preempted: int = 0
    mixed: int = 0
    cut: int = 0
    differ: list[tuple[tuple[int, ...], int]] = dataclasses.field(default_factory=list)


class _ByRow:
    """A matrix by which rows are multiplied one at a time."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def __rmatmul__(self, rows: Tensor) -> Tensor:
        return torch.stack([row @ self.matrix for row in rows])


class Watched(ToyRunner):
    """The toy model with all but its attention row by row, since a product's bits follow from how many rows it has. It
    holds the attention of each token, by the tokens up to it, and how many of its request ran with it, beside what any
    schedule before gave."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self._known: dict[tuple[tuple[int, ...], int, int], bytes] = {}
        self.engine: Engine

    def serve(self, backend: Any) -> Any:
        def forward(ids: Tensor, positions: Tensor, keep: Tensor | None, batch: Any, steps: Any) -> Tensor:
            self.seen.mixed += batch.mode.value == "mixed"
            self.seen.cut += any(
                count > 1 and prefix for count, prefix in zip(batch.query_lens, batch.prefix_lens, strict=True)
            )
            running = {request.row: request.tokens for request in self.engine._scheduler.running}
            told = [
                (tuple(running[row][: prefix + n + 1]), count)
                for row, count, prefix in zip(batch.rows, batch.query_lens, batch.prefix_lens, strict=True)
                for n in range(count)
            ]
            assert [tokens[-1] for tokens, _ in told] == ids.tolist()

            def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out: Tensor = backend.forward(q, k, v, layer)
                for (tokens, count), row in zip(told, out, strict=True):
                    # Whether bits follow from how many tokens run together is for the processor to say.
                    self._hold(tokens, layer.layer_id, bytes([count]) + row.numpy().tobytes())
                return out

            logits = self._run(ids, positions, attend)
            return logits if keep is None else logits[keep]

        return forward

    def _hold(self, tokens: tuple[int, ...], layer: int, bits: bytes) -> None:
        # A page says where the keys of a window begin, for a kernel: another size is another server, not a schedule.
        known = self._known.setdefault((tokens, layer, self.engine.config.cache.page_size), bits)
        self.seen.calls += 1
        self.seen.again += known is not bits
        if known != bits:
            self.seen.differ.append((tokens, layer))

    def _run(self, ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        inputs, head = self.inputs, self.head
        self.inputs, self.head = [_ByRow(one) for one in inputs], _ByRow(head)  # type: ignore[assignment]
        try:
            return super()._run(ids, positions, attend)
        finally:
            self.inputs, self.head = inputs, head


def run_schedules(count: int, *, first: int = 0, batch_invariant: bool = True, backend: str = "torch_native") -> Seen:
    """Run `count` schedules, of the seeds from `first` on."""
    seen = Seen()
    model = Watched(seen)
    for seed in range(first, first + count):
        _run_one(model, random.Random(seed), batch_invariant, backend)
        seen.schedules += 1
    return seen


@torch.no_grad()
def _run_one(model: Watched, chance: random.Random, batch_invariant: bool, backend: str) -> None:
    rows, size = chance.randrange(2, 8), chance.choice((2, 4, 8))
    longest = 48
    # From what one request needs on; few, so that some lose theirs.
    pages = 2 + -(-longest // size) + chance.randrange(rows * longest // (3 * size))
    config = EngineConfig(
        KVCacheConfig(page_size=size), pages=pages, max_requests=rows, max_tokens=longest,
        max_batch_tokens=PIECE + rows - 1, backend=backend, batch_invariant=batch_invariant, graphs=False,
    )  # fmt: skip
    engine = model.engine = Engine(model, config)
    left, live = chance.randrange(2, 9), []
    while left or engine.unfinished:
        if left and (not engine.unfinished or chance.random() < 0.5):
            left -= 1
            more = SamplingParams(max_new_tokens=chance.randrange(1, 12))
            live += engine.add(chance.choice(_PROMPTS), more, n=chance.choice((1, 1, 2)))
        if live and chance.random() < 0.03:
            engine.cancel(live.pop(chance.randrange(len(live))))
        for output in engine.step():
            live.remove(output.id)
            model.seen.preempted += output.preemptions
        engine.check()


def main() -> None:
    seen = run_schedules(int(sys.argv[1]))
    words = {name: value for name, value in vars(seen).items() if name != "differ"}
    print(words, f"differ: {len(seen.differ)}", *seen.differ[:3], sep="\n")
    sys.exit(bool(seen.differ))


if __name__ == "__main__":
    main()
