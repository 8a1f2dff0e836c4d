"""`KVPool`: what the layers of a model keep of requests, and what a serving loop does to it.

It is built from the layers' keeps: those by token lie in pages, those by request in `KVPool.states`.

A slot is page * page_size + place, int64. Page 0 of every group is the padding page: the rows of padding tokens are
written to it, nobody reads it for a result. Nothing here waits for a device; `write`, `read` and `move` with tensors
can be recorded into a device graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...contract import RowsWriter
from ...dispatch.binding import dtype_name
from ...errors import ConfigError, InvalidInputError, did_you_mean
from ...registry.device_ops import CORE, device_ops
from ...semantics.states import RequestStates, state_bytes
from ..layer import KV, AttentionLayer, StateLayer, keeps_of
from .allocating import allocating
from .storage import KVCacheConfig, RowFormat, Rows, formats, token_keeps

__all__ = ["CacheGroup", "KVCacheConfig", "KVPool", "LayerCache", "pages_for"]

_LARGE = 2**31


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that share page tables: full attention, one window, or cross-attention (keys of another sequence).

    Attributes:
        window: earlier keys that a query sees, -1 = all. layer_ids: in the model's order. cross: see above.
    """

    window: int
    layer_ids: tuple[int, ...]
    cross: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCache:
    """The caches of one layer as `PagedForward` and `MLAForward` take them.

    Attributes:
        key_cache, value_cache: [pages, page_size, H_kv, D | D_v] (NHD) or [pages, H_kv, page_size, D | D_v] (HND), None
            for a latent layer. k_scale, v_scale: None, [1], [H_kv] or one per token in the cache's layout.
        cache: [pages, page_size, D_c + D_r] or rows of a format of `kv_quant.LATENT_FORMATS`, None for other layers.
        kv_dtype: the request's word, auto where it is that of the model. kv_layout: NHD or HND, "" for a latent layer.
        kv_scales: granularity, "" = none. page_size: tokens per page.
        dynamic: scales are made at write time, so that `KVPool.write` has to write; a kernel cannot.
    """

    key_cache: Tensor | None
    value_cache: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    cache: Tensor | None
    kv_dtype: str
    kv_layout: str
    kv_scales: str
    page_size: int
    dynamic: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(key_cache, value_cache) or (cache,): what follows the query in a call."""
        return tuple(t for t in (self.key_cache, self.value_cache, self.cache) if t is not None)

    def request_fields(self, times: int = 1) -> dict[str, Any]:
        """Return what `AttentionRequest` says of a cache, of one with so many `times` its pages."""
        return {
            "family": "paged" if self.cache is None else "mla",
            "kv_dtype": self.kv_dtype,
            "page_size": self.page_size,
            "kv_layout": self.kv_layout,
            "kv_scales": self.kv_scales,
            "large": any(t.numel() * times >= _LARGE for t in self.tensors),
        }


class KVPool:
    """Describes what all layers keep of requests.

    Args:
        layers: of the model, with different layer_id. config: how rows are kept where a layer's keep says nothing else.
        pages: of every group, the padding page 0 included; or one number for each, in the order of `groups_of(layers)`.
        dtype: of the model. device: where the caches are.
        requests: rows of the request table, for layers that keep something by request. drafts: nodes of the steps that
            are verified, after each of which such layers leave a state; 0 = none.

    Attributes:
        groups: layers by page table, in order of their first layer. pages: of each. config, page_size, dtype, device.
        states: of what is kept by request, None where nothing is. Give it to the request table (`RequestTable(...,
            states=pool.states)`), which allocates, forks and drops with its rows.

    Raises:
        InvalidInputError: layers, pages or requests that make no pool. ConfigError: rows that cannot be kept so.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer | StateLayer],
        config: KVCacheConfig,
        pages: int | Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        requests: int = 0,
        drafts: int = 0,
    ) -> None:
        self.groups, self.config, self.page_size = groups_of(layers), config, config.page_size
        keeps, layers = keeps_of(layers), attention_layers(layers)
        counts: list[Any] = list(pages) if isinstance(pages, (list, tuple)) else [pages] * len(self.groups)
        if len(counts) != len(self.groups):
            raise InvalidInputError(
                f"pages has {len(counts)} numbers, the layers make {len(self.groups)} groups "
                f"({_named(self.groups)}); give one number for each, or one for all"
            )
        if wrong := [n for n in counts if not isinstance(n, int) or n < 1]:
            raise InvalidInputError(
                f"pages={wrong[0]!r}; a group has a whole number of them, at least the padding page"
            )
        self.pages: tuple[int, ...] = tuple(counts)
        self._group = {layer: g for g, group in enumerate(self.groups) for layer in group.layer_ids}
        self._latent = {layer.layer_id for layer in layers if layer.latent}
        self.dtype = dtype
        self._layers = {layer.layer_id: layer for layer in layers}
        self._rows: dict[int, tuple[Rows, ...]] = {}
        self._extra: dict[int, dict[str, Rows]] = {}
        self._kept: set[int] = set()
        by_request = any(keep.per == "request" for own in keeps.values() for keep in own)
        if by_request and not requests:
            raise InvalidInputError(
                "some layers keep a state by request, and requests=0: give the pool the rows of the request table"
            )
        forms = {layer.layer_id: formats(layer, config, dtype) for layer in layers}  # refused before memory is taken
        shown = f"a KV pool of {len(forms)} layers with {max(counts)} pages of {self.page_size} tokens needs"
        with allocating(shown, "lower the pages or page_size, or what they are made for (requests and their tokens)"):
            for layer_id, kinds in forms.items():
                count, place = self.pages[self._group[layer_id]], torch.device(device)
                rows = [Rows(kind, count, self.page_size, place) for kind in kinds]
                names = [keep.name for keep in token_keeps(self._layers[layer_id])]
                self._extra[layer_id] = {n: r for n, r in zip(names, rows, strict=True) if n not in KV}
                self._rows[layer_id] = tuple(rows[: len(rows) - len(self._extra[layer_id])])
            self.states = (
                RequestStates(keeps, requests, drafts=drafts, dtype=dtype, device=device) if by_request else None
            )
        self.device = next(iter(self._rows.values()))[0].cache.device  # "cuda" has become cuda:0
        self._caches = {layer_id: self._cache(layer_id) for layer_id in self._rows}
        ops, self._writers = device_ops(self.device.type), dict[int, RowsWriter]()
        self._package = CORE if ops is None else ops.name
        for layer_id, cache in self._caches.items():
            if ops is not None and (writer := ops.rows_writer(cache, dtype)) is not None:
                self._writers[layer_id] = writer

    def _cache(self, layer_id: int) -> LayerCache:
        rows = self._rows[layer_id]
        form, latent = rows[0].form, layer_id in self._latent
        (key, value), cache = ((None, None), rows[0].cache) if latent else (rows, None)
        return LayerCache(
            key_cache=None if key is None else key.cache,
            value_cache=None if value is None else value.cache,
            k_scale=None if key is None else key.scale,
            v_scale=None if value is None else value.scale,
            cache=cache,
            kv_dtype="auto" if form.kv_dtype == dtype_name(self.dtype) else form.kv_dtype,
            kv_layout="" if latent else form.layout,
            kv_scales=form.scales,
            page_size=self.page_size,
            dynamic=form.dynamic or form.packed,
        )

    def _of(self, layer_id: int) -> tuple[Rows, ...]:
        try:
            return self._rows[layer_id]
        except KeyError:
            known = ", ".join(map(str, self._rows))
            raise InvalidInputError(f"the pool has no layer {layer_id!r}; it was made for {known}") from None

    def check_layer(self, layer: AttentionLayer) -> None:
        """Check that a layer is the one of its number that this pool was made for, as far as caches and pages go.

        Raises:
            InvalidInputError: there is none, or its rows or its group are others.
        """
        forms, group = [rows.form for rows in self._of(layer.layer_id)], self.groups[self._group[layer.layer_id]]
        latent = layer.layer_id in self._latent
        own, here = layer.kept, self._layers[layer.layer_id].kept
        widths = [layer.head_dim] if layer.latent else [*layer.dims]
        facts = {
            "latent": (layer.latent, latent),
            "kv_heads": (layer.kv_heads, forms[0].heads),
            "widths": (widths, [form.width for form in forms]),
            "window": (layer.window, group.window),
            "cross": (layer.kind == "cross", group.cross),
            "keeps": ([keep for keep in own if keep not in here], [keep for keep in here if keep not in own]),
        }
        for name, (given, kept) in facts.items():
            if given != kept:
                raise InvalidInputError(
                    f"layer {layer.layer_id} has {name}={given}, and the pool was made for one of {name}={kept}: give "
                    f"both the same layers"
                )

    def group_of(self, layer_id: int) -> int:
        """Index in `groups` of a layer."""
        self._of(layer_id)
        return self._group[layer_id]

    def cache(self, layer_id: int) -> LayerCache:
        """The tensors of a layer; they stay the same for the life of the pool."""
        self._of(layer_id)
        return self._caches[layer_id]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, scales and states."""
        rows = sum(rows.nbytes for group in range(len(self.groups)) for rows in self._in(group))
        return rows + (0 if self.states is None else self.states.nbytes)

    def bytes_per_token(self, group: int) -> int:
        """Bytes that one token takes in all layers of a group, with the scales that belong to it."""
        return sum(rows.form.token_bytes for rows in self._in(self._checked(group)))

    def _checked(self, group: int) -> int:
        if not 0 <= group < len(self.groups):
            raise InvalidInputError(f"group {group} of {len(self.groups)} ({_named(self.groups)}); 0 is the first")
        return group

    def write(self, layer_id: int, slots: Tensor, key: Tensor, value: Tensor | None = None) -> None:
        """Store new rows, rounded as the cache rounds them; scales that belong to tokens are made here.

        Args:
            slots: int64 [T], those of padding tokens in page 0. Their values are not read on the host.
            key, value: [T, H_kv, D], [T, H_kv, D_v]; a latent layer has rows [T, D_c + D_r] and no value.

        Raises:
            InvalidInputError: shapes or dtypes do not fit the layer.
        """
        new = self._new(layer_id, slots, key, value)
        if (writer := self._writer_for(layer_id, new)) is not None:
            writer(slots, key, value)
        else:
            index = new[0][0].index(slots)
            for kind, given in new:
                kind.write(index, given)
        self._kept.add(layer_id)

    def writer(self, layer_id: int) -> str:
        """Return what writes rows of a layer in `write`: the name of a package's kernels (`device_ops`), or
        polyattn."""
        return CORE if self.rows_writer(layer_id) is None else self._package

    def rows_writer(self, layer_id: int) -> RowsWriter | None:
        """Return what `write` gives rows of `dtype` to once it has checked them, for who has checked them already and
        calls `note_written`; None: core's operators write."""
        self._of(layer_id)
        return self._writers.get(layer_id)

    def note_written(self, layer_id: int) -> None:
        """Rows of a layer are written past `write`: its static scales stay as they are from here on."""
        self._kept.add(layer_id)

    def make_scales(self, layer_id: int, slots: Tensor, key: Tensor, value: Tensor | None = None) -> None:
        """Make and store the scales of new rows that belong to tokens, and not the rows: a call that attends new keys
        and values without storing them (save_kv_cache=False) rounds them with these. As `write`; where scales are
        static nothing is done."""
        new = self._new(layer_id, slots, key, value)
        if new[0][0].form.dynamic and (writer := self._writer_for(layer_id, new)) is not None:
            writer(slots, key, value, rows=False)
        else:
            index = new[0][0].index(slots)
            for kind, given in new:
                kind.make_scales(index, given.detach())

    def _writer_for(self, layer_id: int, new: list[tuple[Rows, Tensor]]) -> RowsWriter | None:
        """The kernels that write these rows, if there are any for the model's own dtype."""
        return self._writers.get(layer_id) if all(given.dtype == self.dtype for _, given in new) else None

    def _new(self, layer_id: int, slots: Any, key: Any, value: Any) -> list[tuple[Rows, Tensor]]:
        """New rows, checked, and what they belong to."""
        rows, latent = self._of(layer_id), layer_id in self._latent
        if latent and value is not None:
            raise InvalidInputError(f"layer {layer_id} is latent: its rows hold the value, pass rows only")
        if latent:
            given = [key.unsqueeze(1) if isinstance(key, Tensor) and key.ndim == 2 else key]
        else:
            given = [key, value]
        _check_slots("slots", slots, self.device)
        for name, new, kind in zip(("key", "value"), given, rows, strict=False):
            _check_rows(layer_id, name, new, kind.form, slots.shape[0], self.device)
        return list(zip(rows, given, strict=True))

    def read(self, layer_id: int, slots: Tensor, dtype: torch.dtype) -> Any:
        """Real values of tokens.

        Args:
            slots: int64 [T]. dtype: of the result.

        Returns:
            (key [T, H_kv, D], value [T, H_kv, D_v]), or rows [T, D_c + D_r] of a latent layer.
        """
        rows = self._of(layer_id)
        _check_slots("slots", slots, self.device)
        index = rows[0].index(slots)
        found = tuple(kind.read(index, dtype) for kind in rows)
        return found[0].squeeze(1) if layer_id in self._latent else found

    def kept(self, layer_id: int, name: str) -> Tensor:
        """The tensor of what a layer keeps by token beside keys and values: it stays the same for the life of the pool.

        Returns:
            [pages, page_size, D], or [pages, page_size, H, D] (NHD), [pages, H, page_size, D] (HND).

        Raises:
            InvalidInputError: the layer keeps nothing of that name by token; `states` has what is kept by request.
        """
        return self._extra_of(layer_id, name).cache

    def write_kept(self, layer_id: int, name: str, slots: Tensor, rows: Tensor) -> None:
        """Store rows of what a layer keeps by token beside keys and values, such as the keys of an indexer. Pages that
        are copied, and tokens that are moved, take them along.

        Args:
            slots: as `write`. rows: [T, D] or [T, H, D], as the keep's shape says. Floats are rounded as the cache
                rounds them; bytes and whole numbers, of the keep's own dtype, are stored as they are.

        Raises:
            InvalidInputError: the layer keeps nothing of that name by token, or shapes or dtypes do not fit it.
        """
        kind = self._extra_of(layer_id, name)
        _check_slots("slots", slots, self.device)
        new = rows.unsqueeze(1) if isinstance(rows, Tensor) and kind.form.latent and rows.ndim == 2 else rows
        _check_rows(layer_id, name, new, kind.form, slots.shape[0], self.device)
        kind.write(kind.index(slots), new)

    def read_kept(self, layer_id: int, name: str, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [T, D] or [T, H, D] that `write_kept` wrote: real values in `dtype`; bytes and integers as they are.

        Raises:
            InvalidInputError: the layer keeps nothing of that name by token.
        """
        kind = self._extra_of(layer_id, name)
        _check_slots("slots", slots, self.device)
        found = kind.read(kind.index(slots), dtype)
        return found.squeeze(1) if kind.form.latent else found

    def _extra_of(self, layer_id: int, name: str) -> Rows:
        self._of(layer_id)
        own = self._extra[layer_id]
        if name in own:
            return own[name]
        here = [keep.name for keep in self._layers[layer_id].kept if keep.name not in KV]
        how = "write, read and cache are for keys, values and latent rows. " if name in KV else ""
        raise InvalidInputError(
            f"layer {layer_id} keeps no {name!r} by token beside its keys and values.{did_you_mean(str(name), here)} "
            f"{how}What else it keeps: {', '.join(here) or 'nothing'}"
        )

    def copy(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages in all layers of a group, as if one after another: copy-on-write.

        Args:
            sources, targets: pages [M]; a target is not the padding page 0.

        Raises:
            InvalidInputError: a page that the group does not have.
        """
        pages = self.pages[self._checked(group)]
        if len(sources) != len(targets):
            raise InvalidInputError(f"{len(sources)} sources for {len(targets)} targets; give as many of both")
        for name, given, least in (("sources", sources, 0), ("targets", targets, 1)):
            if wrong := [page for page in given if not least <= page < pages]:
                raise InvalidInputError(
                    f"{name} has page {wrong[0]}; group {group} has {pages} pages, {least} to {pages - 1} are allowed"
                )
        for some in _independent(sources, targets):
            read, written = (_index(p, self.device) for p in zip(*some, strict=True))
            for rows in self._in(group):
                rows.copy(read, written)

    def move(self, group: int, sources: Tensor | Sequence[int], targets: Tensor | Sequence[int]) -> None:
        """Copy tokens in all layers of a group: accepted drafts to where their sequence goes on.

        Args:
            sources, targets: slots [M], int64 tensors or host numbers. All are read before one is written; entries that
                are not wanted name one slot of page 0 twice.
        """
        self._checked(group)
        read, written = (s if isinstance(s, Tensor) else _index(s, self.device) for s in (sources, targets))
        for name, slots in (("sources", read), ("targets", written)):
            _check_slots(name, slots, self.device)
        if read.shape != written.shape:
            raise InvalidInputError(f"{len(read)} sources for {len(written)} targets; give as many of both")
        where: dict[bool, tuple[Any, Any]] = {}
        for rows in self._in(group):
            if rows.flat not in where:
                where[rows.flat] = rows.index(read), rows.index(written)
            rows.move(*where[rows.flat])

    def _in(self, group: int) -> Iterable[Rows]:
        """Return all that the layers of a group keep by token."""
        for layer_id in self.groups[group].layer_ids:
            yield from self._rows[layer_id]
            yield from self._extra[layer_id].values()

    def set_scales(self, layer_id: int, k: float | Tensor, v: float | Tensor) -> None:
        """Set the static scales of a layer, once, before its first row is written (until then they are 1).

        Args:
            k, v: by `KVCacheConfig.scales`: one number each (tensor), or [H_kv] (head). Stored * scale = real.

        Raises:
            InvalidInputError: wrong shapes or numbers, a cache without static scales, or rows that are there already.
        """
        rows = self._of(layer_id)
        if layer_id in self._latent:
            raise InvalidInputError(f"layer {layer_id} is latent: its rows hold their own scales, if any")
        if layer_id in self._kept:
            raise InvalidInputError(
                f"layer {layer_id} has rows that were stored with the scales it has, or they were set before; set them "
                f"once, before the first write"
            )
        for name, value, kind in zip(("k", "v"), (k, v), rows, strict=True):
            kind.check_scale(f"layer {layer_id}: {name}", value)
        for value, kind in zip((k, v), rows, strict=True):
            kind.set_scale(value)
        self._kept.add(layer_id)


def attention_layers(layers: Sequence[AttentionLayer | StateLayer]) -> list[AttentionLayer]:
    """The layers that have pages.

    Raises:
        InvalidInputError: what is no layer.
    """
    if wrong := [layer for layer in layers if not isinstance(layer, (AttentionLayer, StateLayer))]:
        raise InvalidInputError(f"layers has {wrong[0]!r}, which is no AttentionLayer: give the layers themselves")
    return [layer for layer in layers if isinstance(layer, AttentionLayer)]


def groups_of(layers: Sequence[AttentionLayer | StateLayer]) -> tuple[CacheGroup, ...]:
    """Layers by page table, in order of their first layer; those without pages are in none.

    Raises:
        InvalidInputError: no layers with pages, what is no layer, or two with one layer_id.
    """
    if not layers:
        raise InvalidInputError("a pool is for at least one layer; got none")
    paged = attention_layers(layers)
    ids = [layer.layer_id for layer in layers]
    if twice := [i for i in ids if ids.count(i) > 1]:
        raise InvalidInputError(f"two layers have layer_id {twice[0]}; number the layers of a model")
    if not paged:
        raise InvalidInputError(
            "no layer has pages: a pool is for models with attention layers, RequestStates(keeps_of(layers), requests) "
            "for others"
        )
    found: dict[tuple[int, bool], list[int]] = {}
    for layer in paged:
        found.setdefault((layer.window, layer.kind == "cross"), []).append(layer.layer_id)
    return tuple(CacheGroup(window, tuple(ids), cross) for (window, cross), ids in found.items())


def pages_for(
    nbytes: int,
    layers: Sequence[AttentionLayer | StateLayer],
    config: KVCacheConfig,
    dtype: torch.dtype,
    *,
    requests: int = 0,
    drafts: int = 0,
) -> int:
    """Pages of every group that fit into `nbytes`, the padding page included, beside what is kept of so many requests.

    Raises:
        ConfigError: not even two pages do.
    """
    nbytes -= (requests + 1) * state_bytes(keeps_of(layers), dtype, drafts) if requests else 0
    kinds = [form for layer in attention_layers(layers) for form in formats(layer, config, dtype)]
    page = config.page_size * sum(form.token_bytes for form in kinds)
    static = sum(4 * {"tensor": 1, "head": form.heads}.get(form.scales, 0) for form in kinds)
    pages = (nbytes - static) // page
    if pages < 2:
        raise ConfigError(
            f"{nbytes} bytes do not hold a KV cache: a page of {config.page_size} tokens takes {page} bytes in "
            f"{len(layers)} layers, and two are needed. Give it more memory, a smaller page_size or a narrower dtype"
        )
    return pages


def _named(groups: Sequence[CacheGroup]) -> str:
    return ", ".join("cross" if g.cross else "full" if g.window < 0 else f"window {g.window}" for g in groups)


def _index(numbers: Sequence[int], device: torch.device) -> Tensor:
    index = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return index.to(device, non_blocking=True)


def _independent(sources: Sequence[int], targets: Sequence[int]) -> Iterable[list[tuple[int, int]]]:
    """Copies in runs, in none of which a page is a target and, later, anything else."""
    some: list[tuple[int, int]] = []
    written: set[int] = set()
    for source, target in zip(sources, targets, strict=True):
        if source in written or target in written:
            yield some
            some, written = [], set()
        some.append((source, target))
        written.add(target)
    if some:
        yield some


def _check_slots(name: str, slots: Any, device: torch.device) -> None:
    if not isinstance(slots, Tensor) or slots.dtype != torch.int64 or slots.ndim != 1 or slots.device != device:
        raise InvalidInputError(f"{name} is {_shown(slots)}; int64 [T] on {device} is needed: page * page_size + place")


def _check_rows(layer_id: int, name: str, new: Any, form: RowFormat, tokens: int, device: torch.device) -> None:
    shape = (tokens, form.heads, form.width)
    fits = isinstance(new, Tensor) and tuple(new.shape) == shape and new.device == device
    if fits and (new.dtype == form.dtype if form.raw else new.is_floating_point()):
        return
    wanted, kind = f"[T, H_kv, D] = {list(shape)}", f"{form.dtype}" if form.raw else "float"
    if form.latent:
        width = "D_c + D_r" if name == "key" else "D"
        name, wanted = "rows" if name == "key" else name, f"[T, {width}] = {[tokens, form.width]}"
        new = new.squeeze(1) if isinstance(new, Tensor) and new.ndim == 3 else new  # as it was given
    raise InvalidInputError(
        f"layer {layer_id}: {name} is {_shown(new)}; a {kind} tensor {wanted} on {device} is needed"
    )


def _shown(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"{list(given.shape)} {given.dtype} on {given.device}"
    return "None" if given is None else f"a {type(given).__name__}"
