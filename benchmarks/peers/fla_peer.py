"""flash-linear-attention's softmax attention, which is causal."""

from __future__ import annotations

from fla.ops.attn.parallel import parallel_attn
from measuring.problems import Backward, Dense, Problem

from . import Call, RefusedError

__all__ = ["parallel"]


def parallel(problem: Problem) -> Call:
    if not isinstance(problem, Dense) or isinstance(problem, Backward) or not problem.row.causal:
        raise RefusedError("causal dense rows only")
    return lambda number: parallel_attn(*problem.inputs[number], scale=problem.scale)
