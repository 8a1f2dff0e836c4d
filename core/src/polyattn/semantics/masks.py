"""This module splits a request's position rules into the flag that torch's SDPA takes and a mask (S3, S4, S7, S8)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..contract import AttentionRequest
from .reference import visible

__all__ = ["additive", "combined", "combined_mask", "may_have_empty_rows", "open_empty_rows", "position_kind"]


def position_kind(request: AttentionRequest) -> Literal["all", "flag", "mask"]:
    """`all`: no rule by position; `flag`: torch's own (top-left) causal flag says it; `mask`: it must be spelt out."""
    if request.causal == "none" and request.window == (-1, -1) and not request.chunk:
        return "all"
    if request.window != (-1, -1) or request.chunk or request.mask != "none":
        return "mask"
    square = request.s_relation == "equal"
    return "flag" if square or request.causal == "top_left" else "mask"


def may_have_empty_rows(request: AttentionRequest) -> bool:
    """Return whether some query may see no key. By position alone that takes more queries than keys."""
    positional = position_kind(request) == "mask" and request.s_relation == "more"
    return positional or request.mask != "none"


def combined_mask(
    request: AttentionRequest, attn_mask: Tensor | None, s_q: int, s_k: int, device: torch.device
) -> Tensor:
    """Position rules and the caller's mask as one, [.., S_q, S_k]: bool, or additive when the caller's is."""
    seen = visible(s_q, s_k, causal=request.causal, window=request.window, chunk=request.chunk, device=device)
    if attn_mask is not None and seen is None:
        return attn_mask
    return combined(attn_mask, torch.ones(s_q, s_k, dtype=torch.bool, device=device) if seen is None else seen)


def combined(attn_mask: Tensor | None, seen: Tensor) -> Tensor:
    """A caller's mask and what may be seen by position, as one: bool, or additive when the caller's is."""
    if attn_mask is None:
        return seen
    if attn_mask.dtype == torch.bool:
        return attn_mask & seen
    return attn_mask.masked_fill(~seen, float("-inf"))


def open_empty_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(mask whose empty rows see everything, bool [.., S_q, 1] of the rows that saw something).

    Kernels disagree on rows without keys, NaN included. Opened rows compute something finite that is thrown away,
    so the repaired output is 0 and every gradient through it exactly 0.
    """
    if mask.dtype == torch.bool:
        alive = mask.any(-1, keepdim=True)
        return mask | ~alive, alive
    alive = (mask > float("-inf")).any(-1, keepdim=True)
    return mask.masked_fill(~alive, 0.0), alive


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as an additive one."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
