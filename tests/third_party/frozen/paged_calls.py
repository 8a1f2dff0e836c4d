"""What the frozen wheel of calls over a cache serves, against the reference: tests for an interpreter that has both of
them installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import polyattn
from polyattn.contract import API_VERSION
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
from polyattn_tinypages import plugin
from polyattn_tinypages.adapter import _Planned

BACKENDS = ("tinypages", "reference")
LENGTHS = ((3, 20), (1, 9), (2, 0))
close = torch.testing.assert_close


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def tables() -> dict:
    return {
        "page_table": torch.arange(15, dtype=torch.int32).flip(0).view(3, 5),
        "seq_lens": int32(*(k for _, k in LENGTHS)),
        "cu_seqlens_q": int32(0, 3, 4, 6),
        "max_seqlen_q": 3,
        "max_seqlen_k": 20,
    }


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


def paged(layout: str = "NHD") -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """(query, caches, new rows)"""
    query, key, value, new_key, new_value = drawn((6, 4, 16), (15, 4, 2, 16), (15, 4, 2, 8), (6, 2, 16), (6, 2, 8))
    caches = [t.transpose(1, 2).contiguous() if layout == "HND" else t for t in (key, value)]
    return query, caches, [new_key, new_value]


def test_it_speaks_version_1_to_a_core_that_speaks_a_later_one():
    assert plugin.POLYATTN_API_VERSION == 1 < API_VERSION


def test_choosing_it_needs_no_torch():
    code = (
        "import polyattn, sys\n"
        "asked = {'family': 'paged', 'dtype': 'float32', 'phase': 'decode', 's_relation': 'one', 'page_size': 16}\n"
        "asked = polyattn.AttentionRequest(**asked)\n"
        "assert polyattn.explain(asked, backend='tinypages').backend == 'tinypages'\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_call_with_all_it_declares(layout, saved):
    rules = {"window": (7, 0), "softcap": 20.0, "scale": 0.3, "sinks": drawn((4,))[0], "kv_layout": layout}
    found = []
    for backend in BACKENDS:
        query, caches, (key, value) = paged(layout)
        out, lse = polyattn.paged_attention(
            query, *caches, **tables(), key=key, value=value, save_kv_cache=saved, **rules, return_lse=True,
            backend=backend,
        )  # fmt: skip
        found.append((out, lse, *caches))
    for ours, right in zip(*found, strict=True):
        close(ours, right)


def test_parts_have_tables_of_their_own():
    query, caches, _ = paged()
    part = polyattn.KVPart(int32(3, 8, 1)[None], int32(11), int32(0, 6), 6, 11)
    given = {**tables(), "kv_parts": [part], "return_lse": True}
    found = [polyattn.paged_attention(query, *caches, **given, backend=backend) for backend in BACKENDS]
    for ours, right in zip(*found, strict=True):
        close(ours, right)


def test_a_latent_call():
    query, cache = drawn((6, 4, 24), (15, 4, 24))
    into = torch.empty(6, 4, 16)
    given = {**tables(), "scale": 0.2, "v_head_dim": 16}
    out = polyattn.mla_attention(query, cache, **given, out=into, backend="tinypages")
    assert out is into
    close(out, polyattn.mla_attention(query, cache, **given, backend="reference"))


def test_exact_rewrites_reach_it():
    """Between the call and this plugin: what they change is in the tables."""
    query, caches, _ = paged()
    quantised = [cache.to(torch.float8_e4m3fn) for cache in caches]
    scale = torch.tensor(0.5)
    given = {**tables(), "k_scale": scale, "v_scale": scale}
    asked = polyattn.explain(polyattn.paged_attention, query, *quantised, **given, backend="tinypages")
    assert (asked.backend, asked.lowerings) == ("tinypages", ("dequantise_kv",))
    found = [polyattn.paged_attention(query, *quantised, **given, backend=backend) for backend in BACKENDS]
    close(*found)


@pytest.mark.parametrize("validated", [False, True])
def test_steps_of_an_engine_are_planned_by_its_session(validated, monkeypatch):
    if validated:
        monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    layers = [AttentionLayer(0, 4, 2, 16), AttentionLayer(1, 4, 2, 16), AttentionLayer(2, 4, 2, 16, window=6)]
    found = []
    for backend in BACKENDS:
        pool = KVPool(layers, KVCacheConfig(page_size=4), pages=32, dtype=torch.float32)
        windows = [group.window for group in pool.groups]
        table = RequestTable(4, 64, pool.page_size, windows, [PageAllocator(32) for _ in windows])
        limits = Limits(max_sequences=4, max_tokens=32, max_seqlen=64)
        engine = AttentionBackend(layers, pool, table, limits=limits, backend=backend)
        before, outs = _Planned.plans, []
        rows = [table.add(), table.add()]
        torch.manual_seed(0)
        for mode, counts in ((ForwardMode.EXTEND, (13, 5)), (ForwardMode.DECODE, (1, 1)), (ForwardMode.DECODE, (1, 1))):
            for row, count in zip(rows, counts, strict=True):
                for copy in table.extend(row, count):
                    pool.copy(copy.group, [copy.source], [copy.target])
            batch = ForwardBatch(mode, rows, [table.length(row) for row in rows], counts)
            engine.init_forward_metadata(batch)
            for layer in layers:
                q, k, v = (torch.randn(batch.tokens, heads, 16) for heads in (4, 2, 2))
                outs.append(engine.forward(q, k, v, layer))
        found.append(outs)
        planned = _Planned.plans - before
        assert planned == (6 if backend == "tinypages" else 0), "once a step for the layers that ask the same"
    for ours, right in zip(*found, strict=True):
        close(ours, right)


def test_what_it_does_not_declare_is_refused():
    query, caches, _ = paged()
    with pytest.raises(polyattn.UnsupportedRequestError) as caught:
        polyattn.paged_attention(query.half(), *(c.half() for c in caches), **tables(), backend="tinypages")
    assert caught.value.rejected["tinypages"] == ["dtype='float16' is not one of float32, bfloat16"]
