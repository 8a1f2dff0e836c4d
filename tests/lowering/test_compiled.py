"""A chain of rewrites under torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.backends.reference_backend import Reference
from polyattn.lowering import Planner, bind

from .harness import dense, takes, tensors_of
from .test_chains import CHAINS, NARROWEST

ASKED = dense(**CHAINS[max(CHAINS, key=len)][1])


def test_the_longest_chain_is_compiled_whole_and_once_for_all_lengths():
    plan = Planner(takes(**NARROWEST)).plan(ASKED)
    assert plan is not None
    assert plan.length == 6
    bound = bind(plan, Reference().bind, Reference().bind)
    assert bound.traceable
    compilations = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(bound.forward, fullgraph=True, dynamic=True, backend=counting)
    for S_q, S_k in ((5, 9), (33, 64), (17, 40)):
        inputs, given = tensors_of(ASKED, S_q, S_k)
        inputs = [torch.randn_like(tensor) for tensor in inputs]
        torch.testing.assert_close(compiled(*inputs, **given), bound.forward(*inputs, **given))
    assert len(compilations) == 1
