"""What AMD's libraries compute, one sequence at a time, and what they check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.testing.emulators.arithmetic import band, gradients, lse_of, scores, weighted, weights_of

__all__ = ["Rule", "attend", "check", "check_tensors", "differentiate", "parts"]


class Rule(NamedTuple):
    """What is not a tensor. Causal masks and windows are from the lower right corner; bounds of -1 are off."""

    scale: float
    causal: bool
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    dropout: float = 0.0

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[H_q, S_q, S_k] in float32 from [S_q, H_q, D] and [S_k, H_kv, D]; -inf where a key is not seen."""
        seen = band(q.shape[0], k.shape[0], self.window[0], 0 if self.causal else self.window[1])
        return scores(q, k, self.scale, seen, self.softcap)


def attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out [S_q, H_q, D_v] in float32 and LSE [H_q, S_q], without the sink. v may have more rows than k: those are
    weighted with 0, which leaves NaN what it is."""
    s = rule.scores(q, k)
    p = weights_of(s, lse_of(s, sink))
    p = torch.nn.functional.dropout(p, rule.dropout) if rule.dropout else p
    p = torch.nn.functional.pad(p, (0, v.shape[0] - k.shape[0]))
    return weighted(p, v), lse_of(s)


def differentiate(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one sequence: weights from the LSE, where -inf is read as 0; their sum from dout and out."""
    return gradients(dout, q, k, v, out, weights_of(rule.scores(q, k), lse), rule.scale)


def check(condition: bool, message: str) -> None:
    """TORCH_CHECK."""
    if not condition:
        raise RuntimeError(message)


def check_tensors(q: Tensor, *others: Tensor) -> None:
    """What Composable Kernel's entry points check."""
    for t in (q, *others):
        check(t.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
        check(t.dtype == q.dtype, "query and key must have the same dtype")
        check(t.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        check(t.shape[-1] <= 256, "CK only supports head dimension at most 256")
        check(t.shape[-1] % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    check(q.shape[0] > 0, "batch size must be positive")
    check(q.shape[-2] % others[0].shape[-2] == 0, "Number of heads in key/value must divide those of the query")


def parts(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """The sequences of a packed batch."""
    for starts in (starts_q, starts_k):
        check(starts.dtype == torch.int32 and starts.is_contiguous(), "cu_seqlens must be contiguous, of dtype int32")
    q, k = starts_q.tolist(), starts_k.tolist()
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])
