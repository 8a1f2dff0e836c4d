"""flash-linear-attention's softmax attention, which is causal."""

from __future__ import annotations

from fla.ops.attn.parallel import parallel_attn

from polyattn.bench.measure import Call, Inputs
from polyattn.errors import UnsupportedRequestError

from .common import only, scale_of

__all__ = ["parallel"]


def parallel(inputs: Inputs) -> Call:
    request = only(inputs, ("dense",), "causal")
    if request.causal == "none" or request.s_relation != "equal":
        raise UnsupportedRequestError("takes causal rows of equal lengths only")
    sets = [tuple(some[name] for name in ("query", "key", "value")) for some in inputs.tensors]
    return lambda number: parallel_attn(*sets[number], scale=scale_of(request))
