"""This module chooses the backend of the unabsorbed form: packed heads, which a backend for latent rows need not
know."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ...contract import AttentionRequest
from ...dispatch.binding import device_facts, dtype_name
from ...errors import BackendUnavailableError, UnsupportedRequestError
from ...selection.inspection import catalogue
from ...selection.overrides import current_settings
from ...selection.select import Choice, Policy, Selection, select

__all__ = ["Companion", "companion"]

_AUTOMATIC = frozenset({"tuned", "cost model", "platform rule", "priority", "lowering"})
"""`Selection.source` where nobody asked for a backend."""


@dataclasses.dataclass(frozen=True)
class Companion:
    """The `backend` argument of the varlen calls beside a prefill backend, and why; None = as selection finds."""

    backend: str | None
    why: str


def companion(prefill: Selection, query: Tensor, v_head_dim: int, scale: float) -> Companion:
    """Choose for the unabsorbed form.

    A backend that was asked for keeps it where it serves packed heads too. One that reads latent rows only cannot, and
    what was asked for is its rows' attention: selection then finds another, as if nothing had been asked.

    Args:
        prefill: who serves the extend phase. query: [T, H, D_nope + D_r], for its facts. v_head_dim: D_v.

    Raises:
        UnsupportedRequestError, BackendUnavailableError: nobody serves packed heads of this shape.
    """
    if prefill.source in _AUTOMATIC:
        return Companion(None, "automatic, as the prefill backend")
    asked, strict = _requests(query, v_head_dim, scale), current_settings().strict
    try:
        for request in asked:
            select(request, catalogue(), Policy(Choice(prefill.id, prefill.source), strict=strict))
    except (UnsupportedRequestError, BackendUnavailableError) as exc:
        found = select(asked[0], catalogue(), Policy(strict=strict))
        return Companion(found.id, f"{prefill.id} serves latent rows but not packed heads ({exc}): {found.why}")
    return Companion(prefill.id, f"{prefill.source} names it for prefill")


def _requests(query: Tensor, v_head_dim: int, scale: float) -> tuple[AttentionRequest, AttentionRequest]:
    """The calls of `prefill.attend`: new tokens, and a chunk of prefix."""
    causal = AttentionRequest(
        **device_facts(query.device),
        family="varlen",
        layout="THD",
        dtype=dtype_name(query.dtype),
        heads=query.shape[1],
        kv_heads=query.shape[1],
        head_dim=query.shape[2],
        v_head_dim=v_head_dim,
        scale=scale,
        causal="bottom_right",
        s_relation="more",
        lse=True,
    )
    return causal.normalised(), dataclasses.replace(causal, causal="none").normalised()
