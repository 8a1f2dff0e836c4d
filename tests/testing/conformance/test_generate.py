"""Cases come from capability rows: all that is declared, and what lies just outside it."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Hashable
from typing import Any

import pytest

from polyattn.contract import AttentionRequest, Range, Row, Window, request_fields, row
from polyattn.testing import Case, Installed, generate, plan, refusals
from polyattn.testing.covering import covering
from polyattn.testing.families import FAMILIES
from polyattn.testing.families.base import drawn_parts, spans
from polyattn.testing.values import CANDIDATES, CONTEXT, candidates, declared, inside

FACTS = {"platform": "cpu"}
SMALL = row(
    family="dense",
    dtype=("float32", "bfloat16"),
    head_dim=Range(16, 96, multiple_of=16),
    group=True,
    causal=("none", "bottom_right"),
    window=Window(right=False),
    lse=True,
    grad=("query", "key", "value", "lse"),
    s_relation=("equal", "fewer"),
)


def made(*rows: Row, per_row: int = 60) -> list[Case]:
    return generate(rows, FACTS, families=("dense", "varlen"), dtypes=("float32", "bfloat16"), per_row=per_row)


def refused(*rows: Row) -> list[Case]:
    return refusals(rows, FACTS, families=("dense", "varlen"), dtypes=("float32",))


def field(case: Case, name: str) -> Hashable:
    value: Hashable = getattr(case.request, name)
    return value


def test_every_judged_field_is_tried() -> None:
    """A field added to the request must be added to the kit: this is where that is noticed."""
    assert {f.name for f in request_fields()} | {"group"} == set(CANDIDATES) | CONTEXT
    assert not set(CANDIDATES) & CONTEXT


@pytest.mark.parametrize("name", [f.name for f in request_fields() if f.name in CANDIDATES])
def test_every_field_has_an_off_value_first_and_another(name: str) -> None:
    values = CANDIDATES[name]
    assert len(set(values)) > 1
    if name not in ("dtype", "head_dim"):
        assert values[0] == getattr(AttentionRequest(), name)


def test_bounds_of_ranges_are_tried_from_both_sides() -> None:
    tried = candidates("head_dim", [SMALL])
    assert {16, 32, 80, 96, 112, 17} <= set(tried)
    assert set(inside("head_dim", SMALL)) == {64, 16, 32, 80, 96}
    assert {field(c, "head_dim") for c in made(SMALL)} == {64, 16, 32, 80, 96}
    beyond = {field(c, "head_dim") for c in refused(SMALL)}
    assert {112, 17, 40, 1} <= beyond


def test_a_family_that_is_for_other_machines_is_refused_for_what_this_one_is() -> None:
    elsewhere = row(family="dense", dtype="float32", head_dim=64, when={"arch": ("sm100",)})
    cases = refusals([elsewhere], {**FACTS, "arch": "sm90"}, families=("dense", "varlen"), dtypes=("float32",))
    assert {field(case, "family"): case.fields for case in cases} == {
        "dense": (*FACTS, "arch"),
        "varlen": ("family",),
    }


def test_a_reason_may_name_the_one_field_that_keeps_another_row_from_it() -> None:
    """Of each row one value, taken together, are refused for either field."""
    usual: dict[str, Any] = {"family": "dense", "dtype": "float32", "head_dim": 64}
    both = {"s_relation": ("equal", "fewer"), "causal": ("bottom_right",)}, {"s_relation": "one", "causal": "none"}
    cases = refused(*(row(**usual, **limits) for limits in both))
    assert [c.fields for c in cases if (field(c, "s_relation"), field(c, "causal")) == ("fewer", "none")] == [
        ("s_relation", "causal", "window")
    ]


def test_values_of_sets_are_tried_from_both_sides() -> None:
    assert {field(c, "causal") for c in made(SMALL)} == {"none", "bottom_right"}
    assert {field(c, "dtype") for c in made(SMALL)} == {"float32", "bfloat16"}
    said = [c for c in refused(SMALL) if "causal" in c.fields and field(c, "s_relation") == "fewer"]
    assert {field(c, "causal") for c in said} == {"top_left"}


def test_off_and_on_of_what_is_declared() -> None:
    assert {field(c, "lse") for c in made(SMALL)} == {False, True}
    assert {bool(field(c, "grad")) for c in made(SMALL)} == {False, True}
    assert {c.request.window[0] >= 0 for c in made(SMALL)} == {False, True}


@pytest.mark.parametrize("name", ["softcap", "sinks", "mask", "alibi", "dropout", "deterministic", "cross", "method"])
def test_what_is_not_declared_is_refused_and_never_served(name: str) -> None:
    off = CANDIDATES[name][0]
    assert {field(c, name) for c in made(SMALL)} == {off}
    alone = [c for c in refused(SMALL) if c.fields == (name,)]
    assert {field(c, name) for c in alone} == set(CANDIDATES[name]) - {off}


def test_undeclared_families_are_refused() -> None:
    assert [c.fields for c in refused(SMALL) if field(c, "family") == "varlen"] == [("family",)]


def test_pairs_that_rows_take_apart_only_are_refused() -> None:
    common = {"family": "dense", "dtype": "float32", "head_dim": Range(1), "s_relation": ("equal", "fewer")}
    rows = (row(**common, softcap=Range(0.0)), row(**common, lse=True))
    together = [c for c in refused(*rows) if c.request.softcap and c.request.lse]
    assert together
    assert all(set(c.fields) == {"softcap", "lse"} for c in together)
    assert not any(c.request.softcap and c.request.lse for c in made(*rows))


def test_gradients_are_consistent_with_the_rest() -> None:
    everything = row(
        family="dense",
        dtype="float32",
        head_dim=Range(1),
        mask=("none", "bool", "additive"),
        sinks=True,
        lse=True,
        grad=("query", "key", "value", "mask", "sinks", "lse"),
    )
    cases = made(everything)
    assert any("mask" in c.request.grad for c in cases)
    assert any("sinks" in c.request.grad for c in cases)
    for case in cases:
        grad = case.request.grad
        assert "mask" not in grad or case.request.mask == "additive"
        assert "sinks" not in grad or case.request.sinks
        assert ("lse" in grad) == (case.request.lse and bool(grad))
        assert not (grad and case.out)


def test_the_hard_shapes_are_there() -> None:
    cases = [c for c in plan(Installed("reference")) if c.check == "values" and c.lengths]
    dense = [c for c in cases if c.request.family == "dense"]
    assert {c.request.group for c in dense} == {1, 4, 8}
    assert {63, 100} <= {c.longest[0] for c in dense}
    assert any(c.longest[0] > c.longest[1] and c.request.causal == "bottom_right" for c in dense), "empty rows"
    assert any(c.closed_rows and c.request.grad and c.request.sinks for c in dense)
    assert any(c.request.head_dim != c.request.v_head_dim for c in dense)
    assert {c.storage for c in dense} == {"contiguous", "gapped", "padded", "transposed", "expanded", "misaligned"}
    assert {c.sink for c in dense} == {"usual", "dominant", "off"}
    assert {c.out for c in dense} == {"", "contiguous", "strided"}
    ragged = [c for c in cases if c.request.family == "varlen"]
    assert any((0, 0) in c.lengths for c in ragged)
    assert any(q == 0 < k for c in ragged for q, k in c.lengths)
    assert any(k == 0 < q for c in ragged for q, k in c.lengths)


def test_every_inside_value_is_in_some_case() -> None:
    """Of every row of every backend, not only of those above."""
    for backend, dtype in itertools.product(
        ("torch_sdpa", "torch_native", "flex_attention", "reference"), ("float16",)
    ):
        target = Installed(backend)
        cases = [c for c in plan(target, dtypes=[dtype]) if c.check != "refusal"]
        for one in target.rows:
            mine = [c for c in cases if declared([one], c.request.normalised())]
            if not mine:
                assert one.lowered, "what no case tries must be served by a rewrite"
                continue
            for name in CANDIDATES.keys() - {"family", "dtype", "large", "grad"}:
                # What no case can be made of is listed by a report as not run.
                wanted = set(inside(name, one)) - {*FAMILIES[mine[0].request.family].unmade.get(name, ())}
                if name in ("page_size", "scale"):
                    # 1.5 is a multiple of the default; MLA has no default, and pages have a size.
                    wanted -= {0, 1.5} if mine[0].request.family != "mla" else {0, 1.5, None}
                if name == "state_layout" and mine[0].request.family == "linear":
                    wanted -= {""}  # a state has a layout
                if name == "kv_dtype":
                    wanted -= {dtype}
                if name == "v_head_dim" and mine[0].request.family == "mla":
                    continue
                assert wanted <= {field(c, name) for c in mine}, (backend, one.note, name)


def test_ids_are_unique_and_made_from_what_is_unusual() -> None:
    cases = plan(Installed("reference"))
    ids = [c.id for c in cases]
    assert len(set(ids)) == len(ids)
    assert all(" " not in i and len(i) < 320 for i in ids)
    assert (
        Case(request=AttentionRequest(head_dim=64), lengths=((63, 63),) * 2).id
        == "dense-bfloat16-B2_S63x63-H1x1-D64x64"
    )


def test_plans_are_the_same_in_every_process() -> None:
    """Two test workers must collect the same cases, whatever their hash seeds."""
    code = (
        "import hashlib; from polyattn.testing import Installed, plan;"
        "print(hashlib.sha256(repr(plan(Installed('torch_native'))).encode()).hexdigest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env=environment(seed), capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def environment(seed: str) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONHASHSEED": seed}


def test_quick_is_part_of_full() -> None:
    """What a quick run finds, a full run finds too, and a line of xfails.txt that is right for one is for the other."""
    for backend in ("torch_sdpa", "flex_attention"):
        quick, full = (
            {c.id for c in plan(Installed(backend), level=level, dtypes=["bfloat16"])} for level in ("quick", "full")
        )
        assert quick < full


# --- two ways to the same numbers


def test_decode_is_tried_without_an_lse_too() -> None:
    one = row(
        family="dense", dtype="float32", head_dim=64, causal=("none", "bottom_right"), s_relation=("equal", "one")
    )
    assert {c.check for c in made(one)} == {"values", "decode"}


def test_splits_are_cut_anywhere_and_may_have_an_empty_part() -> None:
    target = Installed("reference")
    splits = [c for c in plan(target, dtypes=["float32"]) if c.check == "split"]
    assert {c.request.family for c in splits} == {"dense", "varlen", "paged", "mla"}
    assert {len([width for width in c.parts if width]) for c in splits} >= {2, 3, 4}
    assert len({c.parts for c in splits}) > 20
    for case in splits:
        size = case.request.page_size or 1
        assert all(width % size == 0 for width in case.parts)
        assert case.longest[1] <= sum(case.parts) <= case.longest[1] + size
    assert any(0 in c.parts for c in splits if c.request.family == "dense")
    assert any(0 in c.parts for c in splits if c.request.family == "varlen")
    # The row of torch's flash op takes no tensor without elements.
    sdpa = [c for c in plan(Installed("torch_sdpa"), dtypes=["float32"]) if c.check == "split"]
    assert sdpa
    assert not any(0 in c.parts for c in sdpa)


@pytest.mark.parametrize("relations, least", [(("equal", "fewer", "more"), 1), (("equal", "fewer"), 7), ("fewer", 14)])
def test_parts_are_of_relations_that_the_row_takes(relations: object, least: int) -> None:
    one = row(family="dense", dtype="float32", head_dim=64, lse=True, s_relation=relations)
    splits = [c for c in made(one) if c.check == "split"]
    assert splits
    assert all(width >= least for c in splits for width in c.parts)


@pytest.mark.parametrize("total, step, empty", [(100, 1, False), (100, 1, True), (112, 16, False), (5, 5, False)])
def test_drawn_parts(total: int, step: int, empty: bool) -> None:
    drawn = [drawn_parts(random.Random(seed), total, step, empty) for seed in range(50)]
    assert all(sum(parts) == total and len(parts) <= 4 for parts in drawn)
    assert all(width % step == 0 for parts in drawn for width in parts)
    assert all((0 in parts) == empty for parts in drawn)
    assert all(len(parts) >= 2 for parts in drawn) or total == step
    assert [s.stop - s.start for s in spans(drawn[0])] == list(drawn[0])
    assert (spans(drawn[0])[0].start, spans(drawn[0])[-1].stop) == (0, total)


def test_declared_reads_rows_as_selection_does() -> None:
    """The kit's own reading of rows against `judge`, on every request it makes."""
    from polyattn.contract import judge

    for backend in ("torch_sdpa", "reference"):
        target = Installed(backend)
        for case in plan(target):
            request = case.request.normalised()
            assert declared(target.rows, request) == bool(judge(target.rows, request)), case.id


