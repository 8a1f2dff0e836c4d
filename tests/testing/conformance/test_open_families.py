"""A family that the kit does not know is added from outside by one entry: `block_sparse` and `linear`, with toys.

Nothing of the kit is changed but `FAMILIES`; rows, cases, gates, refusals and reports then work on the family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, OneOf, Range, Row, row
from polyattn.semantics import reference
from polyattn.testing import FAMILIES, Case, Family, generate, run_case
from polyattn.testing.families import DTYPES, Part
from polyattn.testing.generation import left_out

BLOCK = 16
HERE = {"platform": "cpu"}


class BlockSparse(Family):
    """Each block of queries sees the key blocks of its list: softmax attention under a mask."""

    lengths: ClassVar[Any] = {
        "equal": (((64, 64),), ((48, 48),)),
        "fewer": (((16, 64),),),
        "more": (((64, 16),),),
        "one": (((1, 16),),),
    }
    batched = True
    layouts = ("BHSD",)
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {"alibi": (True,)}

    def axes(self, axes: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        return {**super().axes(axes), "block_map": (True,)}

    def make(self, case: Case, maker: Any) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r, B, (s_q, s_k) = case.request, len(case.lengths), case.longest
        shape = (B, r.heads, -(-s_q // BLOCK), s_k // BLOCK)
        order = maker.uniform(*shape).argsort(-1).to(torch.int32)
        counts = (maker.uniform(*shape[:3]) * (shape[3] + 1)).to(torch.int32)
        tensors: dict[str, Tensor | None] = {n: maker.input(n, *shape) for n, shape in self.shapes(case).items()}
        extra: dict[str, Any] = {"block_counts": counts.to(maker.device), "block_indices": order.to(maker.device)}
        if r.block_sizes:
            sizes = BLOCK - (maker.uniform(s_k // BLOCK) * 4).to(torch.int32)
            extra["block_valid"] = sizes.to(maker.device)
        return tensors, extra

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        r, B, (s_q, s_k) = case.request, len(case.lengths), case.longest
        widths = {"query": (r.heads, s_q, r.head_dim), "key": (r.kv_heads, s_k, r.head_dim)}
        return {n: (B, *shape) for n, shape in {**widths, "value": (r.kv_heads, s_k, r.dims[1])}.items()}

    def out_shape(self, case: Case) -> tuple[int, ...]:
        r = case.request
        return (len(case.lengths), r.heads, case.longest[0], r.dims[1])

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        yield tensors["query"], tensors["key"], tensors["value"], seen(case, extra)

    def join(self, case: Case, outs: Sequence[Tensor], seconds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return outs[0], seconds[0]


def seen(case: Case, extra: Mapping[str, Any]) -> Tensor:
    """[B, H, S_q, S_k]: which keys each query sees."""
    (s_q, s_k), counts, order = case.longest, extra["block_counts"], extra["block_indices"]
    chosen = torch.arange(order.shape[-1]) < counts[..., None]
    blocks = torch.zeros_like(chosen).scatter(-1, order.long(), chosen)
    keys = blocks.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., :s_q, :s_k]
    if "block_valid" in extra:
        keys = keys & (torch.arange(s_k) % BLOCK < extra["block_valid"].repeat_interleave(BLOCK))
    return keys


def recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    sinks: None,
    request: AttentionRequest,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule (arXiv 2412.06464, equation 10) token by token: [B, T, H, D] -> (out, state [B, H, D, D_v])."""
    outs = []
    for t in range(query.shape[1]):
        state = state * gate[:, t, :, None, None].exp()
        k, v = key[:, t], value[:, t]
        missing = v - torch.einsum("bhdv,bhd->bhv", state, k)
        state = state + torch.einsum("bhd,bhv->bhdv", k, beta[:, t, :, None] * missing)
        outs.append(torch.einsum("bhdv,bhd->bhv", state, query[:, t]) * request.head_dim**-0.5)
    return torch.stack(outs, 1), state


