"""Rewrites that depend on lengths, under torch.compile: one graph serves all lengths of a relation."""

from __future__ import annotations

import pytest
import torch

from polyattn.backends.torch_sdpa import TorchSDPA
from polyattn.lowering import bind
from polyattn.semantics.reference import attention

from .harness import Lowered, dense, takes

SQUARE = takes(s_relation="equal")
PARTS = (*takes(s_relation="equal", causal=("none", "bottom_right")), *takes(causal="none"))
PLAIN = takes(window=((-1, -1),))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "rows, fields, lengths",
    [
        pytest.param(SQUARE, {"causal": "bottom_right", "s_relation": "fewer"}, ((3, 9), (4, 11), (9, 64)), id="pad"),
        pytest.param(PARTS, {"causal": "top_left", "s_relation": "more"}, ((9, 3), (11, 4), (64, 9)), id="split"),
        pytest.param(PLAIN, {"window": (7, 2), "s_relation": "fewer"}, ((3, 19), (5, 7), (9, 64)), id="trim, mask"),
    ],
)
def test_one_graph_for_all_lengths(rows, fields, lengths):
    request = dense(head_dim=8, grad=("query", "key", "value"), **fields)
    plan = Lowered(rows, "autograd").plan(request)
    bound = bind(plan, TorchSDPA().bind, TorchSDPA().bind)
    assert bound.traceable
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    traced = torch.compile(bound.forward, backend=counting, fullgraph=True, dynamic=True)
    causal, window = fields.get("causal", "none"), fields.get("window", (-1, -1))
    for S_q, S_k in lengths:
        tensors = [torch.randn(2, n, 4, 8, requires_grad=True) for n in (S_q, S_k, S_k)]
        right = attention(*tensors, causal=causal, window=window)
        got = traced(*tensors)
        torch.testing.assert_close(got, right)
        grads = (torch.autograd.grad(out.square().sum(), tensors) for out in (got, right))
        torch.testing.assert_close(*grads)
    assert len(graphs) == 1
