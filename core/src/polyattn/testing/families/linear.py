"""Family `linear`: gated delta rules, with a state beside the output."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...contract import AttentionRequest
from ...dispatch.linear import linear_attention
from ...semantics.delta_rule import chunked_delta_rule
from ...semantics.linear_gates import computed_gates
from ...semantics.reference import gated_delta_rule, unit_rows
from ..cases import Case
from .base import DTYPES, Call, Family, Lengths, Part, Shapes

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["Linear"]

_NAMES = ("query", "key", "value", "gate", "beta", "state", "a_log", "dt_bias")
_BOUND = -5.0
"""Of gates that are bounded."""
_DRAFTS = 1
"""Which of the shapes draft tokens have: 5 for each sequence. Every one of their states is compared."""
_PACKED = 2
"""Which of the shapes is of sequences behind each other in one row, of several lengths, one of them without tokens."""


def _given(part: Any) -> dict[str, Any]:
    """The arguments of a computed call: gates and rows as the request says, of a pool the states in its slots."""
    values, (slots, parents, starts), request = dict(zip(_NAMES, part, strict=False)), part[len(_NAMES) : -2], part[-1]
    values["cu_seqlens"] = starts
    if slots is not None:
        values["state"] = values["state"].to(values["value"].dtype)[slots.long().clamp(min=0)]
    if parents is not None:
        values["parents"] = parents
    a_log, dt_bias = values.pop("a_log"), values.pop("dt_bias")
    if request.raw_gates:
        bound = {"gate_bound": _BOUND if request.raw_gates == "bounded" else 0.0, "beta_range": request.beta_range}
        values["gate"], values["beta"] = computed_gates(values["gate"], values["beta"], a_log, dt_bias, **bound)
    if request.qk_norm:
        values |= {name: unit_rows(values[name]) for name in ("query", "key")}
    return {**values, "scale": request.scale}


def _exact(*part: Any) -> tuple[Tensor, Tensor]:
    """The definition, in the dtype of the state."""
    form = {"state_layout": part[-1].state_layout or "KV", "every_state": part[-1].state_out == "every"}
    return _in_slots(part, *gated_delta_rule(**_given(part), **form))


def _plain(*part: Any) -> tuple[Tensor, Tensor]:
    """Return what kernels round: chunks of tokens. A step for each token rounds less, and nothing is fast that way."""
    if part[-1].state_out == "every":
        return _exact(*part)
    given, flipped = _given(part), part[-1].state_layout == "VK"
    given["state"] = given["state"].mT if flipped else given["state"]
    out, last = chunked_delta_rule(**given)
    return _in_slots(part, out, last.mT if flipped else last)


def _in_slots(part: tuple[Any, ...], out: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """(out, states) as a call with slots gives them: 0 for a sequence without one, and the pool."""
    pool, slots, starts = part[_NAMES.index("state")], part[len(_NAMES)], part[len(_NAMES) + 2]
    if slots is None:
        return out, states
    kept = slots >= 0
    tokens = kept[:, None] if starts is None else kept.repeat_interleave(starts.diff().long())[None]
    out = out.where(tokens[..., None, None], 0.0)
    if part[-1].state_out == "every":
        return out, states.where(kept[:, None, None, None, None], 0.0)
    after = pool.to(states.dtype, copy=True)
    after[slots[kept].long()] = states[kept]
    return out, after


class Linear(Family):
    family = "linear"
    # Around the chunks of 16 to 64 tokens that kernels have, over several of them, and the smallest.
    lengths: ClassVar[Shapes] = {
        "equal": (((17, 17),), ((5, 5),), ((9, 9), (0, 0), (33, 33), (1, 1)), ((77, 77),)),
        "one": (((1, 1),),),
    }
    empty: ClassVar[Mapping[str, Lengths]] = {"equal": ((0, 0),)}
    batched = True
    drafts = True
    says: ClassVar[frozenset[str]] = frozenset(
        (
            *("grad", "method", "misaligned", "phase", "s_relation", "scale", "state_dtype", "state_layout"),
            *("v_head_dim", "state_out", "state_slots", "tree", "raw_gates", "beta_range", "qk_norm"),
        )
    )
    # What an engine asks of a step as it does of softmax layers; a call of this family has other words for it.
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "spec_topk": (1, 4),
        "phase": ("extend",),
        "s_relation": ("fewer",),
        "causal": ("bottom_right",),
    }
    exact = staticmethod(_exact)
    plain = staticmethod(_plain)
    terms = None

    def axes(self, axes: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        return {**super().axes(axes), "shape": tuple(range(len(self.lengths["equal"])))}

    def repaired(self, values: Mapping[str, Any]) -> dict[str, Any]:
        v = super().repaired(values)
        every, slots = v["state_out"] == "every", v["state_slots"]
        v["phase"] = "verify" if every else "decode" if v["s_relation"] == "one" else "prefill"
        v["shape"] = _DRAFTS if every and v["s_relation"] == "equal" else v["shape"]
        v["tree"] = every and v["tree"]
        # A sequence alone is a sample of a batch.
        v["shape"] = 0 if v["batch_invariant"] and v["shape"] == _PACKED else v["shape"]
        # A pool is written, which no gradient goes through.
        v["grad"] = () if slots else v["grad"]
        # S10: the state is float32, and float64 beside float64; `make` has no other.
        v["state_dtype"] = ""
        v["state_layout"] = v["state_layout"] or "KV"
        v["beta_range"] = v["beta_range"] if v["raw_gates"] else 1
        return v

    def public(self, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]:
        r, t = call.case.request, call.tensors
        options = {"method": r.method, "scale": r.scale, "state_layout": r.state_layout or "KV"}
        options |= {"qk_norm": r.qk_norm, "beta_range": r.beta_range, **call.extra}
        options["every_state"] = r.state_out == "every"
        given = {name: t[name] for name in _NAMES[3:] if name in t}
        return linear_attention, (t["query"], t["key"], t["value"]), {**given, **options}

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r, N, (B, T) = case.request, len(case.lengths), self._rows(case)
        tensors: dict[str, Tensor | None] = {n: maker.input(n, *shape) for n, shape in self.shapes(case).items()}
        decays = (B, T, r.heads, *((r.head_dim,) if r.method == "kda" else ()))
        gate = -maker.uniform(*decays)
        # Now and then every second head, or channel of KDA, forgets everything.
        gate[:, 3::7, ..., ::2] = -math.inf
        tensors["gate"] = gate.to(maker.dtype).to(maker.device)
        # beta |k|^2 stays small, as with the keys of length one that models have: else the state grows without a bound.
        tensors["beta"] = (maker.uniform(B, T, r.heads) / r.head_dim).to(maker.dtype).to(maker.device)
        state, more = maker.normal(*self._state(case)).to(DTYPES[self._dtype(r)]).to(maker.device), {}
        if N > B:
            lengths = torch.tensor([0, *(length for length, _ in case.lengths)])
            more["cu_seqlens"] = lengths.cumsum(0).to(torch.int32).to(maker.device)
        if r.tree:
            earlier = [[-1, *(int(maker.uniform(1) * node) for node in range(1, T))] for _ in range(B)]
            more["parents"] = torch.tensor(earlier, device=maker.device)
        if r.state_slots:
            # The first sequence has the first slot, the last of several none. Others lie anywhere.
            slots = [0, *(1 + slot for slot in maker.permutation(N))][: max(N - 1, 1)]
            more |= {"state": state, "state_slots": maker.integers(*slots, *[-1] * (N - len(slots)))}
        else:
            tensors["state"] = state
        if not r.raw_gates:
            return tensors, more
        # Raw gates are any numbers, and betas as small as those above.
        tensors["gate"] = maker.normal(*decays).to(maker.dtype).to(maker.device)
        raw = maker.normal(B, T, r.heads) - math.log(r.head_dim)
        tensors["beta"] = raw.to(maker.dtype).to(maker.device)
        tensors["a_log"] = maker.uniform(r.heads).to(maker.device)
        # A parameter of the model: in its dtype.
        tensors["dt_bias"] = maker.normal(*decays[2:]).to(maker.dtype).to(maker.device)
        return tensors, {**more, "gate_bound": _BOUND} if r.raw_gates == "bounded" else more

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        r, size = case.request, self._rows(case)
        rows = (*size, r.kv_heads, r.head_dim)
        return {"query": rows, "key": rows, "value": (*size, r.heads, r.dims[1])}

    def _rows(self, case: Case) -> tuple[int, int]:
        """[B, S]: sequences of several lengths are behind each other."""
        packed = len(set(case.lengths)) > 1
        return (1, sum(length for length, _ in case.lengths)) if packed else (len(case.lengths), case.longest[0])

    def out_shape(self, case: Case) -> tuple[int, ...]:
        return self.shapes(case)["value"]

    def second_form(self, case: Case) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
        form = self._state(case)
        if case.request.state_out == "every":
            form = (len(case.lengths), case.longest[0], *form[1:])
        return form, (DTYPES[self._dtype(case.request)],)

    def lent(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**extra, "state": extra["state"].clone()} if "state" in extra else extra

    def misused(self, case: Case, extra: Mapping[str, Any], lent: Mapping[str, Any], second: Tensor | None) -> str:
        if "state" not in extra or second is None:
            return ""
        if case.request.state_out == "every":
            return "" if torch.equal(lent["state"], extra["state"]) else "the pool was written for drafts"
        return "" if second.data_ptr() == lent["state"].data_ptr() else "what came back is not the pool that was given"

    def _state(self, case: Case) -> tuple[int, ...]:
        """The shape of the states that are given: of a pool there are two more than sequences."""
        r = case.request
        rows = (r.head_dim, r.dims[1])
        count = len(case.lengths) + (2 if r.state_slots else 0)
        return (count, r.heads, *(rows[::-1] if r.state_layout == "VK" else rows))

    def _dtype(self, request: AttentionRequest) -> str:
        return "float64" if request.dtype == "float64" else "float32"

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        given = {**extra, **tensors}
        yield tuple(given.get(name) for name in (*_NAMES, "state_slots", "parents", "cu_seqlens"))

    def join(self, case: Case, outs: Sequence[Tensor], seconds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return outs[0], seconds[0]

    def first(self, call: Call) -> tuple[Call, int]:
        case = dataclasses.replace(call.case, lengths=call.case.lengths[:1])
        whole = ("a_log", "dt_bias", "state", "gate_bound")
        extra = {name: given if name in whole else given[:1] for name, given in call.extra.items()}
        tensors = {n: t if n in whole and n != "state" else t[:1] for n, t in call.tensors.items()}
        if "state" in extra:  # a pool, of which the sequence has the first slot
            extra["state"] = extra["state"][:3]
        return Call(case, tensors, extra), 1
