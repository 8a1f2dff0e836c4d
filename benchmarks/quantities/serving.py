"""Costs of serving that grow with requests, pages and prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from engine_soak import engine_of, requests_of
from idle_model import IdleModel

from polyattn.serving import (
    AttentionBackend,
    ForwardBatch,
    ForwardMode,
    KVCacheConfig,
    KVPool,
    Limits,
    PageAllocator,
    PrefixCache,
    RequestTable,
    StepBuffers,
)
from polyattn.serving.engine import SamplingParams

from .common import Quantity

LOG, LINEAR = 0.3, 1.2
"""The exponents of what costs no more than O(log n), and O(n)."""


class _Prefixes:
    """A prefix cache of `count` prompts of `pages` pages each, which nobody else holds."""

    def __init__(self, count: int, pages: int = 2, windows: Sequence[int] = (-1,), more: int = 0) -> None:
        self.size, self.pages, self.fresh = 4, pages, itertools.count()
        self.allocators = [PageAllocator(1 + count * pages + more) for _ in windows]
        self.cache = PrefixCache(self.size, windows, self.allocators)
        for _ in range(count):
            self.put()

    def prompt(self) -> list[int]:
        """Tokens that nobody had before."""
        number = next(self.fresh)
        return [number] * (self.pages * self.size)

    def put(self, *, held: bool = False) -> None:
        pages = [allocator.allocate(self.pages) for allocator in self.allocators]
        self.cache.insert(self.prompt(), pages)
        if not held:
            for allocator, mine in zip(self.allocators, pages, strict=True):
                allocator.release(mine)


def _evict_beside_held(held: int) -> Callable[[], int]:
    many = 64
    state = _Prefixes(0, more=(held + many) * 2)
    for _ in range(held):
        state.put(held=True)

    def operation() -> int:
        for _ in range(many):
            state.put()
            state.cache.evict(2, 0)
        return many

    return operation


def _evict_beside_kept(kept: int) -> Callable[[], int]:
    """Every second prefix is held, as they come."""
    many = 64
    state = _Prefixes(0, more=(kept + many) * 2)
    for number in range(kept):
        state.put(held=bool(number % 2))

    def operation() -> int:
        for _ in range(many):
            state.cache.evict(2, 0)
            state.put()
        return many

    return operation


def _evict_sliding(prefixes: int) -> Callable[[], int]:
    many = 64
    state = _Prefixes(prefixes, windows=(-1, 7), more=many * 2)
    # Of most of them the sliding pages are gone already, as in an engine whose sliding pages are the scarce ones.
    state.cache.evict(2 * prefixes - 2 * many, 1)

    def operation() -> int:
        for _ in range(many):
            state.put()
            state.cache.evict(2, 1)
        state.cache.evict(2 * many, 0)
        return many

    return operation


def _match(prefixes: int) -> Callable[[], int]:
    state, many = _Prefixes(prefixes), 200
    prompts = [[number] * (2 * state.size + 1) for number in range(0, prefixes, max(1, prefixes // many))][:many]

    def operation() -> int:
        for prompt in prompts:
            state.cache.release(state.cache.match(prompt))
        return len(prompts)

    return operation


def _insert(prefixes: int) -> Callable[[], int]:
    state, many = _Prefixes(prefixes, more=400), 200

    def operation() -> int:
        for _ in range(many):
            state.put()
        state.cache.evict(2 * many)
        return many

    return operation


def _allocator(pages: int) -> Callable[[], int]:
    allocator, many = PageAllocator(pages), 500

    def operation() -> int:
        for _ in range(many):
            taken = allocator.allocate(8)
            allocator.share(taken)
            allocator.release(taken)
            allocator.release(taken)
        return many

    return operation


class _Rows:
    """A request table of rows of `length` tokens, and the buffers of its steps."""

    def __init__(self, rows: int, length: int, page_size: int = 16, step_tokens: int = 0) -> None:
        columns = -(-(length + 4096) // page_size)
        self.table = RequestTable(
            rows, columns * page_size, page_size, (-1,), [PageAllocator(1 + rows * columns)], "cpu"
        )
        self.rows = [self.table.add() for _ in range(rows)]
        for row in self.rows:
            self.table.extend(row, length)
        self.buffers = StepBuffers(rows, rows + step_tokens, columns)

    def batch(self, mode: ForwardMode, counts: Sequence[int]) -> ForwardBatch:
        return ForwardBatch(mode, self.rows, [self.table.length(row) for row in self.rows], counts)


def _plan_decode(length: int, read: Sequence[str] = ()) -> Callable[[], int]:
    state, many = _Rows(16, length), 32

    def operation() -> int:
        for row in state.rows:
            state.table.truncate(row, length)
        for _ in range(many):
            state.table.extend_all(state.rows, 1)
            (step,) = state.buffers.build(state.batch(ForwardMode.DECODE, [1] * 16), state.table)
            for name in read:
                step.host(name)
        return many

    return operation


def _plan_and_read(length: int) -> Callable[[], int]:
    return _plan_decode(length, ("kv_indptr", "kv_indices", "last_page_len"))


def _extend(rows: int) -> Callable[[], int]:
    state, many = _Rows(rows, 16), 64

    def operation() -> int:
        for row in state.rows:
            state.table.truncate(row, 16)
        for _ in range(many):
            state.table.extend_all(state.rows, 1)
        return many

    return operation


def _mixed(rows: int) -> Callable[[], int]:
    state, many, chunk = _Rows(rows, 512, step_tokens=256), 16, 256
    counts = [chunk, *[1] * (rows - 1)]

    def operation() -> int:
        for row in state.rows:
            state.table.truncate(row, 512)
        for _ in range(many):
            state.table.extend_all(state.rows, counts)
            state.buffers.build(state.batch(ForwardMode.MIXED, counts), state.table)
        return many

    return operation


def _mixed_by_layers(layers: int) -> Callable[[], int]:
    model, many, rows = IdleModel([-1] * layers), 16, 8
    pool = KVPool(model.layers, KVCacheConfig(page_size=16), 1 + rows * 64, dtype=model.dtype)
    table = RequestTable(rows, 1024, 16, (-1,), [PageAllocator(1 + rows * 64)])
    backend = AttentionBackend(model.layers, pool, table, limits=Limits(rows, 256, 1024), backend="torch_native")
    numbers = [table.add() for _ in range(rows)]
    table.extend_all(numbers, 512)
    counts = [64, *[1] * (rows - 1)]

    def operation() -> int:
        for _ in range(many):
            backend.plan(ForwardBatch(ForwardMode.MIXED, numbers, [512] * rows, counts))
        return many

    return operation


def _wait(waiting: int) -> Callable[[], int]:
    engine, many = engine_of(1, caching=False), 64
    prompt, params = [1, 2, 3], SamplingParams(max_new_tokens=1)
    for _ in range(waiting):
        engine.add(prompt, params)

    def operation() -> int:
        for number in [engine.add(prompt, params)[0] for _ in range(many)]:
            engine.cancel(number)
        return many

    return operation


def _full_pool(running: int) -> Callable[[], int]:
    engine, many = engine_of(running, caching=True), 24
    requests = itertools.cycle(requests_of(4 * running))

    @torch.inference_mode()
    def operation() -> int:
        for _ in range(many):
            while engine.unfinished < running + 2:
                engine.add(*next(requests))
            engine.step()
        return many

    for _ in range(8):  # until the pool has been full
        operation()
    return operation


HELD, ROWS = (1_000, 10_000, 100_000), (8, 80, 800)
FEW = (50, 500, 5_000)
QUANTITIES: tuple[Quantity, ...] = (
    Quantity("prefix cache: evict beside prefixes in use", "prefixes in use", HELD, FEW, LOG, _evict_beside_held),
    Quantity("prefix cache: evict, every second one in use", "cached prefixes", HELD, FEW, LOG, _evict_beside_kept),
    Quantity("prefix cache: evict in a sliding group", "emptied prefixes", HELD, FEW, LOG, _evict_sliding),
    Quantity("prefix cache: match", "cached prefixes", HELD, FEW, LOG, _match),
    Quantity("prefix cache: insert", "cached prefixes", HELD, FEW, LOG, _insert),
    Quantity("page allocator: take, share and give back", "pages", HELD, FEW, LOG, _allocator),
    Quantity("engine: add and cancel", "waiting requests", HELD, FEW, LOG, _wait),
    Quantity("engine: step with a full pool", "running requests", (4, 40, 400), (1, 10, 100), LINEAR, _full_pool),
    Quantity("request table: extend a batch", "rows", ROWS, ROWS, LINEAR, _extend),
    Quantity("decode step: plan", "tokens of context", HELD, (500, 5_000, 50_000), LOG, _plan_decode),
    Quantity(
        "decode step: plan, pages on the host", "tokens of context", HELD, (500, 5_000, 50_000), LOG, _plan_and_read
    ),
    Quantity("mixed step: build", "rows", ROWS, ROWS, LINEAR, _mixed),
    Quantity("mixed step: plan", "layers", (1, 10, 100), (1, 10, 100), LOG, _mixed_by_layers),
)
