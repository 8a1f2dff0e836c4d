"""Recording into a device graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..calls import Installed, Target
from ..machine import graph_class
from ..plain import in_float64, plainly
from ..problems import Problem
from .notes import Notes
from .one_call import Result, against

__all__ = ["capture"]


def capture(target: Target, problem: Problem, notes: Notes) -> None:
    """Recorded into a graph of its device and replayed on other inputs: the result is that of the inputs at replay."""
    tensors = dict(problem.tensors)
    final = tensors["query"].clone()
    tensors["query"].zero_()
    call: Callable[[], Any] = functools.partial(target.call, problem.case, tensors, problem.extra, None)
    if isinstance(target, Installed):
        call = target.recordable(problem.case, tensors, problem.extra)
    device = problem.dout.device
    module = torch.get_device_module(device)
    stream = module.Stream(device)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        for _ in range(3):
            call()
    module.current_stream(device).wait_stream(stream)
    graph = getattr(module, graph_class(device))()
    with module.graph(graph):
        raw = call()
    result, lse = problem.family.returned(problem.request, raw)
    result.fill_(float("nan"))
    tensors["query"].copy_(final)
    graph.replay()
    against(problem, Result(result, lse, {}), in_float64(problem), plainly(problem), notes)
