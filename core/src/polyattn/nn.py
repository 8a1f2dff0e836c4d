"""Attention as modules: on one device, and of tokens that lie on several."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .contract import Place
from .dispatch.call_key import Static
from .dispatch.dense import DenseSite, bind
from .distributed.layers import RingAttention, UlyssesAttention, USPAttention
from .selection.select import Selection

__all__ = ["LocalAttention", "RingAttention", "USPAttention", "UlyssesAttention"]


class LocalAttention(nn.Module):
    """`polyattn.attention` with its static arguments bound at construction.

    The overrides in force when it is built (`use_backend`, `component`) are captured; process-wide ones
    (`force_backend`, `configure`) still take effect later. Dropout applies in training mode only.

    Args:
        causal, window, softcap, scale, layout, return_lse, deterministic, backend, chunk, batch_invariant: as
            `polyattn.attention`.
        role: "self" or "cross", whose keys these are; None = not said.
        dropout_p: dropout on the attention weights while training.
    """

    def __init__(
        self,
        *,
        causal: bool | str = False,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        scale: float | None = None,
        layout: str = "BSHD",
        dropout_p: float = 0.0,
        return_lse: bool = False,
        deterministic: bool = False,
        role: str | None = None,
        backend: str | None = None,
        chunk: int = 0,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "causal": causal,
            "window": window,
            "softcap": softcap,
            "scale": scale,
            "layout": layout,
            "return_lse": return_lse,
            "deterministic": deterministic,
            "role": role,
            "backend": backend,
            "chunk": chunk,
            "batch_invariant": batch_invariant,
        }
        self._infer: DenseSite = bind(**options)
        self._train: DenseSite = bind(**options, dropout_p=dropout_p) if dropout_p else self._infer

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        place: Place | None = None,
        alibi: Tensor | None = None,
        segments: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Shapes, place, alibi, segments and result as `polyattn.attention`."""
        site = self._train if self.training else self._infer
        # Python calls a method without making a tuple of the arguments, which `site(...)` would cost.
        if place is not None or alibi is not None or segments is not None:
            return site.__call__(query, key, value, attn_mask, sinks, None, place, alibi, segments)
        return site.__call__(query, key, value, attn_mask, sinks)

    def __polyattn_explain__(self, *args: Any, **kwargs: Any) -> Selection:
        site = self._train if self.training else self._infer
        return site.__polyattn_explain__(*args, **kwargs)

    def extra_repr(self) -> str:
        """The bound arguments that are not the default."""
        default = Static()._asdict()
        changed = {k: v for k, v in self._train.static._asdict().items() if v != default[k]}
        return ", ".join(f"{k}={v!r}" for k, v in changed.items())
