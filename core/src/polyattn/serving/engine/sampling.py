"""How the next token is drawn from logits.

A draw depends on the seed of its request and on its place only, so that neither the batch, nor preemption, nor drafts,
nor the order of arrival changes what a request says.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...errors import InvalidInputError

__all__ = ["SamplingParams", "distributions", "sample", "uniform"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Describes what one request asks of its output.

    Attributes:
        max_new_tokens: at least 1. temperature: 0 = greedy. top_p: in (0, 1]. top_k: 0 = all.
        seed: of the draws; sample number i of a prompt draws with (seed, i).
        stop_token_ids: tokens that end the output; the one met is its last token.

    Raises:
        InvalidInputError: a value outside its range.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stops = self.stop_token_ids
        if isinstance(stops, str) or not isinstance(stops, Iterable) or not all(_whole(token) for token in stops):
            raise InvalidInputError(
                f"stop_token_ids={self.stop_token_ids!r} of SamplingParams must be token ids, such as (2,)"
            )
        rules = {
            "max_new_tokens": (_whole(self.max_new_tokens) and self.max_new_tokens >= 1, "1 or more, a whole number"),
            "temperature": (_number(self.temperature) and 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_p": (_number(self.top_p) and 0 < self.top_p <= 1, "above 0, at most 1 (off)"),
            "seed": (_whole(self.seed), "a whole number"),
            "top_k": (_whole(self.top_k) and self.top_k >= 0, "0 (off) or more, a whole number"),
        }
        for name, (fine, allowed) in rules.items():
            if not fine:
                raise InvalidInputError(f"{name}={getattr(self, name)!r} of SamplingParams must be {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def distributions(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distributions that tokens are drawn from: temperature first, then top_k, then top_p, as transformers does.

    Args:
        logits: [R, V]; params: R of them. A greedy row puts everything on its first largest logit.

    Returns:
        fp32 [R, V], rows sum to 1.
    """
    device, vocab = logits.device, logits.shape[-1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    scaled = logits.float() / column([p.temperature or 1.0 for p in params])
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    kept = column([float(1 if p.greedy else min(p.top_k or vocab, vocab)) for p in params])
    places = torch.arange(vocab, device=device)[None]
    ordered = ordered.masked_fill(places >= kept, float("-inf"))
    probs = ordered.softmax(dim=-1)
    # A token stays while those before it have not reached top_p: the first always does.
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill((before >= column([p.top_p for p in params])) & (places > 0), 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, probs / probs.sum(dim=-1, keepdim=True))


def sample(logits: Tensor, params: Sequence[SamplingParams], points: Sequence[float]) -> Tensor:
    """Draw one token per row.

    Args:
        logits: [R, V]. points: per row the number in [0, 1) that decides, as `uniform` gives it; of greedy rows it is
            not read.

    Returns:
        int64 [R], -1 where the logits have no largest finite number: they are NaN, or infinite.
    """
    best, greedy = logits.max(dim=-1)
    # A CPU's numbers are read for nothing, and a device's are waited for. What is finite is 0 from itself.
    if not (best.is_cpu and all(map(math.isfinite, best.tolist()))):
        greedy = torch.where(best - best == 0, greedy, -1)
    if all(p.greedy for p in params):
        return greedy
    cumulated = distributions(logits, params).double().cumsum(dim=-1)
    at = torch.tensor(points, dtype=torch.float64, device=logits.device)[:, None] * cumulated[:, -1:]
    # right=True never ends on a token of probability 0, not even for u = 0.
    drawn = torch.searchsorted(cumulated, at, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    is_greedy = torch.tensor([p.greedy for p in params], device=logits.device)
    return torch.where(is_greedy | (greedy < 0), greedy, drawn)


def uniform(params: SamplingParams, number: int, place: int) -> float:
    """The number in [0, 1) that decides what follows the first `place` tokens of sample `number` of a prompt."""
    return 0.0 if params.greedy else random.Random(f"{params.seed}/{number}/{place}").random()
