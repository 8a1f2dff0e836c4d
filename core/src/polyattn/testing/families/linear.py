"""Family `linear`: gated delta rules, with a state beside the output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...contract import AttentionRequest
from ...dispatch.linear import linear_attention
from ...semantics.delta_rule import chunked_delta_rule
from ...semantics.reference import gated_delta_rule
from ..cases import Case
from .base import DTYPES, Call, Family, Lengths, Part, Shapes

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["Linear"]

_NAMES = ("query", "key", "value", "gate", "beta", "state")


def _exact(*part: Any) -> tuple[Tensor, Tensor]:
    """The definition, in the dtype of the state."""
    (query, key, value, gate, beta, state), request = part[:6], part[-1]
    layout = request.state_layout or "KV"
    return gated_delta_rule(
        query, key, value, gate=gate, beta=beta, state=state, scale=request.scale, state_layout=layout
    )


def _plain(*part: Any) -> tuple[Tensor, Tensor]:
    """Return what kernels round: chunks of tokens. A step for each token rounds less, and nothing is fast that way."""
    (query, key, value, gate, beta, state), request = part[:6], part[-1]
    flipped = request.state_layout == "VK"
    state = state.mT if flipped else state
    out, last = chunked_delta_rule(query, key, value, gate=gate, beta=beta, state=state, scale=request.scale)
    return out, last.mT if flipped else last


class Linear(Family):
    family = "linear"
    # Around the chunks of 16 to 64 tokens that kernels have, over several of them, and the smallest.
    lengths: ClassVar[Shapes] = {
        "equal": (((17, 17),), ((5, 5),), ((64, 64),), ((77, 77),), ((129, 129),)),
        "one": (((1, 1),),),
    }
    empty: ClassVar[Mapping[str, Lengths]] = {"equal": ((0, 0),)}
    batched = True
    says: ClassVar[frozenset[str]] = frozenset(
        ("grad", "method", "misaligned", "phase", "s_relation", "scale", "state_dtype", "state_layout", "v_head_dim")
    )
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {"tree": (True,), "spec_topk": (1, 4), "phase": ("verify",)}
    exact = staticmethod(_exact)
    plain = staticmethod(_plain)
    terms = None

    def repaired(self, values: Mapping[str, Any]) -> dict[str, Any]:
        v = super().repaired(values)
        v["phase"] = "decode" if v["s_relation"] == "one" else "prefill"
        # S10: the state is float32, and float64 beside float64; `make` has no other.
        v["state_dtype"] = ""
        v["state_layout"] = v["state_layout"] or "KV"
        return v

    def public(self, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]:
        r, t = call.case.request, call.tensors
        options = {"method": r.method, "scale": r.scale, "state_layout": r.state_layout or "KV"}
        given = {name: t[name] for name in ("gate", "beta", "state")}
        return linear_attention, (t["query"], t["key"], t["value"]), {**given, **options}

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r, B, (T, _) = case.request, len(case.lengths), case.longest
        tensors: dict[str, Tensor | None] = {n: maker.input(n, *shape) for n, shape in self.shapes(case).items()}
        decays = (B, T, r.heads, *((r.head_dim,) if r.method == "kda" else ()))
        tensors["gate"] = -maker.uniform(*decays).to(maker.dtype).to(maker.device)
        # beta |k|^2 stays small, as with the keys of length one that models have: else the state grows without a bound.
        tensors["beta"] = (maker.uniform(B, T, r.heads) / r.head_dim).to(maker.dtype).to(maker.device)
        tensors["state"] = maker.normal(*self._state(case)).to(DTYPES[self._dtype(r)]).to(maker.device)
        return tensors, {}

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        r, B, (T, _) = case.request, len(case.lengths), case.longest
        rows = (B, T, r.kv_heads, r.head_dim)
        return {"query": rows, "key": rows, "value": (B, T, r.heads, r.dims[1])}

    def out_shape(self, case: Case) -> tuple[int, ...]:
        return self.shapes(case)["value"]

    def second_form(self, case: Case) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
        return self._state(case), (DTYPES[self._dtype(case.request)],)

    def _state(self, case: Case) -> tuple[int, ...]:
        r = case.request
        rows = (r.head_dim, r.dims[1])
        return (len(case.lengths), r.heads, *(rows[::-1] if r.state_layout == "VK" else rows))

    def _dtype(self, request: AttentionRequest) -> str:
        return "float64" if request.dtype == "float64" else "float32"

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        yield tuple(tensors[name] for name in _NAMES)

    def join(self, case: Case, outs: Sequence[Tensor], seconds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return outs[0], seconds[0]

    def first(self, call: Call) -> tuple[Call, int]:
        case = dataclasses.replace(call.case, lengths=call.case.lengths[:1])
        return Call(case, {name: t[:1] for name, t in call.tensors.items()}, call.extra), 1
