"""Costs of calls, masks and selection that grow with signatures, lengths and installed backends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import polyattn
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable

from .common import Quantity

CALLS = 500
PAGE = 16


def _signatures() -> itertools.product[tuple[int, ...]]:
    """Widths of query and value, a signature each; small, so that their kernels cost the same."""
    return itertools.product(range(1, 300), repeat=2)


def _tensors(widths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """[1, 1, 1, D | D_v]."""
    wide, narrow = (torch.zeros(1, 1, 1, width) for width in widths)
    return wide, wide.clone(), narrow


def hit_beside_signatures(count: int) -> Callable[[], int]:
    """Calls of signatures in turn, so that no guard serves them; each is asked for before it is forgotten."""
    site = polyattn.bind(layout="BHSD")
    given = [_tensors(widths) for widths in itertools.islice(_signatures(), count)]
    for tensors in given:
        site(*tensors)
    some = itertools.cycle(given[:: max(count // 100, 1)])

    def calls() -> int:
        for tensors in itertools.islice(some, CALLS):
            site(*tensors)
        return CALLS

    return calls


def miss_beside_signatures(count: int) -> Callable[[], int]:
    """Calls of signatures that are new, beside `count` of them or as many as are kept."""
    site = polyattn.bind(layout="BHSD")
    new = _signatures()
    for widths in itertools.islice(new, count):
        site(*_tensors(widths))

    def calls() -> int:
        for widths in itertools.islice(new, 50):
            site(*_tensors(widths))
        return 50

    return calls


def hit_beside_sites(count: int) -> Callable[[], int]:
    """Functional calls with static arguments in turn, beside `count` others."""
    q, k, v = (torch.zeros(1, 1, 1, 8) for _ in range(3))
    scales = [1 + n / count for n in range(count)]
    for scale in scales:
        polyattn.attention(q, k, v, scale=scale)
    some = itertools.cycle(scales[:: max(count // 100, 1)])

    def calls() -> int:
        for scale in itertools.islice(some, CALLS):
            polyattn.attention(q, k, v, scale=scale)
        return CALLS

    return calls


def growing_mask(call: Callable[..., Tensor]) -> Callable[[int], Callable[[], int]]:
    """Decode calls with a mask whose keys grow by one each time."""

    def prepare(keys: int) -> Callable[[], int]:
        query = torch.randn(1, 8, 1, 64)
        key, value = torch.randn(2, 1, 8, keys + 100, 64)
        mask = torch.ones(1, 1, 1, keys + 100, dtype=torch.bool)
        given = [(query, key[:, :, :n], value[:, :, :n], mask[..., :n]) for n in range(keys, keys + 100)]

        def calls() -> int:
            for tensors in given:
                call(*tensors)
            return len(given)

        return calls

    return prepare


def _decode(batch: int, layers: int, keys: int) -> Callable[[], int]:
    """The attention of decode steps on a CPU: planned, written, gathered and attended, without a model."""
    own = [AttentionLayer(i, 8, 2, 32) for i in range(layers)]
    pages = batch * (-(-(keys + 1) // PAGE)) + 1
    pool = KVPool(own, KVCacheConfig(page_size=PAGE), pages, dtype=torch.float32, device=torch.device("cpu"))
    table = RequestTable(batch, keys + 1, PAGE, [-1], [PageAllocator(pages)], torch.device("cpu"))
    limits = Limits(max_sequences=batch, max_tokens=batch, max_seqlen=keys + 1)
    backend = AttentionBackend(own, pool, table, limits=limits)
    rows = [table.add() for _ in range(batch)]
    for row in rows:
        table.extend(row, keys + 1)
    step = ForwardBatch(ForwardMode.DECODE, rows, [keys + 1] * batch, [1] * batch)
    query, key, value = (torch.randn(batch, heads, 32) for heads in (8, 2, 2))

    def steps() -> int:
        with torch.no_grad():
            for _ in range(5):
                backend.plan(step)
                backend.prepare()
                for layer in own:
                    backend.forward(query, key, value, layer)
        return 5

    return steps


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        "call of a known signature", "signatures of the site", (200, 2000, 20000), (20, 200, 2000), 0.25,
        hit_beside_signatures,
    ),
    Quantity(
        "call of a new signature", "signatures of the site", (500, 5000, 50000), (20, 200, 2000), 0.25,
        miss_beside_signatures,
    ),
    Quantity("call of a known site", "sites", (50, 500, 5000), (20, 200, 2000), 0.25, hit_beside_sites),
    Quantity(
        "masked call whose keys grow", "keys", (64, 640, 6400), (64, 640, 6400), 1.0,
        growing_mask(polyattn.bind(layout="BHSD")),
    ),
    Quantity(
        "the same by SDPA itself", "keys", (64, 640, 6400), (64, 640, 6400), 1.0,
        growing_mask(F.scaled_dot_product_attention),
    ),
    Quantity(
        "decode step on a CPU, by batch", "requests", (2, 20, 200), (1, 10, 100), 1.05,
        lambda batch: _decode(batch, 4, 255),
    ),
    Quantity(
        "decode step on a CPU, by layers", "layers", (2, 20, 200), (1, 10, 100), 1.05,
        lambda layers: _decode(8, layers, 63),
    ),
    Quantity(
        "decode step on a CPU, by context", "keys of each request", (63, 639, 6399), (31, 319, 3199), 1.05,
        lambda keys: _decode(8, 4, keys),
    ),
)  # fmt: skip
