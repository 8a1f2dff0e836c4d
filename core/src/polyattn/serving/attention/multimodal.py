"""Attention of multimodal towers: packed patches, every document by itself, in both directions.

The backend is that of `mm_attention_backend` (`--mm-attention-backend`, the component override `mm`), else the same as
everywhere: `use_backend`, configuration, then the platform's best.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch.varlen import varlen_attention
from ...selection.inspection import explain
from ...selection.overrides import TOWER, Scope, component, current_scope
from ...selection.select import Selection

__all__ = ["multimodal", "vision_attention"]


class multimodal(component):  # noqa: N801 - reads as the statement it is
    """`with multimodal(): ...`: what is inside belongs to a multimodal tower, the component `mm`; within a component of
    a pipeline to its role `mm`, unless that has a role already."""

    def __init__(self) -> None:
        super().__init__(TOWER)

    def _next(self, before: Scope) -> Scope:
        backend, name, role = before
        if role or name == TOWER:
            return before
        return (backend, name, TOWER) if name else (backend, TOWER, "")

    @classmethod
    def entered(cls) -> bool:
        """Return whether it would change nothing here."""
        here = current_scope()
        return cls()._next(here) == here


def vision_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention over packed images, frames or windows: each patch sees all patches of its document and no others.

    Args:
        query: [T, H_q, D]; key: [T, H_kv, D]; value: [T, H_kv, D_v]. Any head dim; what a kernel cannot take (72 and 80
            are usual in towers) is padded for it, exactly.
        cu_seqlens: int32 [N+1], where each document begins, and T at the end.
        max_seqlen: host int, at least the longest document: reading it from the device would wait.
        scale: of the logits, None = D ** -0.5. deterministic, out: as `polyattn.varlen_attention`.
        backend: by name; None = `mm_attention_backend`, then as everywhere.

    Returns:
        [T, H_q, D_v]. `polyattn.explain(vision_attention, ...)` says who computes it.

    Raises:
        As `polyattn.varlen_attention`.
    """
    with multimodal():
        found: Tensor = varlen_attention(
            query, key, value, backend=backend, out=out, **_options(cu_seqlens, max_seqlen, scale, deterministic)
        )
    return found


def _options(cu_seqlens: Tensor, max_seqlen: int, scale: float | None, deterministic: bool) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,  # the same tensor: queries and keys are the same tokens
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "scale": scale,
        "deterministic": deterministic,
    }


def _explain_vision(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    out: Tensor | None = None,
) -> Selection:
    with multimodal():
        options = _options(cu_seqlens, max_seqlen, scale, deterministic)
        return explain(varlen_attention, query, key, value, backend=backend, **options)


vision_attention.__polyattn_explain__ = _explain_vision  # type: ignore[attr-defined]