class Linear(Family):
    """A gated delta rule: other mathematics than softmax, and a state beside the output."""

    lengths: ClassVar[Any] = dict.fromkeys(("equal", "one", "fewer", "more"), (((17, 17),), ((5, 5),)))
    batched = True
    layouts = ("BSHD",)
    second = "state"
    exact = staticmethod(recurrence)
    plain = staticmethod(recurrence)
    terms = None

    def make(self, case: Case, maker: Any) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r, B, (T, _) = case.request, len(case.lengths), case.longest
        tensors: dict[str, Tensor | None] = {n: maker.input(n, *shape) for n, shape in self.shapes(case).items()}
        unit = torch.nn.functional.normalize(maker.normal(B, T, r.heads, r.head_dim), dim=-1)
        tensors["key"] = unit.to(maker.dtype).to(maker.device)
        tensors["gate"] = -maker.uniform(B, T, r.heads).to(maker.dtype).to(maker.device)
        tensors["beta"] = maker.uniform(B, T, r.heads).to(maker.dtype).to(maker.device)
        tensors["state"] = maker.normal(B, r.heads, r.head_dim, r.dims[1]).to(maker.device)
        return tensors, {}

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        r, B, (T, _) = case.request, len(case.lengths), case.longest
        wide = (B, T, r.heads, r.head_dim)
        return {"query": wide, "key": wide, "value": (B, T, r.heads, r.dims[1])}

    def out_shape(self, case: Case) -> tuple[int, ...]:
        return self.shapes(case)["value"]

    def second_form(self, case: Case) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
        r = case.request
        return (len(case.lengths), r.heads, r.head_dim, r.dims[1]), (DTYPES[r.state_dtype or "float32"],)

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        yield tuple(tensors[name] for name in ("query", "key", "value", "gate", "beta", "state"))

    def join(self, case: Case, outs: Sequence[Tensor], seconds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return outs[0], seconds[0]


class Toy:
    """A backend of one of these families: right, but for what a test bends."""

    name, device = "toy", torch.device("cpu")

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        raw = self.sparse(case, tensors, extra) if case.request.family == "block_sparse" else self.linear(case, tensors)
        if out is None:
            return raw
        return (out.copy_(raw[0]), raw[1]) if isinstance(raw, tuple) else out.copy_(raw)

    def sparse(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Any:
        inputs = (tensors["query"], tensors["key"], tensors["value"])
        r = case.request
        return reference.attention(*inputs, attn_mask=seen(case, extra), layout="BHSD", scale=r.scale, return_lse=r.lse)

    def linear(self, case: Case, tensors: Mapping[str, Tensor]) -> Any:
        names = ("query", "key", "value", "gate", "beta", "state")
        wide = [tensors[name].double() for name in names]
        out, state = recurrence(*wide, sinks=None, request=case.request)
        return out.to(tensors["query"].dtype), state.float()


SPARSE = row(
    family="block_sparse",
    dtype=("float32", "bfloat16"),
    head_dim=Range(16, 128),
    v_head_dim=Range(1),
    group=True,
    method="vsa",
    block_map=True,
    block_sizes=True,
    scale=True,
    lse=True,
    grad=("query", "key", "value", "lse"),
    s_relation=("equal", "fewer"),
    misaligned=True,
)
LINEAR = row(
    family="linear",
    dtype=("float32", "bfloat16"),
    head_dim=Range(16, 64),
    v_head_dim=Range(1),
    method="gdn",
    state_layout="KV",
    misaligned=True,
    grad=("query", "value"),
)


def made(one: Row) -> list[Case]:
    (family,) = one.when["family"].values  # type: ignore[attr-defined]
    return generate([one], HERE, families=[family], dtypes=["float32", "bfloat16"], per_row=20)


@pytest.fixture(autouse=True)
def _both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "block_sparse", BlockSparse())
    monkeypatch.setitem(FAMILIES, "linear", Linear())


@pytest.mark.parametrize("one", [SPARSE, LINEAR], ids=["block_sparse", "linear"])
def test_a_family_from_outside_is_generated_and_computed(one: Row) -> None:
    cases = made(one)
    assert len(cases) >= 40
    assert any(case.request.grad for case in cases)
    assert {case.storage for case in cases} >= {"contiguous", "gapped", "misaligned"}
    for case in cases:
        assert run_case(Toy(), case).verdict == "passed", str(run_case(Toy(), case))


def test_faults_in_it_are_found() -> None:
    class NextBlock(Toy):
        def sparse(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Any:
            return super().sparse(case, tensors, {**extra, "block_indices": extra["block_indices"].roll(1, -1)})

    class NoDecay(Toy):
        def linear(self, case: Case, tensors: Mapping[str, Tensor]) -> Any:
            return super().linear(case, {**tensors, "gate": tensors["gate"] * 0})

    class HalfState(Toy):
        def linear(self, case: Case, tensors: Mapping[str, Tensor]) -> Any:
            out, state = super().linear(case, tensors)
            return out, state.half()

    class StateTransposed(Toy):
        def linear(self, case: Case, tensors: Mapping[str, Tensor]) -> Any:
            out, state = super().linear(case, tensors)
            return out, state * 1.02

    assert "out" in checks(NextBlock(), SPARSE)
    assert "out" in checks(NoDecay(), LINEAR)
    assert checks(HalfState(), LINEAR) == {"state"}
    assert checks(StateTransposed(), LINEAR) == {"state"}


def checks(target: Toy, one: Row) -> set[str]:
    return {finding.check for case in made(one) for finding in run_case(target, case).findings}


def test_without_an_entry_a_family_is_judged_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_out([SPARSE], HERE, ["block_sparse"]) == []
    monkeypatch.delitem(FAMILIES, "block_sparse")
    said = ["family block_sparse: the kit judges it and does not compute it"]
    assert left_out([SPARSE], HERE, ["block_sparse"]) == said
    assert left_out([SPARSE], HERE, ["dense"]) == []


def test_what_a_family_has_no_tensors_for_is_said() -> None:
    one = row(family="paged", dtype="float32", head_dim=64, page_size=16, kv_layout=("NZ", "HND"), large=True)
    assert left_out([one], HERE, ["paged"]) == [
        "large: a tensor of 2**31 elements does not fit a test",
        "paged with kv_layout=NZ: the kit makes no such tensors",
    ]
    cases = generate([one], HERE, families=["paged"], dtypes=["float32"], per_row=5)
    assert {case.request.kv_layout for case in cases} == {"HND"}
    only = dataclasses.replace(one, allows={**one.allows, "kv_layout": OneOf(("NZ",))})
    assert generate([only], HERE, families=["paged"], dtypes=["float32"], per_row=5) == []


@pytest.mark.parametrize("check", ["decode", "split", "pages"])
def test_a_check_that_a_family_is_not_made_for_is_a_finding(check: Any) -> None:
    case = dataclasses.replace(made(SPARSE)[0], check=check)
    (finding,) = run_case(Toy(), case).findings
    assert "BlockSparse has no `" in str(finding)
    assert f"which the check '{check}' needs" in str(finding)


def test_a_family_without_a_public_call_says_so() -> None:
    from polyattn.testing.families import Call

    case = made(SPARSE)[0]
    assert not FAMILIES["block_sparse"].sayable(case)
    with pytest.raises(NotImplementedError, match="BlockSparse has no public call: override `says` and `public`"):
        FAMILIES["block_sparse"].public(Call(case, {}, {}))
