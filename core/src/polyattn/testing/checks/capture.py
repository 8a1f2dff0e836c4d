"""Recording into a device graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..calls import Installed, Target
from ..plain import in_float64, plainly
from ..problems import Problem
from .notes import Notes
from .one_call import Result, against

__all__ = ["capture"]


def capture(target: Target, problem: Problem, notes: Notes) -> None:
    """Recorded into a CUDA graph and replayed on other inputs: the result is that of the inputs at replay."""
    tensors = dict(problem.tensors)
    final = tensors["query"].clone()
    tensors["query"].zero_()
    call: Callable[[], Any] = functools.partial(target.call, problem.case, tensors, problem.extra, None)
    if isinstance(target, Installed):
        call = target.recordable(problem.case, tensors, problem.extra)
    stream = torch.cuda.Stream(problem.dout.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(problem.dout.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream(problem.dout.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        raw = call()
    result, lse = problem.family.returned(problem.request, raw)
    result.fill_(float("nan"))
    tensors["query"].copy_(final)
    graph.replay()
    against(problem, Result(result, lse, {}), in_float64(problem), plainly(problem), notes)
