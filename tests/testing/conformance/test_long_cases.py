"""Cases of several tiles, of logits far from 0, and of more heads than a grid has: there, for every option that kernels
treat by tiles, and a kernel that is wrong in one of them is caught."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.backends.reference_backend import Reference
from polyattn.contract import AttentionRequest, Window, row
from polyattn.registry.evidence import KEYS
from polyattn.semantics import reference
from polyattn.testing import Case, Installed, Outcome, generate, plain, plan, run_case
from polyattn.testing.cases import FAR
from polyattn.testing.families import FAMILIES
from polyattn.testing.generation import TILES
from polyattn.testing.long_cases import GRID, LongCases
from polyattn.testing.planted import BUGS, planted
from polyattn.testing.problems import build
from polyattn.testing.report import Report
from polyattn.testing.tiled import FAULTS, in_tiles
from polyattn.testing.tolerances import measure

CPU = torch.device("cpu")
FAMILIES_OF_REFERENCE = ("dense", "varlen", "paged", "mla")
USUAL = AttentionRequest(dtype="float32", head_dim=64, v_head_dim=64, heads=2, kv_heads=2)


def planned(backend: str = "reference", **which: Any) -> list[Case]:
    return [case for case in plan(Installed(backend), **{"dtypes": ["float32"], **which}) if case.lengths]


def tiled(cases: list[Case], family: str) -> list[Case]:
    """Those over more than one tile of 128 keys."""
    return [case for case in cases if case.request.family == family and case.longest[1] > 128 and not case.far]


# --- which cases


@pytest.mark.parametrize("family", FAMILIES_OF_REFERENCE)
def test_lengths_of_a_full_run(family: str) -> None:
    cases = [case for case in planned(level="full", families=[family]) if case.check == "values"]
    wanted = {128, 129, 257, 513, 1100}
    assert wanted <= {k for case in cases for _, k in case.lengths}
    assert {128, 129, 257, 513, 1100} <= {q for case in cases for q, _ in case.lengths}
    assert max(case.longest[1] for case in cases) == KEYS["hardware"], "what evidence is measured by"


@pytest.mark.parametrize("family", FAMILIES_OF_REFERENCE)
def test_each_option_meets_several_tiles_in_a_quick_run(family: str) -> None:
    cases = tiled(planned(families=[family]), family)
    assert max(case.longest[1] for case in cases) == 1100
    served = {name: {getattr(case.request, name) for case in cases} for name in ("causal", "mask", "lse", "softcap")}
    assert served["causal"] == {"none", "bottom_right", "top_left"}
    assert served["mask"] == {"none", "bool", "additive"}
    assert served["lse"] == {False, True}
    assert {case.request.group for case in cases} == {1, 4, 8}
    windows = {case.request.window for case in cases}
    assert {(300, -1), (394, 0), (127, -1), (128, 128), (63, 0)} <= windows
    assert {case.request.chunk for case in cases} == {0, 200, 128}
    assert {case.logits for case in cases} == {"late", "usual"}
    assert len({case.request.head_dim for case in cases}) >= 4
    if family != "mla":
        assert {bool(cap) for cap in served["softcap"]} == {False, True}
        assert {case.request.sinks for case in cases} == {False, True}
    if family in ("dense", "varlen"):
        trained = [case for case in cases if case.longest[1] > 256 and case.request.grad]
        assert {"query", "key", "value", "mask", "sinks"} <= {name for case in trained for name in case.request.grad}


def test_windows_and_chunks_leave_something_to_be_hidden() -> None:
    for family in FAMILIES_OF_REFERENCE:
        for case in planned(level="full", families=[family]):
            reach = max(case.request.window[0], case.request.chunk)
            if case.logits != "usual" and not case.far and reach > 0:
                assert reach + 64 <= case.longest[1], case.id


def test_pairs_of_options_meet_over_several_tiles_in_a_full_run() -> None:
    cases = tiled(planned(level="full", families=["dense"]), "dense")
    taken: dict[str, Callable[[AttentionRequest], bool]] = {
        "causal": lambda r: r.causal != "none",
        "window": lambda r: r.window[0] >= 0,
        "both sides": lambda r: min(r.window) >= 0,
        "softcap": lambda r: r.softcap > 0,
        "sinks": lambda r: r.sinks,
        "bool": lambda r: r.mask == "bool",
        "additive": lambda r: r.mask == "additive",
        "group": lambda r: r.group > 1,
        "lse": lambda r: r.lse,
        "gradients": lambda r: "value" in r.grad,
        "chunk": lambda r: r.chunk > 0,
    }
    apart = {("bool", "additive"), ("window", "chunk"), ("both sides", "chunk")}
    for one, other in set(itertools.combinations(taken, 2)) - apart:
        assert any(taken[one](case.request) and taken[other](case.request) for case in cases), (one, other)


def test_a_row_that_takes_little_has_long_cases_of_what_it_takes() -> None:
    only = row(family="dense", dtype="float32", head_dim=64, causal="bottom_right", window=Window(right=False))
    cases = generate([only], {"platform": "cpu"}, families=["dense"], dtypes=["float32"], per_row=5, tiles=9)
    long = tiled(cases, "dense")
    assert {case.request.causal for case in long} == {"bottom_right"}
    assert {(300, -1), (127, -1)} <= {case.request.window for case in long}
    assert {case.request.s_relation for case in long} == {"equal"}
    assert 1100 in {case.longest[1] for case in long}


@pytest.mark.parametrize("level", ["quick", "full"])
def test_an_interpreter_has_one_case_of_257_keys_a_family(level: Any) -> None:
    pytest.importorskip("triton", reason="not run: the Triton package is not installed")
    cases = [case for case in plan(Installed("triton"), level=level) if case.check == "values"]
    longer = [case for case in cases if case.longest[1] > 100 and case.request.family != "block_sparse"]
    assert sorted(case.request.family for case in longer) == ["dense", "mla", "paged", "varlen"]
    assert {case.longest[1] for case in longer} == {KEYS["interpreter"]}
    assert max(len(case.lengths) * case.request.heads for case in cases) < 1000
    # Linear attention has no softmax, which logits far from 0 could overflow.
    assert sum(bool(case.far) for case in cases) == len({case.request.family for case in cases} - {"linear"})


def test_a_full_run_is_not_much_longer() -> None:
    for backend in ("torch_sdpa", "reference", "flex_attention"):
        cases = plan(Installed(backend), level="full", dtypes=["bfloat16"])
        added = [c for c in cases if c.far or c.logits != "usual" or len(c.lengths) * c.request.heads > GRID]
        assert len(added) < 0.35 * (len(cases) - len(added)), backend


# --- what they catch


@pytest.mark.parametrize("bug", [name for name, bug in BUGS.items() if bug.tile])
def test_a_bug_beyond_the_first_tile_does_not_show_in_it(bug: str) -> None:
    """The kit's usual lengths, 100 keys at most, see nothing of it: that is what longer ones are for."""
    tile = BUGS[bug].tile
    with planted(bug) as backend:
        target = Installed(backend)
        cases = plan(target, dtypes=["float32"], families=["dense"])
        short = [case for case in cases if case.check == "values" and 0 < case.longest[1] <= tile][::8]
        assert len(short) > 8
        assert all(run_case(target, case).verdict == "passed" for case in short)


