"""The table of families says what the protocols say."""

from __future__ import annotations

import inspect

import pytest
import torch

from polyattn import contract
from polyattn.bench.measure import Workload
from polyattn.contract.families import FAMILY_SPECS, FamilySpec
from polyattn.contract.lengths import extent_of, head_axis
from polyattn.tuning import bucket

SPECS = list(FAMILY_SPECS.values())


def keywords_of(protocol: str) -> dict[str, str]:
    asked = inspect.signature(getattr(contract, protocol).__call__).parameters.values()
    own = [one for one in asked if one.kind is one.KEYWORD_ONLY]
    return {one.name: one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in own}


def test_every_family_of_a_request_has_a_spec() -> None:
    assert list(FAMILY_SPECS) == list(contract.FAMILIES)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_spec_and_its_forward_protocol_name_the_same_arguments(spec: FamilySpec) -> None:
    signature = inspect.signature(getattr(contract, spec.forward).__call__).parameters.values()
    assert [one.name for one in signature if one.kind is one.POSITIONAL_OR_KEYWORD][1:] == [
        one.name for one in spec.positional
    ]
    assert {one.name: written for one, written in spec.taken("forward")} == keywords_of(spec.forward)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.backward], ids=lambda spec: spec.name)
def test_a_spec_and_its_backward_protocol_name_the_same_arguments(spec: FamilySpec) -> None:
    signature = list(inspect.signature(getattr(contract, spec.backward).__call__).parameters.values())
    positional = [one.name for one in signature if one.kind is one.POSITIONAL_OR_KEYWORD][1:]
    assert positional == ["dout", *(one.name for one in spec.positional), "out", "lse"]
    written = {one.name: written for one, written in spec.taken("backward")}
    lists = [one for one in signature if one.kind is one.VAR_KEYWORD]
    # Block-sparse lists stand there as `**lists`, "of the forward, by name".
    asked = keywords_of(spec.forward if lists else spec.backward)
    assert written == {name: asked[name] for name in asked if name != "out"}
    assert bool(lists) == (spec.name == "block_sparse")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_is_given_only_while_a_field_is_on_names_a_field(spec: FamilySpec) -> None:
    fields = {field.name for field in contract.request_fields()}
    assert {one.given_when for one in spec.arguments} - {""} <= fields


def test_the_extent_of_a_linear_call_is_read_without_cu_seqlens() -> None:
    class Shaped:
        def __init__(self, *shape: int) -> None:
            self.shape = shape

    extent = extent_of(contract.AttentionRequest(family="linear", head_dim=8))
    assert extent(Shaped(2, 7, 3, 8), Shaped(2, 7, 3, 8)) == (2, 7, 7)
    assert extent(Shaped(1, 7, 3, 8), Shaped(1, 7, 3, 8), cu_seqlens=Shaped(4)) == (3, 7, 7)


@pytest.mark.parametrize(
    ("lengths", "batch"),
    [((512,) * 16, 16), ((256,) * 15 + (512,), 9), ((1,) * 95 + (3088,), 2), ((7,), 1), ((0, 0), 0)],
    ids=["equal", "half as long", "one long", "one", "empty"],
)
def test_a_packed_call_has_as_many_sequences_as_its_longest_would_make(lengths: tuple[int, ...], batch: int) -> None:
    query, starts = torch.empty(sum(lengths), 2, 8), torch.empty(len(lengths) + 1)
    extent = extent_of(contract.AttentionRequest(family="varlen", layout="THD"))
    asked = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    assert extent(query, query, query, **asked) == (batch, max(lengths), max(lengths))
    if sum(lengths):
        request = contract.AttentionRequest(family="varlen", layout="THD", s_relation="equal")
        measured = Workload(request, tuple((length, length) for length in lengths))
        assert measured.extent == (batch, max(lengths), max(lengths)), "as a call is looked up, so it is filed"
        assert measured.buckets[0] == bucket(batch)
        assert measured.batch == len(lengths)


@pytest.mark.parametrize(
    ("family", "layout", "axis"), [("dense", "BSHD", 2), ("dense", "BHSD", 1), ("varlen", "THD", 1)]
)
def test_the_head_axis_of_an_lse(family: contract.Family, layout: str, axis: int) -> None:
    assert head_axis(contract.AttentionRequest(family=family, layout=layout)) == axis
