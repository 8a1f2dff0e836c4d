"""This module describes the layers of a model to the serving side: `AttentionLayer`, and `StateLayer` for those without
pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..contract import DTYPES, Keep, scalars
from ..errors import InvalidInputError, did_you_mean
from .dual_chunk import DualChunk

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KV", "AttentionLayer", "LayerKind", "StateLayer", "keeps_of"]

LayerKind = Literal["decoder", "encoder_only", "cross"]

KV = ("key", "value", "latent")
"""The keeps that attention itself reads: keys and values, or latent rows."""


@dataclasses.dataclass(frozen=True)
class StateLayer:
    """Describes a layer that keeps a state for each request and attends no pages, such as one of linear attention.

    Attributes:
        layer_id: unique within the model, attention layers included.
        keeps: what it keeps, each per="request" or per="run".

    Raises:
        InvalidInputError: a number or keeps that no such layer has.
    """

    layer_id: int
    keeps: Sequence[Keep]

    def __post_init__(self) -> None:
        if not scalars.whole(self.layer_id) or self.layer_id < 0:
            raise InvalidInputError(f"StateLayer: layer_id={self.layer_id!r}; a whole number of at least 0 is needed")
        object.__setattr__(self, "keeps", _checked_keeps(f"StateLayer {self.layer_id}", self.keeps))
        if not self.keeps:
            raise InvalidInputError(f"StateLayer {self.layer_id}: keeps is empty; declare what the layer keeps")
        if wrong := [keep.name for keep in self.keeps if keep.per == "token"]:
            raise InvalidInputError(
                f"StateLayer {self.layer_id}: {wrong[0]} is kept by token, which takes pages: declare it in the "
                f"AttentionLayer whose pages it shares"
            )

    @property
    def kept(self) -> tuple[Keep, ...]:
        """Return all that the layer keeps."""
        return tuple(self.keeps)


def _checked_keeps(where: str, keeps: Any) -> tuple[Keep, ...]:
    given = tuple(keeps) if isinstance(keeps, Sequence) else (keeps,)
    if wrong := [keep for keep in given if not isinstance(keep, Keep)]:
        raise InvalidInputError(f"{where}: keeps has {wrong[0]!r}, a {type(wrong[0]).__name__}; it is a list of Keep")
    names = [keep.name for keep in given]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidInputError(f"{where}: keeps has {twice[0]!r} twice; name each keep of a layer once")
    return given


def keeps_of(layers: Sequence[AttentionLayer | StateLayer]) -> dict[Any, Sequence[Keep]]:
    """Return what each layer keeps, by its number: what `RequestStates` and `RunStates` are built from."""
    return {layer.layer_id: layer.kept for layer in layers}


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Describes one attention layer, as it is on this rank.

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
        token_topk: tokens that each query sees of a latent layer, listed by an indexer (DeepSeek sparse attention); 0 =
            all of them. Its calls are given the lists as value.
        dual_chunk: the chunks of a layer of dual chunk attention; its queries are then [T_q, 3, H_q, D].
        keeps: what the layer keeps beside keys and values (latent: one row), such as the keys of an indexer by token.
            Keys and values have the format of the pool; `Keep("key", "token", (kv_heads, head_dim), "fp8_e4m3")` gives
            those of this layer another one, the value too if it is not named.

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
    keeps: Sequence[Keep] = ()
    dual_chunk: DualChunk | None = None
    token_topk: int = 0

    def __post_init__(self) -> None:
        self._whole("layer_id", 0)
        for name in ("heads", "kv_heads", "head_dim"):
            self._whole(name, 1)
        self._whole("v_head_dim", 0)
        self._whole("window", -1)
        self._whole("token_topk", 0)
        if self.token_topk and (not self.latent or self.window >= 0):
            self._refuse("token_topk", self.token_topk, "only a latent layer without a window lists tokens: leave it 0")
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
        if self.dual_chunk is not None:
            self._check_dual_chunk(self.dual_chunk)
        object.__setattr__(self, "keeps", _checked_keeps(f"AttentionLayer {self.layer_id}", self.keeps))
        object.__setattr__(self, "_kept", self._with_rows(self.keeps))

    def _with_rows(self, keeps: Sequence[Keep]) -> tuple[Keep, ...]:
        """`keeps` with the layer's own rows before all others."""
        named = {keep.name: keep for keep in keeps}
        shapes: dict[str, tuple[int, ...]] = {"latent": (self.head_dim,)}
        if not self.latent:
            shapes = {name: (self.kv_heads, width) for name, width in zip(KV, self.dims, strict=False)}
        if wrong := [name for name in named if name in KV and name not in shapes]:
            self._refuse("keeps", wrong[0], f"a layer with latent={self.latent} keeps {' and '.join(shapes)}")
        own, rows = next((named[name] for name in shapes if name in named), None), []
        for name, shape in shapes.items():
            alike = Keep(name, "token", shape) if own is None else dataclasses.replace(own, name=name, shape=shape)
            keep = named.pop(name, alike)
            if keep.per != "token" or keep.shape != shape or keep.dtype not in ("", *DTYPES):
                shown = f"{name} with per={keep.per!r}, shape={keep.shape}, dtype={keep.dtype!r}"
                self._refuse("keeps", shown, f"per='token', shape={shape} and a dtype of attention are needed")
            if (keep.dtype, keep.scales, keep.layout) != (alike.dtype, alike.scales, alike.layout):
                self._refuse(
                    "keeps", "key and value", "a layer has both in one dtype, with one kind of scales and layout"
                )
            rows.append(keep)
        return (*rows, *named.values())

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

    def _check_dual_chunk(self, given: Any) -> None:
        if not isinstance(given, DualChunk):
            self._refuse("dual_chunk", given, "a DualChunk is needed, or None")
        odd = {"kind": self.kind != "decoder", "latent": self.latent, "window": self.window >= 0}
        if wrong := next((name for name, there in {**odd, "sinks": self.sinks is not None}.items() if there), None):
            value = "set" if wrong == "sinks" else getattr(self, wrong)
            self._refuse(wrong, value, "a layer with dual_chunk is a decoder's without latent rows, window and sinks")

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
    def kept(self) -> tuple[Keep, ...]:
        """Return all that the layer keeps: its keys and values, or latent rows, and then what else `keeps` names."""
        found: tuple[Keep, ...] = self._kept  # type: ignore[attr-defined]
        return found

    @property
    def dims(self) -> tuple[int, int]:
        """(D, D_v)."""
        return self.head_dim, self.v_head_dim or self.head_dim