def test_every_fault_is_planted_in_tiles_of_both_widths() -> None:
    assert {name for name, bug in BUGS.items() if bug.tile} == {f"{f}_{tile}" for f in FAULTS for tile in (128, 256)}


def test_reading_in_tiles_is_right_without_a_fault() -> None:
    case = Case(request=dataclasses.replace(USUAL, lse=True, window=(100, 5)), lengths=((300, 300),))
    t = build(case, CPU).tensors
    given = (t["query"], t["key"], t["value"])
    right = reference.attention(*given, window=(100, 5))
    with in_tiles(128, ""):
        assert torch.equal(reference.attention(*given, window=(100, 5)), right)
    for fault in FAULTS:
        with in_tiles(128, fault):
            wrong = reference.attention(*given, window=(100, 5))
        assert torch.equal(wrong, right) == (fault == "lost_dv"), "its output is right"


@pytest.mark.parametrize("logits", ["usual", "late"])
@pytest.mark.parametrize("keys", [257, 600, 1100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_both_gates_reject_a_lost_block_of_64_keys_at_these_lengths(dtype: str, keys: int, logits: str) -> None:
    """The first, which weighs least where logits grow, the last, and one between them."""
    request = dataclasses.replace(USUAL, dtype=dtype, layout="BHSD")
    problem = build(Case(request=request, lengths=((64, keys),), logits=logits), CPU)
    right, simple = plain.in_float64(problem), plain.plainly(problem)
    inputs = [problem.tensors[name].double() for name in ("query", "key", "value")]
    for start in (0, keys // 128 * 64, keys - 64):
        kept = torch.ones(1, 1, 64, keys, dtype=torch.bool)
        kept[..., start : start + 64] = False
        lost, _ = plain.reference_attention(*inputs, kept, None, request)
        found = measure(lost.to(problem.dtype), right.out, simple.out, problem.dtype)
        assert found.worst > found.worst_allowed
        assert found.relative > found.relative_allowed


# --- logits far from 0


@pytest.mark.parametrize("family", FAMILIES_OF_REFERENCE)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_logits_far_from_0_are_tried(level: Any, family: str) -> None:
    cases = [case for case in planned(level=level, families=[family]) if case.far]
    tried = {(case.logits, case.request.mask, case.longest[1]) for case in cases}
    assert {("low", "none", 128), ("low", "none", 192), ("low", "bool", 192), ("low", "additive", 320)} <= tried
    assert any(logits == "high" for logits, _, _ in tried)
    assert {case.longest[1] for case in cases} >= {128, 192, 256, 320}
    if level == "full":
        assert tried >= {("low", m, k) for m in ("none", "bool", "additive") for k in (128, 192, 256, 320)}
    grads = {bool(case.request.grad) for case in cases}
    assert grads == ({True, False} if family in ("dense", "varlen") else {False})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES_OF_REFERENCE)
def test_such_rows_have_lses_beyond_what_exp_takes(family: str, dtype: str) -> None:
    for case in planned(dtypes=[dtype], families=[family]):
        if case.far:
            lse = plain.in_float64(build(case, CPU)).lse
            sign = -1 if case.logits == "low" else 1
            assert bool((sign * lse > 88.8).all()), (case.id, lse.min(), lse.max())
            assert bool((lse.abs() < FAR + 20).all())


class Dense:
    """The dense reference on a CPU, bent."""

    name, device, accuracy = "bent", CPU, None

    def __init__(self, bend: Callable[[Case, Mapping[str, Tensor], Any], Any]) -> None:
        self.bend = bend

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        given = {("attn_mask" if name == "mask" else name): t for name, t in tensors.items()}
        inputs = [given.pop(name) for name in ("query", "key", "value")]
        return self.bend(case, tensors, Reference().bind(case.request.normalised()).forward(*inputs, **given))


class _NaNBehindATile(torch.autograd.Function):
    """Zeros behind the last key weigh exp(0 - lse), infinite where an LSE is below -88.7; times 0 it is NaN."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor) -> Tensor:
        ctx.save_for_backward(lse)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (lse,) = ctx.saved_tensors
        padding = 0.0 * torch.exp(-lse.float()).nan_to_num(0.0, posinf=math.inf)
        return grads[0] + padding[..., None].to(grads[0].dtype), None


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_backward_that_is_nan_where_keys_end_within_a_tile_is_caught(level: Any, mask: str) -> None:
    def nan(case: Case, tensors: Mapping[str, Tensor], result: Any) -> Any:
        if case.longest[1] % 128 != 64 or not case.request.lse:
            return result
        return _NaNBehindATile.apply(*result), result[1]

    caught = []
    for case in planned(dtypes=["bfloat16"], families=["dense"], level=level):
        if case.far and case.request.mask == mask and case.request.grad:
            caught += [str(finding) for finding in run_case(Dense(nan), case).findings]
    assert any("grad query: " in finding and "not finite" in finding for finding in caught)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gradient_that_is_off_there_is_caught_in_half_precision_too(dtype: str) -> None:
    """Plain torch's logits, rounded to half a nat, would allow anything."""

    def off(case: Case, tensors: Mapping[str, Tensor], result: Any) -> Any:
        tensors["value"].register_hook(lambda grad: 1.05 * grad)
        return result

    request = dataclasses.replace(USUAL, dtype=dtype, grad=("query", "key", "value"), s_relation="equal")
    case = Case(request=request, lengths=((192, 192),), logits="low")
    assert run_case(Dense(lambda case, tensors, result: result), case).verdict == "passed"
    findings = run_case(Dense(off), case).findings
    assert [finding.check for finding in findings] == ["grad value"]


# --- more heads than a grid has


def test_of_each_row_a_grid_is_tried_that_is_wider_than_65535() -> None:
    for family in FAMILIES_OF_REFERENCE:
        found = [c for c in planned(families=[family]) if len(c.lengths) * c.request.heads > GRID]
        assert found
        assert all(max(case.longest) <= 3 for case in found)
        if family in ("dense", "varlen"):
            assert {bool(case.request.grad) for case in found} == {False, True}


def test_blocks_beyond_the_grid_that_nobody_writes_are_caught() -> None:
    def truncated(case: Case, tensors: Mapping[str, Tensor], result: Any) -> Any:
        out = result[0] if case.request.lse else result
        kept = torch.arange(out.shape[0] * case.request.heads).reshape(out.shape[0], -1) < GRID
        axis = (slice(None), None) if case.request.layout == "BSHD" else (slice(None), slice(None), None)
        bent = out * kept[axis][..., None]
        return (bent, result[1]) if case.request.lse else bent

    outcomes: list[Outcome] = [
        run_case(Dense(truncated), case)
        for case in planned(families=["dense"])
        if len(case.lengths) * case.request.heads > GRID and not case.request.grad
    ]
    assert outcomes
    assert all("out" in {finding.check for finding in outcome.findings} for outcome in outcomes)


def test_many_sequences_are_counted_in_an_id() -> None:
    case = Case(request=dataclasses.replace(USUAL, family="varlen"), lengths=((2, 2),) * 1025)
    assert case.id == "varlen-float32-S1025of2x2-H2x2-D64x64"
    few = dataclasses.replace(case, lengths=((1, 5),) * 5)
    assert few.id == "varlen-float32-S1x5_1x5_1x5_1x5_1x5-H2x2-D64x64"


# --- in memory that is bounded


@pytest.mark.parametrize(
    "options", [{}, {"causal": "top_left"}, {"window": (40, 3), "sinks": True}, {"mask": "additive"}]
)
def test_a_few_queries_at_a_time_give_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    grad = ("query", "key", "value", *(name for name in ("mask", "sinks") if name in options), "lse")
    request = dataclasses.replace(USUAL, dtype="float64", lse=True, grad=grad, s_relation="fewer", **options)
    problem = build(Case(request=request, lengths=((37, 150),) * 2), CPU)
    whole = [plain.in_float64(problem), plain.plainly(problem)]
    terms = plain.cancelling(problem)
    monkeypatch.setattr(plain, "SCORES", 4 * 150 * 5)
    rows: list[int] = []
    computed = reference.attention
    monkeypatch.setattr(
        reference, "attention", lambda q, *more, **o: rows.append(q.shape[2]) or computed(q, *more, **o)
    )
    for before, after in zip(whole, [plain.in_float64(problem), plain.plainly(problem)], strict=True):
        torch.testing.assert_close(after.out, before.out)
        torch.testing.assert_close(after.lse, before.lse)
        torch.testing.assert_close(after.grads, before.grads)
    torch.testing.assert_close(plain.cancelling(problem), terms)
    assert max(rows) == 5


# --- what a report keeps


def test_a_report_keeps_up_to_which_lengths_calls_passed() -> None:
    def blank() -> Report:
        return Report("acme", "cpu", "here", "full", (), (), {}, "2026-11-27", "", total=4)

    one, other = blank(), blank()
    dense = Case(request=USUAL, lengths=((5, 1100),) * 3)
    one.add(Outcome(dense, "passed"))
    one.add(Outcome(dataclasses.replace(dense, lengths=((9, 5000),)), "refused"))
    other.add(Outcome(dataclasses.replace(dense, lengths=((700, 64),)), "passed"))
    other.add(Outcome(Case(request=dataclasses.replace(USUAL, family="mla"), lengths=((1, 257),)), "passed"))
    one.absorb(other)
    reached = {"dense": {"queries": 700, "keys": 1100, "grid": 6}, "mla": {"queries": 1, "keys": 257, "grid": 2}}
    assert one.reached == reached
    assert Report.from_dict(one.to_dict()).reached == reached
    assert "up to: 700 queries, 1,100 keys, 6 sequences x heads (dense)" in one.remarks()


def test_long_cases_need_lengths_of_their_family() -> None:
    """What a family from outside does not say is not tried."""
    assert all(FAMILIES[name].long for name in (*FAMILIES_OF_REFERENCE, "block_sparse"))
    maker = LongCases(
        Installed("reference").rows[0], "seed", {"platform": "cpu", "family": "dense", "dtype": "float32"}
    )
    assert maker.possible
    assert len(maker.cases(TILES["full"])) == TILES["full"]
