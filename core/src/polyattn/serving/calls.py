"""One layer in one plan slot: the shortest way from a model's tensors to the kernel that was bound for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from ..errors import InvalidInputError

if TYPE_CHECKING:
    from .choosing import Served
    from .layer import AttentionLayer
    from .pool import KVPool

__all__ = ["Idle", "LayerCall", "Run", "Split", "Tokens"]

Tokens = slice | Tensor
"""Some of the packed tokens of a step: a slice, or int64 indices."""


class Run(Protocol):
    """A layer's call under the step that was planned: (query, key, value, save_kv_cache) -> [T_q, H_q, D_v]."""

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Tensor: ...


class LayerCall:
    """A layer with the kernel bound for it in one phase, and the tables of the step that was prepared last.

    Args:
        served: the layer, its cache, and whether its kernel writes.
        forward: takes (query, *caches, **keywords), and key and value where it writes them.
        reader: the same for calls that write nothing. without: for those without new keys, where a kernel that writes
            has none to write: a planned one keeps its plan.

    Attributes:
        keywords: tables, scales, sinks and mask. slots: int64, where the new tokens go.
        shapes: of query, key and value; that of the value is None where the layer is latent.
    """

    __slots__ = (
        *("_caches", "_dtype", "_dynamic", "_forward", "_id", "_own", "_pool", "_reader", "_without", "_writes"),
        *("keywords", "layer", "shapes", "slots"),
    )

    def __init__(
        self,
        served: Served,
        pool: KVPool,
        forward: Callable[..., Any],
        reader: Callable[..., Any],
        without: Callable[..., Any],
    ) -> None:
        self.layer, self._id, self._pool = served.layer, served.layer.layer_id, pool
        self._caches, self._own, self._dtype = served.cache.tensors, served.tensors, pool.dtype
        self._dynamic = served.cache.dynamic
        self._forward, self._reader, self._without = forward, reader, without
        self._writes = served.saver is not None
        self.keywords: dict[str, Any] = {}
        self.slots: Tensor
        self.shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None] = ((), (), None)

    def bind_step(self, tables: Mapping[str, Any], slots: Tensor, tokens: int) -> None:
        """Take the tables of a step with `tokens` queries, and the slots of its new keys."""
        layer = self.layer
        width, v_width = layer.dims
        new_tokens = slots.shape[0]
        self.keywords, self.slots = {**tables, **self._own}, slots
        query = (tokens, layer.heads, width)
        if layer.latent:
            self.shapes = query, (new_tokens, width), None
        else:
            self.shapes = query, (new_tokens, layer.kv_heads, width), (new_tokens, layer.kv_heads, v_width)

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Any:
        query, key, value = self.shapes
        if q.shape != query or q.dtype is not self._dtype or q.requires_grad:
            self._refuse_query(q)
        if k is None:
            if v is not None:
                self._refuse("a value without its key; give both, or None for both where the cache has them")
            return self._without(q, *self._caches, **self.keywords)
        if k.shape != key or (None if v is None else v.shape) != value:
            self._refuse_new(k, v)
        for new in (k,) if v is None else (k, v):
            if new.dtype is not self._dtype or new.requires_grad:
                self._refuse_kind(new)
        if save:
            if self._writes:
                self._pool.note_written(self._id)
                return self._forward(q, *self._caches, key=k, value=v, **self.keywords)
            self._pool.write(self._id, self.slots, k, v)
        elif not self.layer.latent:
            if self.layer.kind == "cross":
                self._refuse("save_kv_cache=False with keys of another sequence; those are attended from the cache")
            if self._dynamic:
                self._pool.make_scales(self._id, self.slots, k, v)
            return self._reader(q, *self._caches, key=k, value=v, **self.keywords)
        return self._reader(q, *self._caches, **self.keywords)

    def _refuse_query(self, q: Tensor) -> None:
        if tuple(q.shape) != self.shapes[0]:
            self._refuse(
                f"query {list(q.shape)} where the planned step and the layer say [T_q, H_q, D] = {list(self.shapes[0])}"
            )
        if q.dtype is not self._dtype:
            self._refuse(
                f"a query of {q.dtype}; its kernel was chosen for {self._dtype}, the dtype of the pool's model"
            )
        self._refuse_gradients("a query")

    def _refuse_kind(self, new: Tensor) -> None:
        if new.dtype is not self._dtype:
            self._refuse(
                f"a key or value of {new.dtype}; the pool's model is in {self._dtype}: convert what is new to it"
            )
        self._refuse_gradients("a key or value")

    def _refuse_gradients(self, what: str) -> None:
        if torch.is_grad_enabled():
            self._refuse(f"{what} that requires gradients; serving is inference only: run it under torch.no_grad()")

    def _refuse_new(self, k: Tensor, v: Tensor | None) -> NoReturn:
        shown = f"key {list(k.shape)}, value {None if v is None else list(v.shape)}"
        if self.layer.latent:
            self._refuse(f"{shown}; a latent layer takes rows {list(self.shapes[1])} as key, and value None")
        _, key, value = self.shapes
        self._refuse(f"{shown} where the step and the layer say {list(key)} and {list(value or ())}")

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidInputError(f"attention layer {self._id} is given {what}")


class Idle:
    """A step without tokens: there is nothing to run."""

    __slots__ = ("_layer",)

    def __init__(self, layer: AttentionLayer) -> None:
        self._layer = layer

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Tensor:
        if q.shape[0]:
            raise InvalidInputError(
                f"attention layer {self._layer.layer_id} is given {q.shape[0]} tokens in an idle step, which has none: "
                f"plan the batch first"
            )
        return q.new_empty(0, self._layer.heads, self._layer.dims[1])


class Split:
    """A mixed step whose phases have backends of their own: each gets its tokens, the results are put together.

    Args:
        parts: for each phase its call and its tokens.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[tuple[Run, Tokens]]) -> None:
        self._parts = parts

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Tensor:
        outs = [run(q[at], None if k is None else k[at], None if v is None else v[at], save) for run, at in self._parts]
        whole = q.new_empty(q.shape[0], *outs[0].shape[1:])
        for (_, at), out in zip(self._parts, outs, strict=True):
            whole[at] = out
        return whole
