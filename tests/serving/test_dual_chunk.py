"""Dual chunk attention against a matrix of positions: three calls over pages are one softmax over all keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.serving import (
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    KVCacheConfig,
    KVPool,
    Limits,
    PageAllocator,
    RequestTable,
)
from polyattn.serving.attention import chunk_calls
from polyattn.serving.dual_chunk import PARTS, DualChunk

CHUNKS = DualChunk(12, 4, 20)  # 8 tokens a chunk, logits grow from 20 tokens on
H, H_KV, D, LONGEST = 4, 2, 8, 64
SCALE = 0.3
FREQUENCIES = 0.7 ** torch.arange(D // 2, dtype=torch.float64)


def rotated(rows: Tensor, positions: Tensor) -> Tensor:
    """rows [..., D] at positions [...]."""
    angles = (positions[..., None] * FREQUENCIES).repeat_interleave(2, -1).view(*positions.shape, D // 2, 2)
    cos, sin = angles[..., 0], angles[..., 1]
    a, b = rows.reshape(*rows.shape[:-1], D // 2, 2).unbind(-1)
    return torch.stack([a * cos.cos() - b * sin.sin(), a * sin.sin() + b * cos.cos()], -1).flatten(-2)


def by_matrix(chunks: DualChunk, q: Tensor, k: Tensor, v: Tensor, rotate: Any = rotated) -> Tensor:
    """Every query at its position for every key, one by one: q [S, H, D], k, v [S, H_kv, D] without positions."""
    S, L, out = q.shape[0], chunks.length, torch.empty_like(q)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    for i in range(S):
        distance = i // L - torch.arange(i + 1) // L
        at = torch.where(
            distance == 0, i % L, torch.where(distance == 1, min(i % L + L, chunks.chunk_size), chunks.chunk_size)
        )
        if chunks.chunk_size > 2 * L - 1:
            at = torch.where(distance > 1, 2 * L - 1, at)
        queries = rotate(q[i].expand(i + 1, -1, -1), at[:, None].expand(-1, q.shape[1]))
        keys = rotate(k[: i + 1], (torch.arange(i + 1) % L)[:, None].expand(-1, q.shape[1]))
        f = 1.0
        if chunks.original_max_position_embeddings:
            f = max(1.0, 0.1 * math.log((i + 1) / chunks.original_max_position_embeddings) + 1.0)
        weights = ((queries * keys).sum(-1) * SCALE * f * f).softmax(0)
        out[i] = (weights[..., None] * v[: i + 1]).sum(0)
    return out


class World:
    """Requests over one layer: each has the queries, keys and values of a long text."""

    def __init__(self, chunks: DualChunk = CHUNKS, page_size: int = 4, kv: str = "auto", **asked: Any) -> None:
        self.chunks = chunks
        self.layer = AttentionLayer(3, H, H_KV, D, scale=SCALE, dual_chunk=chunks)
        self.pool = KVPool([self.layer], KVCacheConfig(dtype=kv, page_size=page_size), 80, dtype=torch.float64)
        self.table = RequestTable(4, LONGEST, page_size, [-1], [PageAllocator(80)])
        limits = Limits(4, 160, LONGEST)
        self.backend = AttentionBackend([self.layer], self.pool, self.table, limits=limits, **asked)
        self.texts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def add(self, seed: int) -> int:
        row, generator = self.table.add(), torch.Generator().manual_seed(seed)
        heads = (H, H_KV, H_KV)
        self.texts[row] = tuple(torch.randn(LONGEST, h, D, generator=generator, dtype=torch.float64) for h in heads)  # type: ignore[assignment]
        return row

    def given(self, row: int, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t[first:end] for t in self.texts[row])
        where = torch.arange(first, end)
        own = self.chunks.positions(where)
        at = torch.stack([own, *(own + turn for turn in self.chunks.turns(where))], 1)[..., None].expand(-1, -1, H)
        queries = rotated(q[:, None].expand(-1, 3, -1, -1), at)
        if (factor := self.chunks.factor(where)) is not None:
            queries = queries * factor[:, None, None, None]
        return queries, rotated(k, own[:, None].expand(-1, H_KV)), v

    def step(self, mode: ForwardMode, new: dict[int, int], recorded: bool = False) -> dict[int, Tensor]:
        for row, tokens in new.items():
            self.table.extend(row, tokens)
        rows, counts = list(new), list(new.values())
        ends = [self.table.length(row) for row in rows]
        batch = ForwardBatch(mode, rows, ends, counts)
        if recorded:
            self.backend.init_forward_metadata_capture_cuda_graph(batch.padded(1, 1))
        else:
            self.backend.init_forward_metadata(batch)
        parts = [self.given(row, end - n, end) for row, n, end in zip(rows, counts, ends, strict=True)]
        q, k, v = (torch.cat(one) for one in zip(*parts, strict=True))
        if recorded:
            q, k, v = (torch.cat([t, t[:1]]) for t in (q, k, v))
        out = self.backend.forward(q, k, v, self.layer)[: sum(counts)]
        return dict(zip(rows, out.split(counts), strict=True))

    def check(self, outs: dict[int, Tensor]) -> None:
        for row, out in outs.items():
            end = self.table.length(row)
            wanted = by_matrix(self.chunks, *(t[:end] for t in self.texts[row]))[end - len(out) :]
            torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)


BACKENDS = ["torch_native", "torch_sdpa", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_across_chunks_and_steps_after_them(backend: str) -> None:
    world = World(backend=backend)
    a, b, c = (world.add(n) for n in range(3))
    world.check(world.step(ForwardMode.EXTEND, {a: 29, b: 3}))
    world.check(world.step(ForwardMode.MIXED, {a: 1, b: 14, c: 8}))
    for _ in range(9):  # over a border of each
        world.check(world.step(ForwardMode.DECODE, {c: 1, a: 1, b: 1}))


@pytest.mark.parametrize("chunks", [DualChunk(12, 4), DualChunk(8, 0), DualChunk(12, 8), DualChunk(128, 64)], ids=str)
def test_chunks_of_every_kind(chunks: DualChunk) -> None:
    world = World(chunks, page_size=2)
    row = world.add(1)
    for tokens in (5, 26, 1, 1):
        world.check(world.step(ForwardMode.EXTEND, {row: tokens}))


def test_within_a_chunk_it_is_plain_attention() -> None:
    world = World(DualChunk(64, 0))
    row = world.add(2)
    (out,) = world.step(ForwardMode.EXTEND, {row: 40}).values()
    q, k, v = (t[:40] for t in world.texts[row])
    where = torch.arange(40)[:, None]
    q, k = rotated(q, where.expand(-1, H)), rotated(k, where.expand(-1, H_KV))
    attention = torch.nn.functional.scaled_dot_product_attention
    wanted = attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=SCALE, enable_gqa=True
    )
    torch.testing.assert_close(out, wanted.transpose(0, 1), rtol=0, atol=1e-12)


def test_recorded_decode_steps() -> None:
    world = World()
    world.backend.init_cuda_graph_state(3, 3)
    a, b = world.add(5), world.add(6)
    world.check(world.step(ForwardMode.EXTEND, {a: 6, b: 14}))
    for _ in range(12):
        world.check(world.step(ForwardMode.DECODE, {a: 1, b: 1}, recorded=True))


def test_parts_are_merged_by_the_kernel_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[int] = []

    class Ops:
        @staticmethod
        def merge_parts(outs: list[Tensor], lses: list[Tensor], *, out: Tensor, lse: Tensor) -> None:
            merged.append(len(outs))
            found = polyattn.merge(outs, lses, layout="THD")
            out.copy_(found[0])
            lse.copy_(found[1])

    generator = torch.Generator().manual_seed(3)
    outs = [torch.randn(5, H, D, generator=generator).bfloat16() for _ in PARTS]
    lses = [torch.randn(5, H, generator=generator) for _ in PARTS]
    wanted = chunk_calls._merged(outs, lses)
    monkeypatch.setattr(chunk_calls, "device_ops", lambda device_type: Ops())
    doubles = [[tensor.double() for tensor in tensors] for tensors in (outs, lses)]
    assert torch.equal(chunk_calls._merged(outs, lses), wanted)
    assert merged == [3]
    chunk_calls._merged(*doubles)
    assert merged == [3], "numbers of 64 bits are core's"


def test_explain_says_what_is_run() -> None:
    notes = World().backend.explain()["decode"].notes
    assert any("three calls, merged by their LSE" in note for note in notes)


def test_its_own_name_serves_nothing_else() -> None:
    layer = AttentionLayer(0, H, H_KV, 16)
    pool = KVPool([layer], KVCacheConfig(page_size=4), 8, dtype=torch.float16)
    table = RequestTable(1, 16, 4, [-1], [PageAllocator(8)])
    with pytest.raises(UnsupportedRequestError, match=r"dual_chunk_flash_attn.*method"):
        AttentionBackend([layer], pool, table, limits=Limits(1, 16, 16), backend="dual_chunk_flash_attn")


@pytest.mark.parametrize(
    ("own", "asked", "error", "words"),
    [
        ({"page_size": 3}, {}, InvalidInputError, r"pages of 3 tokens: a chunk has whole pages, a divisor of 8"),
        ({}, {"topk": 1}, UnsupportedRequestError, "not served with drafts to verify: build without speculation"),
    ],
)
def test_what_is_refused(own: dict[str, Any], asked: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        World(**own, **asked)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 4}, "window=4; a layer with dual_chunk is a decoder's"),
        ({"sinks": torch.zeros(H)}, "sinks='set'; a layer with dual_chunk"),
        ({"kind": "encoder_only"}, "kind='encoder_only'; a layer with dual_chunk"),
        ({"dual_chunk": 8}, "dual_chunk=8; a DualChunk is needed"),
    ],
)
def test_layers_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        AttentionLayer(0, H, H_KV, D, **{"dual_chunk": CHUNKS, **fields})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"chunk_size": 8, "local_size": 8}, "leaves no keys beside local_size=8"),
        ({"chunk_size": 8.5}, "chunk_size=8.5; a whole number"),
        ({"chunk_sise": 8}, "has 'chunk_sise'; known are .*Did you mean 'chunk_size'"),
        ({"sparse_attention_config": {}}, "set sparse_attention_enabled to False"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        DualChunk.from_config(config)


def test_calls_that_are_refused() -> None:
    world = World()
    row = world.add(0)
    world.step(ForwardMode.EXTEND, {row: 5})
    q, k, v = world.given(row, 0, 5)
    with pytest.raises(InvalidInputError, match=r"one for each of its parts is needed, \[T_q, 3, H_q, D\]"):
        world.backend.forward(q[:, 0], k, v, world.layer)
    with pytest.raises(InvalidInputError, match="save_kv_cache=False with new keys"):
        world.backend.forward(q, k, v, world.layer, save_kv_cache=False)
