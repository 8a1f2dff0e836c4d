"""Rewrites of lengths in a CUDA graph: recorded once, replayed for other lengths and other tables."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from polyattn.backends.torch_sdpa import TorchSDPA
from polyattn.contract import Bound, PagedTables
from polyattn.lowering import bind
from polyattn.semantics.reference import attention, paged_attention, varlen_attention

from .harness import Lowered, dense, takes

MASKED = takes(causal="none", window=((-1, -1),), chunk=0, mask=("bool", "additive"))
HALF = {"dtype": "bfloat16", "platform": "cuda", "graph_capture": True}


@pytest.fixture(autouse=True)
def gpu(device):
    device("cuda", what="recording into a CUDA graph")


def bound(rows, load, **fields):
    return bind(Lowered(rows, "autograd").plan(dense(**HALF, **fields)), load, load).forward


def recorded(function, *tensors, **given):
    """A replay of `function` on these tensors, whatever they hold then."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function(*tensors, **given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*tensors, **given)

    def replay():
        out.fill_(float("nan"))
        graph.replay()
        return out

    return replay


def near(got, right):
    assert bool(got.isfinite().all())
    assert float((got.double() - right).norm() / right.norm()) < 8e-3


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("window", [(-1, -1), (9, -1)])
def test_padding_follows_the_lengths(window):
    fields = {"family": "varlen", "layout": "THD", "s_relation": "more", "causal": "bottom_right", "window": window}
    q, k, v = random(40, 4, 64), random(90, 4, 64), random(90, 4, 64)
    lens = {"cu_seqlens_q": numbers(0, 10, 20, 40), "cu_seqlens_k": numbers(0, 30, 60, 90)}
    host = {"max_seqlen_q": 32, "max_seqlen_k": 64}
    replay = recorded(bound(MASKED, TorchSDPA().bind, **fields), q, k, v, **lens, **host)
    lens["cu_seqlens_q"].copy_(numbers(0, 32, 32, 40))
    lens["cu_seqlens_k"].copy_(numbers(0, 64, 70, 90))
    right = varlen_attention(
        *(q, k, v), **lens, **host, causal="bottom_right", window=window, compute_dtype=torch.float64
    )
    near(replay(), right.double())


def packed_kernel(request):
    """Packed attention of equal lengths by one SDPA call."""

    def forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, attn_mask=None, sinks=None):
        parts = [
            t.unflatten(0, (-1, n)).transpose(1, 2)
            for t, n in ((q, max_seqlen_q), (k, max_seqlen_k), (v, max_seqlen_k))
        ]
        return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(0, 1)

    return Bound(forward)


def test_packing():
    q, k, v = random(3, 17, 4, 64), random(3, 33, 4, 64), random(3, 33, 4, 64)
    replay = recorded(bound(takes("varlen"), packed_kernel, s_relation="fewer"), q, k, v)
    q.copy_(random(3, 17, 4, 64))
    near(replay(), attention(q, k, v, compute_dtype=torch.float64).double())


@pytest.mark.parametrize(
    "rows, fields, S_q, S_k",
    [
        pytest.param(takes(s_relation="equal"), {"causal": "top_left", "s_relation": "fewer"}, 17, 33, id="crop"),
        pytest.param(takes(s_relation="equal"), {"causal": "bottom_right", "s_relation": "more"}, 33, 17, id="drop"),
        pytest.param(takes(s_relation="equal"), {"causal": "bottom_right", "s_relation": "fewer"}, 17, 33, id="pad"),
        pytest.param(
            takes(causal=("none", "bottom_right")), {"causal": "top_left", "s_relation": "more"}, 33, 17, id="split"
        ),
        pytest.param(takes(window=((-1, -1),)), {"window": (9, -1), "s_relation": "one"}, 1, 33, id="trim, one query"),
        pytest.param(takes(window=((-1, -1),)), {"window": (9, 2), "s_relation": "fewer"}, 17, 33, id="trim, mask"),
    ],
)
def test_dense_lengths(rows, fields, S_q, S_k):
    q, k, v = random(2, S_q, 4, 64), random(2, S_k, 4, 64), random(2, S_k, 4, 64)
    replay = recorded(bound(rows, TorchSDPA().bind, **fields), q, k, v)
    q.copy_(random(2, S_q, 4, 64))
    causal, window = fields.get("causal", "none"), fields.get("window", (-1, -1))
    near(replay(), attention(q, k, v, causal=causal, window=window, compute_dtype=torch.float64).double())


def paged_kernel(request):
    """One query per sequence over single-token pages, lengths as a mask."""

    def forward(q, key_cache, value_cache, *, tables, **given):
        table = tables.page_table[:, : tables.max_seqlen_k].long()
        keys, values = (cache[table, 0].transpose(1, 2) for cache in (key_cache, value_cache))
        seen = torch.arange(table.shape[1], device=q.device) < tables.seq_lens[:, None]
        return F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, seen[:, None, None]).squeeze(2)

    return Bound(forward)


def test_tables_follow_the_lengths():
    fields = {"family": "paged", "layout": "THD", "s_relation": "one", "phase": "decode", "page_size": 1}
    kernel = bound(takes("paged", window=((-1, -1),)), paged_kernel, window=(9, -1), **fields)
    q, keys, values = random(3, 4, 64), random(99, 1, 4, 64), random(99, 1, 4, 64)
    tables = {
        "page_table": torch.randperm(99, device="cuda")[:90].view(3, 30).int(),
        "seq_lens": numbers(30, 30, 30),
        "cu_seqlens_q": numbers(0, 1, 2, 3),
    }
    replay = recorded(kernel, q, keys, values, tables=PagedTables(**tables, max_seqlen_q=1, max_seqlen_k=30))
    tables["page_table"].copy_(torch.randperm(99, device="cuda")[:90].view(3, 30))
    tables["seq_lens"].copy_(numbers(30, 4, 11))
    right = paged_attention(q, keys, values, **tables, window=(9, -1), compute_dtype=torch.float64)
    near(replay(), right.double())
