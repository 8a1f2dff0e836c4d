"""This module calls one layer in one plan slot: the shortest way from a model's tensors to the kernel that was bound
for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from ...adapters.alignment import align16, aligned
from ...contract import PagedTables
from ...errors import InvalidInputError
from ...selection.inspection import served_by

if TYPE_CHECKING:
    from ..kv_cache.pool import KVPool
    from ..layer import AttentionLayer
    from .choosing import Served

__all__ = ["Idle", "LayerCall", "Run", "Split", "StepOfLayers", "Tokens"]

Tokens = slice | Tensor
"""Some of the packed tokens of a step: a slice, or int64 indices."""


class Run(Protocol):
    """A layer's call under the step that was planned: (query, key, value, save_kv_cache) -> [T_q, H_q, D_v].

    Attributes:
        by: who serves it, for profiles.
    """

    layer: AttentionLayer
    by: str

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Tensor: ...


class StepOfLayers:
    """Describes what layers of one shape need of the step that was prepared last; they share it, so that a step is
    brought to all of them at once.

    Attributes:
        keywords: what a call says of the step. tables: alone, where there is nothing beside them, else None.
        slots: int64, where the new tokens go.
        query, key, value: shapes; that of the value is None where the layers are latent.
        empty: no row has keys.
        written: the layers that have written this step's keys and values; None where nobody counts, in recorded steps:
            a recording is warmed up, made and replayed under plans that its runner knows of.
    """

    __slots__ = ("_layer", "empty", "key", "keywords", "query", "slots", "tables", "value", "written")

    def __init__(self, layer: AttentionLayer) -> None:
        self._layer = layer
        self.keywords: Mapping[str, Any] = {}
        self.empty = False
        self.tables: PagedTables | None = None
        self.slots: Tensor
        self.query: tuple[int, ...] = ()
        self.key: tuple[int, ...] = ()
        self.value: tuple[int, ...] | None = None
        self.written: set[int] | None = None

    @staticmethod
    def shape(layer: AttentionLayer) -> Hashable:
        """Return what layers that share one have in common."""
        return layer.heads, layer.kv_heads, *layer.dims, layer.latent

    def take(self, keywords: Mapping[str, Any], slots: Tensor, tokens: int, new_tokens: int, *, recorded: bool) -> None:
        """Take what calls say of a step with `tokens` queries, and the slots of its new keys."""
        layer = self._layer
        width, v_width = layer.dims
        self.keywords, self.slots, self.written = keywords, slots, None if recorded else set()
        self.tables = keywords["tables"] if len(keywords) == 1 else None
        self.query = (tokens, layer.heads, width)
        if layer.latent:
            self.key = (new_tokens, width)
        else:
            self.key, self.value = (new_tokens, layer.kv_heads, width), (new_tokens, layer.kv_heads, v_width)


class LayerCall:
    """A layer with the kernel bound for it in one phase.

    Args:
        served: the layer, its cache, and whether its kernel writes. step: what its calls need of each step.
        forward: takes (query, *caches, **keywords), and key and value where it writes them.
        reader: the same for calls whose keys are in the cache by then. without: for those without new keys, where a
            kernel that writes has none to write: a planned one keeps its plan.
        attend: makes the same for new keys that are attended and not written.
    """

    __slots__ = (
        *("_attend", "_caches", "_device", "_dtype", "_dynamic", "_forward", "_id", "_loads", "_own", "_pair", "_pool"),
        *("_reader", "_rows", "_topk", "_without", "_writes", "by", "layer", "step"),
    )

    def __init__(
        self,
        served: Served,
        pool: KVPool,
        step: StepOfLayers,
        forward: Callable[..., Any],
        reader: Callable[..., Any],
        without: Callable[..., Any],
        attend: Callable[[], Callable[..., Any]],
    ) -> None:
        self.layer, self._id, self._pool, self.step = served.layer, served.layer.layer_id, pool, step
        self._topk = served.layer.token_topk
        self._caches, self._dtype, self._device = served.cache.tensors, pool.dtype, pool.device
        self._loads = pool.device.type != "cpu"
        self._rows = pool.rows_writer(self._id)
        self._pair = len(self._caches) == 2
        self._dynamic = served.cache.dynamic
        if own := served.tensors:
            forward, reader, without = (functools.partial(call, **own) for call in (forward, reader, without))
        self._forward, self._reader, self._without = forward, reader, without
        self._attend, self._own = attend, own
        self.by = served_by(served.chosen.selection)
        self._writes = served.saver is not None

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Any:
        step = self.step
        if q.shape != step.query or q.dtype is not self._dtype or q.requires_grad:
            self._refuse_query(q)
        if self._loads and not aligned(q):
            q = align16(q)
        lists = None
        if self._topk:
            lists, v = self._lists(v, q.shape[0]), None
        if k is None:
            if v is not None:
                self._refuse("a value without its key; give both, or None for both where the cache has them")
            if self.layer.kind == "cross" and step.key[0]:
                self._refuse(
                    f"no keys, and EncoderBatch.new says that encoders have just run: {step.key[0]} tokens are to be "
                    "written; give key and value, or leave `new` empty where the cache has them"
                )
            forward = self._without
        else:
            if k.shape != step.key or (None if v is None else v.shape) != step.value:
                self._refuse_new(k, v)
            for new in (k,) if v is None else (k, v):
                if new.dtype is not self._dtype or new.requires_grad or new.device != self._device:
                    self._refuse_kind(new)
            if self._loads:
                # Kernels of devices load 16 bytes at a time, and what they were bound for says that they may.
                k, v = align16(k), None if v is None else align16(v)
            if save:
                if (written := step.written) is not None:
                    if self._id in written:
                        self._refuse_again()
                    written.add(self._id)
                if self._writes:
                    self._pool.note_written(self._id)
                    return self._forward(q, *self._caches, key=k, value=v, **step.keywords)
                if self._rows is None:
                    self._pool.write(self._id, step.slots, k, v)
                else:
                    # They are checked by now.
                    self._pool.note_written(self._id)
                    self._rows(step.slots, k, v)
            elif not self.layer.latent:
                if self.layer.kind == "cross":
                    self._refuse("save_kv_cache=False with keys of another sequence; those are attended from the cache")
                if self._dynamic:
                    self._pool.make_scales(self._id, step.slots, k, v)
                return self._attend()(q, *self._caches, key=k, value=v, **self._own, **step.keywords)
            forward = self._reader
        if lists is not None:
            return forward(q, *self._caches, token_indices=lists, **step.keywords)
        if step.tables is None or not self._pair:
            return forward(q, *self._caches, **step.keywords)
        # Named one by one: that spares two dicts a call.
        keys, values = self._caches
        return forward(q, keys, values, tables=step.tables)

    def _lists(self, given: Tensor | None, tokens: int) -> Tensor:
        if given is None or given.dtype is not torch.int32 or given.shape != (tokens, self._topk):
            shown = "None" if given is None else f"{list(given.shape)} {given.dtype}"
            self._refuse(f"{shown} as value; a layer with token_topk takes its lists there, int32 [T_q, {self._topk}]")
        return given

    def _refuse_query(self, q: Tensor) -> None:
        wanted = self.step.query
        if q.shape != wanted:
            self._refuse(
                f"query {list(q.shape)} where the planned step and the layer say [T_q, H_q, D] = {list(wanted)}"
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
        if new.device != self._device:
            self._refuse(f"a key or value on {new.device}; the pool is on {self._device}: move what is new there")
        self._refuse_gradients("a key or value")

    def _refuse_gradients(self, what: str) -> None:
        if torch.is_grad_enabled():
            self._refuse(f"{what} that requires gradients; serving is inference only: run it under torch.no_grad()")

    def _refuse_new(self, k: Tensor, v: Tensor | None) -> NoReturn:
        shown = f"key {list(k.shape)}, value {None if v is None else list(v.shape)}"
        if self.layer.latent:
            self._refuse(f"{shown}; a latent layer takes rows {list(self.step.key)} as key, and value None")
        key, value = self.step.key, self.step.value
        self._refuse(f"{shown} where the step and the layer say {list(key)} and {list(value or ())}")

    def _refuse_again(self) -> NoReturn:
        self._refuse(
            "keys and values a second time in one planned step, whose slots have those of the first: plan(batch) and "
            "prepare() for every step, and prepare() again to repeat one"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidInputError(f"attention layer {self._id} is given {what}")


class Idle:
    """A step without tokens: there is nothing to run."""

    __slots__ = ("layer",)
    by = "no backend"

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Tensor:
        if q.shape[0]:
            raise InvalidInputError(
                f"attention layer {self.layer.layer_id} is given {q.shape[0]} tokens in an idle step, which has none: "
                f"plan the batch first"
            )
        return q.new_empty(0, self.layer.heads, self.layer.dims[1])


class Split:
    """A mixed step whose phases have backends of their own: each gets its tokens, the results are put together.

    Args:
        layer: whose calls they are. parts: for each phase its call and its tokens.
    """

    __slots__ = ("_parts", "by", "layer")

    def __init__(self, layer: AttentionLayer, parts: Sequence[tuple[Run, Tokens]]) -> None:
        self.layer, self._parts = layer, parts
        self.by = " and ".join(dict.fromkeys(run.by for run, _ in parts))

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Tensor:
        outs = [run(q[at], None if k is None else k[at], None if v is None else v[at], save) for run, at in self._parts]
        whole = q.new_empty(q.shape[0], *outs[0].shape[1:])
        for (_, at), out in zip(self._parts, outs, strict=True):
            whole[at] = out
        return whole