# --- covering


def pairs(values: dict[str, Hashable]) -> set[tuple[tuple[str, Hashable], tuple[str, Hashable]]]:
    return set(itertools.combinations(sorted(values.items()), 2))


AXES: dict[str, tuple[Hashable, ...]] = {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": (0, 1, 2, 3)}


def test_covering_meets_every_pair_in_few_combinations() -> None:
    found = covering(AXES, lambda values: values, 100, "seed")
    wanted = {
        pair
        for (a, xs), (b, ys) in itertools.combinations(sorted(AXES.items()), 2)
        for pair in (((a, x), (b, y)) for x in xs for y in ys)
    }
    first = 0
    while not wanted <= set().union(*(pairs(values) for values in found[:first])) and first < len(found):
        first += 1
    assert first <= 18, "12 is the least, 48 is the product"
    assert len(found) == 48, "the rest are the other combinations, each once"


def test_covering_stops_where_it_is_told_to() -> None:
    assert len(covering(AXES, lambda values: values, 5, "seed")) == 5


def test_covering_gives_up_pairs_that_cannot_be() -> None:
    def repair(values: dict[str, Hashable]) -> dict[str, Hashable] | None:
        return None if values["b"] == "y" else {**values, "c": False if values["a"] == 1 else values["c"]}

    found = covering(AXES, repair, 100, "seed")
    assert {values["b"] for values in found} == {"x"}
    assert {values["c"] for values in found if values["a"] == 1} == {False}
    assert len(found) == len({tuple(sorted(values.items())) for values in found})


def test_covering_follows_its_seed() -> None:
    one = covering(AXES, lambda values: values, 10, "one")
    assert one == covering(AXES, lambda values: values, 10, "one")
    assert one != covering(AXES, lambda values: values, 10, "two")
