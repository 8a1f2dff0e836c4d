"""`AttentionLayer`: what the serving side knows of one attention layer of a model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..contract import scalars
from ..errors import InvalidInputError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttentionLayer", "LayerKind"]

LayerKind = Literal["decoder", "encoder_only", "cross"]


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention layer, as it is on this rank.

    Attributes:
        layer_id: unique within the model; the pool and the backend find the layer by it.
        heads, kv_heads: H_q and H_kv of this rank; H_q is a multiple of H_kv.
        head_dim: D of Q and K; latent: D_c + D_r. v_head_dim: D_v, 0 = D; latent: D_c.
        scale: of the logits, None = D ** -0.5; latent: required, that of the uncompressed heads (S2).
        window: earlier keys a query sees beside its own, -1 = all (Hugging Face's `sliding_window` minus 1, S4).
            An encoder-only layer sees as many later ones.
        softcap: of the logits, 0 = off (S5). sinks: [H_q] logits, or None (S5).
        kind: "decoder" (causal), "encoder_only" (every token of its sequence), or "cross" (every token of another one).
        latent: the cache holds one latent row per token for all heads (MLA).

    Raises:
        InvalidInputError: a value that no attention has.
    """

    layer_id: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    scale: float | None = None
    window: int = -1
    softcap: float = 0.0
    sinks: Tensor | None = None
    kind: LayerKind = "decoder"
    latent: bool = False

    def __post_init__(self) -> None:
        self._whole("layer_id", 0)
        for name in ("heads", "kv_heads", "head_dim"):
            self._whole(name, 1)
        self._whole("v_head_dim", 0)
        self._whole("window", -1)
        if self.heads % self.kv_heads:
            self._refuse("heads", self.heads, f"a multiple of kv_heads={self.kv_heads} is needed")
        if not scalars.number(self.softcap) or self.softcap < 0:
            self._refuse("softcap", self.softcap, "a number above 0 is needed, or 0 for none")
        if self.scale is not None and not scalars.number(self.scale):
            self._refuse("scale", self.scale, "a finite number is needed, or None for head_dim ** -0.5")
        if wrong := scalars.softcap(self.softcap):
            self._refuse("softcap", self.softcap, f"it {wrong}")
        if self.scale is not None and (wrong := scalars.scale(self.scale)):
            self._refuse("scale", self.scale, f"it {wrong}")
        scalars.flag(f"AttentionLayer {self.layer_id!r}: latent", self.latent)
        if self.kind not in get_args(LayerKind):
            known = get_args(LayerKind)
            self._refuse("kind", self.kind, f"it is one of {', '.join(known)}.{did_you_mean(str(self.kind), known)}")
        if self.window >= 0 and self.kind == "cross":
            self._refuse("window", self.window, "keys of another sequence have no distance to a query: leave it -1")
        if (sinks := self.sinks) is not None and getattr(sinks, "shape", None) != (self.heads,):
            shown = tuple(getattr(sinks, "shape", ())) or type(sinks).__name__
            self._refuse("sinks", shown, f"one logit per head is needed, [{self.heads}]")
        if self.latent:
            self._check_latent()

    def _check_latent(self) -> None:
        if self.kind != "decoder":
            self._refuse("kind", self.kind, "a latent layer is a decoder's")
        if self.kv_heads != 1:
            self._refuse("kv_heads", self.kv_heads, "a latent layer has one row for all heads: 1")
        if self.scale is None:
            self._refuse("scale", None, "a latent layer needs that of the uncompressed heads, such as 192 ** -0.5")
        if not 0 < self.v_head_dim <= self.head_dim:
            self._refuse("v_head_dim", self.v_head_dim, f"the value is the first part of a row: 1 to {self.head_dim}")
        for name, given in (("softcap", self.softcap != 0), ("sinks", self.sinks is not None)):
            if given:
                self._refuse(name, "set", "latent attention (family mla) has none")

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not scalars.whole(value) or value < least:
            self._refuse(name, value, f"a whole number of at least {least} is needed")
        object.__setattr__(self, name, int(value))  # NumPy's are Python's from here on

    def _refuse(self, name: str, value: Any, allowed: str) -> None:
        raise InvalidInputError(f"AttentionLayer {self.layer_id!r}: {name}={scalars.shown(value)}; {allowed}")

    def differs(self, other: AttentionLayer) -> str | None:
        """The first field in which another layer is not this one, None = there is none. Sinks are the same tensor, or
        views of the same numbers."""
        for field in dataclasses.fields(self):
            own, given = getattr(self, field.name), getattr(other, field.name, None)
            if own is given or (field.name != "sinks" and own == given):
                continue
            if own is None or given is None or field.name != "sinks" or own.data_ptr() != given.data_ptr():
                return field.name
        return None

    @property
    def dims(self) -> tuple[int, int]:
        """(D, D_v)."""
        return self.head_dim, self.v_head_dim or self.head_dim
