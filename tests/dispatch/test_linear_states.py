"""`linear_attention` for models and engines: raw gates, states in slots of a pool, and the states of draft tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.semantics.linear_gates import computed_gates
from polyattn.semantics.states import RequestStates

B, S, H, H_V, D, D_V = 3, 6, 2, 4, 6, 5
METHODS = ("gdn", "kda")
F64 = torch.float64


@pytest.fixture(autouse=True, params=["", "reference"])
def serving(request: Any) -> Iterator[str]:
    with polyattn.use_backend(request.param or None):
        yield request.param


def inputs(method: str, B: int = B, S: int = S) -> dict[str, Any]:
    torch.manual_seed(7)
    return {
        "query": torch.randn(B, S, H, D, dtype=F64),
        "key": torch.nn.functional.normalize(torch.randn(B, S, H, D, dtype=F64), dim=-1),
        "value": torch.randn(B, S, H_V, D_V, dtype=F64),
        "gate": -torch.rand((B, S, H_V, D) if method == "kda" else (B, S, H_V), dtype=F64),
        "beta": torch.rand(B, S, H_V, dtype=F64),
        "method": method,
    }


def part(given: dict[str, Any], rows: Any, tokens: Any = slice(None)) -> dict[str, Any]:
    return {name: one[rows][:, tokens] if isinstance(one, Tensor) else one for name, one in given.items()}


def raw(method: str) -> dict[str, Any]:
    widths = (H_V, D) if method == "kda" else (H_V,)
    return {"a_log": torch.rand(H_V, dtype=F64), "dt_bias": torch.randn(widths, dtype=F64)}


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("options", [{}, {"gate_bound": -5.0, "beta_range": 2}], ids=["softplus", "bounded"])
@pytest.mark.parametrize("method", METHODS)
def test_raw_gates_are_computed_in_the_call(method: str, options: dict[str, Any]) -> None:
    given = {**inputs(method), **raw(method)}
    given["gate"] = torch.randn_like(given["gate"])
    names = ("gate", "beta", "a_log", "dt_bias")
    gate, beta = computed_gates(*(given[name] for name in names), **options)
    right = polyattn.linear_attention(**{**inputs(method), "gate": gate, "beta": beta})
    torch.testing.assert_close(polyattn.linear_attention(**given, **options), right)
    leaves = [given[name].requires_grad_() for name in (*names, "query")]

    @torch.compile(backend="eager", fullgraph=True)
    def compiled() -> Tensor:
        return polyattn.linear_attention(**given, **options, qk_norm=True)[0].sin().sum()

    eager = torch.autograd.grad(polyattn.linear_attention(**given, **options, qk_norm=True)[0].sin().sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled(), leaves), eager)
    assert all(grad.abs().max() > 0 for grad in eager)


def test_softplus_is_the_logarithm_it_is_for_any_number() -> None:
    raw = torch.tensor([[[-40.0, -1.0, 0.0, 30.0, 500.0]]], dtype=F64)
    gate, beta = computed_gates(raw, raw, torch.zeros(5, dtype=F64))
    assert (gate[0, 0, 3:] == -raw[0, 0, 3:]).all()
    torch.testing.assert_close(gate[0, 0, :3], -torch.log1p(raw[0, 0, :3].exp()))
    assert (beta[0, 0, 4], computed_gates(raw, raw, torch.zeros(5, dtype=F64), beta_range=2)[1][0, 0, 4]) == (1, 2)


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("tokens", [1, S])
@pytest.mark.parametrize("method", METHODS)
def test_a_pool_is_updated_in_its_slots_and_nowhere_else(method: str, tokens: int, layout: str) -> None:
    given = part(inputs(method), slice(None), slice(tokens))
    pool = torch.randn(5, H_V, *((D, D_V) if layout == "KV" else (D_V, D)), dtype=F64)
    slots, before = torch.tensor([3, -1, 0], dtype=torch.int32), pool.clone()
    out, found = polyattn.linear_attention(**given, state=pool, state_slots=slots, state_layout=layout)
    assert found is pool
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])
    assert (out[1] == 0).all()
    for row, slot in ((0, 3), (2, 0)):
        alone = part(given, slice(row, row + 1))
        right, last = polyattn.linear_attention(**alone, state=before[slot : slot + 1], state_layout=layout)
        torch.testing.assert_close(out[row : row + 1], right)
        torch.testing.assert_close(pool[slot : slot + 1], last)
    kept = pool.clone()
    polyattn.linear_attention(**given, state=pool, state_slots=torch.full((B,), -1), state_layout=layout)
    assert torch.equal(pool, kept), "no sequence has a slot"


def test_packed_sequences_have_slots() -> None:
    given = {n: t.reshape(1, B * S, *t.shape[2:]) if isinstance(t, Tensor) else t for n, t in inputs("gdn").items()}
    cu = torch.tensor([0, 1, 7, B * S], dtype=torch.int32)
    pool, slots = torch.randn(3, H_V, D, D_V, dtype=F64), torch.tensor([2, -1, 0])
    right, last = polyattn.linear_attention(**given, state=pool[[2, 0, 0]], cu_seqlens=cu)
    out, _ = polyattn.linear_attention(**given, state=pool, state_slots=slots, cu_seqlens=cu)
    assert (out[:, 1:7] == 0).all()
    torch.testing.assert_close(out[:, 7:], right[:, 7:])
    torch.testing.assert_close(out[:, :1], right[:, :1])
    torch.testing.assert_close(pool[[2, 0]], last[[0, 2]])


PARENTS = torch.tensor([[-1, 0, 0, 1, -1, 4], [-1, 0, 1, 2, 3, 4], [-1, -1, -1, 1, 2, 0]])


@pytest.mark.parametrize("method", METHODS)
def test_every_draft_of_a_tree_has_the_state_of_its_path(method: str) -> None:
    given, state = inputs(method), torch.randn(B, H_V, D, D_V, dtype=F64)
    kept = state.clone()
    out, states = polyattn.linear_attention(**given, state=state, every_state=True, parents=PARENTS)
    assert torch.equal(state, kept)
    for row in range(B):
        for node in range(S):
            path = [node]
            while PARENTS[row, path[0]] >= 0:
                path.insert(0, int(PARENTS[row, path[0]]))
            right, last = polyattn.linear_attention(**part(given, [row], path), state=state[row : row + 1])
            torch.testing.assert_close(out[row, node], right[0, -1])
            torch.testing.assert_close(states[row, node], last[0])


@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_a_chain_in_slots_is_committed_as_if_it_had_been_decoded(layout: str) -> None:
    given = inputs("gdn")
    pool = RequestStates({0: [polyattn.contract.Keep("state", "request", (H_V, D, D_V))]}, 4, drafts=S, dtype=F64)
    for slot in (0, 2, 3):
        pool.allocate(slot)
    states, slots = pool.tensor(0, "state"), torch.tensor([2, 0, -1])
    states[:3] = torch.randn(3, H_V, D, D_V, dtype=F64)
    seen, before = states.mT.contiguous() if layout == "VK" else states, states.clone()
    out, every = polyattn.linear_attention(
        **given, state=seen, state_slots=slots, every_state=True, state_layout=layout, qk_norm=True
    )
    assert torch.equal(states, before), "drafts are not in the pool until they are accepted"
    assert (out[2] == 0).all()
    pool.drafted(0, "state")[slots] = every.mT if layout == "VK" else every
    pool.commit(slots, torch.tensor([1, 4, 0]))
    for row, slot, accepted in ((0, 2, 2), (1, 0, 5)):
        replayed = part(given, slice(row, row + 1), slice(accepted))
        right, last = polyattn.linear_attention(**replayed, state=before[slot : slot + 1], qk_norm=True)
        torch.testing.assert_close(states[slot], last[0])
        torch.testing.assert_close(out[row, :accepted], right[0])


def test_explain_says_what_is_done_before_the_kernel(serving: str) -> None:
    given = {**inputs("gdn"), **raw("gdn")}
    pool, slots = torch.zeros(4, H_V, D, D_V, dtype=F64), torch.arange(B)
    said = polyattn.explain(
        polyattn.linear_attention, **given, qk_norm=True, state=pool, state_slots=slots, every_state=True
    )
    r = said.request
    assert (r.phase, r.raw_gates, r.qk_norm, r.state_slots, r.state_out) == ("verify", "softplus", True, True, "every")
    drafts = () if serving else ("draft_by_draft",)
    assert set(said.lowerings) == {"compute_gates", "gather_states", *drafts}


GDN = inputs("gdn")
POOL = torch.zeros(4, H_V, D, D_V, dtype=F64)
SLOTS = {"state": POOL, "state_slots": torch.arange(B)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gate": -GDN["gate"]}, r"gate has 0\.\d+; it is the logarithm of a decay, so that 0 is the most"),
        ({"dt_bias": torch.zeros(H_V)}, "dt_bias is given without a_log"),
        ({"gate_bound": -5.0}, "gate_bound is given without a_log"),
        ({"beta_range": 2}, "beta_range is given without a_log"),
        ({"beta_range": 3}, "beta_range=3; 1 or 2 is needed"),
        ({"gate_bound": 5.0}, r"gate_bound=5\.0; a number below 0 is needed"),
        ({"every_state": "all"}, "every_state='all' is a str; it must be True or False"),
        ({"a_log": torch.zeros(2)}, r"a_log has the shape \(2,\); needed is \(4,\)"),
        ({"a_log": torch.zeros(H_V), "dt_bias": torch.zeros(H_V, D)}, r"dt_bias has 2 dimensions"),
        ({"state_slots": torch.arange(B)}, "state_slots are given without state"),
        ({**SLOTS, "state_slots": torch.tensor([1, 2, 1])}, "state_slots has 1 twice; every sequence has a slot"),
        ({**SLOTS, "state_slots": torch.tensor([1, 4, -1])}, "state_slots has 4; the pool has slots 0 to 3, -1 = none"),
        ({**SLOTS, "state_slots": torch.arange(2)}, r"state_slots has the shape \(2,\); needed is \(3,\)"),
        ({**SLOTS, "state_slots": torch.zeros(B)}, r"state_slots is torch\.float32 on cpu; integers"),
        ({**SLOTS, "state": POOL.mT}, r"state has the shape .*\[slots, H_v, D, D_v\]"),
        ({"parents": PARENTS}, "parents are of draft tokens, whose states all come back: give every_state=True"),
        ({"parents": PARENTS[:2], "every_state": True}, r"parents has the shape \(2, 6\); needed is \(3, 6\)"),
        ({"parents": PARENTS.double(), "every_state": True}, r"parents is torch\.float64 on cpu; integers"),
        ({"parents": PARENTS.flip(1), "every_state": True}, "parents has a token that is no earlier one"),
    ],
)
def test_what_is_wrong_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        polyattn.linear_attention(**{**GDN, **change})


def test_a_pool_is_no_place_for_gradients_and_drafts_are_not_packed() -> None:
    for name in ("query", "key", "value", "gate", "beta", "a_log", "dt_bias", "state"):
        learned = {**GDN, **raw("gdn"), **SLOTS}
        trained = {**learned, name: learned[name].clone().requires_grad_()}
        with pytest.raises(InvalidInputError, match="state_slots cannot be used while gradients are wanted"):
            polyattn.linear_attention(**trained)
    with torch.no_grad():
        polyattn.linear_attention(**trained)
    packed, cu = part(GDN, slice(1)), torch.tensor([0, S], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=r"every_state with cu_seqlens: give draft tokens as \[N, drafts"):
        polyattn.linear_attention(**packed, cu_seqlens=cu, every_state=True)


def test_a_pool_has_memory_of_its_own() -> None:
    shared = torch.zeros(POOL.numel(), dtype=F64)
    value = shared[: GDN["value"].numel()].view(GDN["value"].shape)
    for pool, message in (
        (POOL[:1].expand(POOL.shape), r"state has strides \(0, .*, so that several places of it are one"),
        (shared.view(POOL.shape), "state shares memory with another input"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            polyattn.linear_attention(**{**GDN, "value": value}, **{**SLOTS, "state": pool})
        drafted = {**GDN, "value": value, **SLOTS, "state": pool, "every_state": True}
        assert polyattn.linear_attention(**drafted)[1].shape == (B, S, H_V, D, D_V)


@pytest.mark.parametrize("every", [False, True])
def test_no_sequences_leave_a_pool_as_it_is(every: bool) -> None:
    pool = POOL.clone()
    none = {**part(GDN, slice(0)), "state": pool, "state_slots": torch.arange(0), "every_state": every}
    with polyattn.use_backend("reference" if every else None):
        out, after = polyattn.linear_attention(**none)
    assert out.shape == (0, S, H_V, D_V)
    assert torch.equal(pool, POOL)
    assert after.shape == (0, S, H_V, D, D_V) if every else after is pool


def test_steps_of_serving_are_not_compiled() -> None:
    @torch.compile(backend="eager")
    def compiled(query: Tensor) -> Tensor:
        return polyattn.linear_attention(**{**GDN, "query": query}, every_state=True)[0]

    with pytest.raises(UnsupportedRequestError, match="is not compiled: it is a step of serving"):
        compiled(GDN["query"])
