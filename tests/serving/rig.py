"""A serving context without a model: random queries, keys and values, and what dense attention makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import polyattn
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.plan_slots import EncoderBatch
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.serving.step.tree import DraftTree

LIMITS = Limits(max_sequences=8, max_tokens=64, max_seqlen=64)


def decoder(count: int = 2, **more: Any) -> list[AttentionLayer]:
    """Layers with GQA 4/2 and D = 16."""
    return [AttentionLayer(i, **{"heads": 4, "kv_heads": 2, "head_dim": 16, **more}) for i in range(count)]


def dense(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """[S_q, H_q, D_v]: the definition on one sequence's tensors."""
    return polyattn.attention(
        q[None], k[None], v[None],
        causal=layer.kind == "decoder",
        window=(-1, -1) if mask is not None else (layer.window, layer.window if layer.kind == "encoder_only" else -1),
        softcap=layer.softcap, sinks=layer.sinks, scale=layer.scale,
        attn_mask=None if mask is None else mask[None, None],
        backend="reference",
    )[0]  # fmt: skip


def tree_mask(layer: AttentionLayer, parents: Sequence[int], length: int) -> Tensor:
    """bool [N_d, length]: what each draft sees, by positions; a window counts those."""
    prefix = length - len(parents)
    depths: list[int] = []
    mask = torch.zeros(len(parents), length, dtype=torch.bool)
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        position = prefix + depths[node]
        mask[node, :prefix] = torch.tensor(
            [layer.window < 0 or position - key <= layer.window for key in range(prefix)]
        )
        seen = node
        while seen >= 0:
            mask[node, prefix + seen] = layer.window < 0 or depths[node] - depths[seen] <= layer.window
            seen = parents[seen]
    return mask


class Rig:
    """A pool, a request table and a backend over `layers`, and for each layer and row all keys and values so far."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        page_size: int = 4,
        pages: int = 96,
        dtype: torch.dtype = torch.float32,
        limits: Limits = LIMITS,
        config: Mapping[str, Any] | None = None,
        device: str = "cpu",
        **arguments: Any,
    ) -> None:
        torch.manual_seed(7)
        self.layers, self.dtype, self.device = list(layers), dtype, device
        stored = KVCacheConfig(page_size=page_size, **(config or {}))
        self.pool = KVPool(layers, stored, pages, dtype=dtype, device=device)
        own = [group.window for group in self.pool.groups if not group.cross]
        self.table = self._table(own, pages, page_size)
        self.encoder_table = None
        if len(own) < len(self.pool.groups):
            self.encoder_table = arguments["encoder_table"] = self._table([-1], pages, page_size)
        self.backend = AttentionBackend(layers, self.pool, self.table, limits=limits, **arguments)
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.batch: ForwardBatch | None = None

    def _table(self, windows: Sequence[int], pages: int, page_size: int) -> RequestTable:
        return RequestTable(8, 64, page_size, windows, [PageAllocator(pages) for _ in windows], self.device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def new_keys(self, layer: AttentionLayer, tokens: int) -> tuple[Tensor, Tensor | None]:
        """What a model hands over for new tokens."""
        if layer.latent:
            return self.random(tokens, layer.head_dim), None
        return self.random(tokens, layer.kv_heads, layer.head_dim), self.random(tokens, layer.kv_heads, layer.dims[1])

    def add(self, count: int = 1) -> list[int]:
        return [self.table.add() for _ in range(count)]

    def give(self, new: Mapping[int, int]) -> None:
        """Pages for so many new tokens of each row."""
        for row, tokens in new.items():
            for copy in self.table.extend(row, tokens):
                self.pool.copy(copy.group, [copy.source], [copy.target])

    def batch_of(self, mode: ForwardMode, new: Mapping[int, int], **more: Any) -> ForwardBatch:
        lengths = [self.table.length(row) for row in new]
        return ForwardBatch(mode, list(new), lengths, list(new.values()), **more)

    def step(
        self,
        mode: ForwardMode,
        new: Mapping[int, int],
        *,
        tree: DraftTree | None = None,
        save: bool = True,
        encoder: EncoderBatch | None = None,
        recorded: str = "",
        **more: Any,
    ) -> None:
        """Run a step of all layers with so many new tokens of each row, and compare it with dense attention."""
        self.give(new)
        batch = self.batch = self.batch_of(mode, new, tree=tree, **more)
        if recorded:
            getattr(self.backend, f"init_forward_metadata_{recorded}_cuda_graph")(batch)
        else:
            self.backend.init_forward_metadata(batch, encoder)
        for layer in self.layers:
            self.check_layer(layer, batch, tree, save)

    def check_layer(self, layer: AttentionLayer, batch: ForwardBatch, tree: DraftTree | None, save: bool) -> None:
        q = self.random(batch.tokens, layer.heads, layer.head_dim)
        k, v = self.new_keys(layer, batch.tokens)
        name = "forward_decode" if batch.mode is ForwardMode.DECODE else "forward_extend"
        if save:
            out = getattr(self.backend, name)(q, k, v, layer, batch)
        else:
            out = getattr(self.backend, name)(q, k, v, layer, batch, save_kv_cache=False)
        assert out.shape == (batch.tokens, layer.heads, layer.dims[1])
        for n, row in enumerate(batch.rows):
            span = slice(batch.cu_seqlens_q[n], batch.cu_seqlens_q[n + 1])
            keys, values = self.with_new(layer, row, batch.seq_lens[n], k[span], None if v is None else v[span], save)
            mask = None
            if tree is not None:
                mask = tree_mask(layer, tree.parents[n].tolist(), batch.seq_lens[n]).to(self.device)
            where = f"layer {layer.layer_id}, row {row}: ".__add__
            torch.testing.assert_close(out[span], dense(layer, q[span], keys, values, mask), msg=where)

    def with_new(
        self, layer: AttentionLayer, row: int, length: int, k: Tensor, v: Tensor | None, save: bool
    ) -> tuple[Tensor, Tensor]:
        """The row's keys and values, as real numbers of the cache, with its new tokens."""
        if v is None:
            k, v = k[:, None], k[:, None, : layer.v_head_dim]
        quantised = self.pool.cache(layer.layer_id).kv_dtype != "auto"
        if quantised:
            read = self.pool.read(layer.layer_id, self.slots(layer, row, length), self.dtype)
            return read if isinstance(read, tuple) else (read[:, None], read[:, None, : layer.v_head_dim])
        empty = (k[:0], v[:0])
        old = self.kept.get((layer.layer_id, row), empty)
        whole = tuple(torch.cat([a[: length - len(b)], b]) for a, b in zip(old, (k, v), strict=True))
        if save:
            self.kept[layer.layer_id, row] = whole  # type: ignore[assignment]
        return whole  # type: ignore[return-value]

    def slots(self, layer: AttentionLayer, row: int, length: int) -> Tensor:
        size = self.pool.page_size
        pages = self.table.pages(row, self.pool.group_of(layer.layer_id))
        slots = [pages[t // size] * size + t % size for t in range(length)]
        return torch.tensor(slots, dtype=torch.int64, device=self.device)
