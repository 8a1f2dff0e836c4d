"""`realign` against the reference: tensors off a 16-byte boundary, by kernels that must not see one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from polyattn.contract import Bound
from polyattn.lowering.realign import Realign
from polyattn.placement import aligned
from polyattn.testing.problems import stored

from .harness import EXACT, GATES, cases, dense, exact, families_of, gates, of_families, offers, takes

STORED = ("misaligned", "padded", "gapped", "transposed")
ODD = {"storage": STORED, "where": lambda request: request.misaligned}
ROWS = takes(("dense", "varlen"), misaligned=False)


@EXACT
@given(of_families("dense", "varlen", **ODD))
def test_numbers_are_those_of_the_reference(case):
    exact(case, ROWS, ("realign",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64, 36), **ODD))
def test_gates_hold_in_half_precision(case):
    gates(case, ROWS, ("realign",))


@pytest.mark.parametrize("storage", ["contiguous", "misaligned", "padded", "gapped", "transposed", "expanded"])
@pytest.mark.parametrize("width", [8, 12])
def test_only_what_is_off_is_copied(storage, width):
    """A tensor is moved if and only if `aligned`, which made the request, finds it off."""
    tensor = stored(torch.randn(2, 5, 4, width).to(torch.bfloat16), storage, torch.device("cpu"))
    seen = []
    kernel = Bound(lambda *tensors: seen.extend(tensors))
    request = dense(dtype="bfloat16", head_dim=width, misaligned=True).normalised()
    (rewrite,) = offers("realign", request)
    Realign().bind(request, rewrite, [kernel], []).forward(tensor, tensor, tensor)
    for got in seen:
        assert torch.equal(got, tensor)
        assert aligned(got)
        assert (got is tensor) == aligned(tensor)


@pytest.mark.parametrize(("strides", "even"), [((16, 3, 1), True), ((16, 8, 1), True), ((17, 8, 1), False)])
def test_the_stride_of_an_axis_of_one_moves_no_row(strides, even):
    assert aligned(torch.empty_strided((2, 1, 8), strides, dtype=torch.bfloat16)) is even


def test_what_it_offers():
    (rewrite,) = offers("realign", dense(misaligned=True))
    assert not rewrite.inner[0].misaligned
    assert rewrite.cost == 6.0
    assert families_of("realign", misaligned=True) == {"dense", "varlen"}, "caches are not copied"
    assert families_of("realign") == set()
