"""How much memory the scores of a call take, and how many query rows fit under a cap."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...errors import UnsupportedRequestError

_LIVE_SCORES = 3
"""Score-sized tensors alive at the worst moment of one block (measured by a test): logits, a temporary, weights."""


def score_bytes(batch: int, heads: int, S_q: int, S_k: int, *, itemsize: int = 4) -> int:
    """Bytes that the scores of one call need at once, temporaries included.

    Args:
        batch, heads: B and H_q.
        S_q, S_k: lengths.
        itemsize: bytes of one number, 4 for float32, 8 for float64.
    """
    return _LIVE_SCORES * batch * heads * S_q * S_k * itemsize


def _too_large(need: int, cap: int, why: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"the reference would need {need} bytes ({need / 2**30:.3g} GiB) for attention scores, above its cap of "
        f"{cap} bytes ({cap / 2**30:.3g} GiB), {why}. Install or choose another backend for this call "
        "(`polyattn list` shows them), shorten the sequences, or raise POLYATTN_REFERENCE_MEMORY_GB"
    )


def trains(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def rows_within(max_bytes: int, row_bytes: int, S_q: int, train: bool) -> int:
    """How many query rows may be computed at once. Raises UnsupportedRequestError when the cap cannot be kept."""
    if row_bytes * S_q <= max_bytes:
        return S_q
    if train:
        raise _too_large(row_bytes * S_q, max_bytes, "and a backward pass keeps them all")
    if row_bytes > max_bytes:
        raise _too_large(row_bytes, max_bytes, "even for one query row at a time")
    return max_bytes // row_bytes


def keeps_less(kept_bytes: int | None, need: int, tensors: Iterable[Tensor | None]) -> bool:
    """Return whether a backward is to compute scores again. torch's transforms do not go through what that needs."""
    return (
        kept_bytes is not None
        and not torch.compiler.is_compiling()
        and need > kept_bytes
        and trains(tensors)
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )
