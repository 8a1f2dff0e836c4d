"""This module has what the public calls of all families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...adapters.alignment import aligned
from ..cases import Case
from .base import Call

__all__ = ["COMMON", "keywords", "off_boundary_too"]

COMMON = frozenset(
    (
        *("family", "dtype", "head_dim", "v_head_dim", "causal", "window", "softcap", "sinks", "mask", "scale"),
        *("chunk", "lse", "deterministic", "batch_invariant", "s_relation", "zero_size"),
    )
)
"""Fields that the public call of every softmax family can ask for (but for softcap and sinks in MLA's)."""


def keywords(call: Call) -> dict[str, Any]:
    """The keyword arguments that every public call has, and the call's own tensors and lengths."""
    r = call.case.request
    causal: bool | str = {"none": False, "bottom_right": True}.get(r.causal, r.causal)
    return {
        "causal": causal,
        "window": r.window,
        "chunk": r.chunk,
        "scale": r.scale,
        "return_lse": r.lse,
        "deterministic": r.deterministic,
        "batch_invariant": r.batch_invariant,
        "attn_mask": call.tensors.get("mask"),
        **call.extra,
    }


def off_boundary_too(case: Case, tensors: Mapping[str, Tensor]) -> Case:
    """The case of a part of a call: cutting it may move rows off 16-byte boundaries, which the call will notice."""
    inputs = [tensors[name] for name in ("query", "key", "value") if name in tensors]
    request = dataclasses.replace(case.request, misaligned=not aligned(*inputs))
    return dataclasses.replace(case, request=request)
