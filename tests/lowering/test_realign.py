"""`realign` against the reference: tensors off a 16-byte boundary, by kernels that must not see one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from polyattn import explain, mla_attention, paged_attention
from polyattn.adapters.alignment import aligned
from polyattn.contract import Bound
from polyattn.lowering.realign import Realign
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
    assert families_of("realign", misaligned=True) == {"dense", "varlen", "paged", "mla"}
    assert families_of("realign") == set()


@pytest.mark.parametrize("family", ["paged", "mla"])
def test_of_a_call_over_a_cache_the_queries_and_new_rows_are_moved_and_the_cache_is_not(family: str) -> None:
    query, cache, row = (stored(torch.randn(3, 4, 8).bfloat16(), "misaligned", torch.device("cpu")) for _ in range(3))
    seen: dict[str, torch.Tensor] = {}

    def forward(query: torch.Tensor, cache: torch.Tensor, *, key: torch.Tensor | None = None, **_: object) -> None:
        seen.update({"query": query, "cache": cache} if key is None else {"query": query, "cache": cache, "key": key})

    request = dense(family=family, layout="THD", dtype="bfloat16", page_size=16, misaligned=True).normalised()
    (rewrite,) = offers("realign", request)
    rows = {"key": row} if family == "paged" else {}
    Realign().bind(request, rewrite, [Bound(forward)], []).forward(query, cache, **rows)
    assert seen["cache"] is cache, "it may be written to"
    for name, passed in {"query": query, **rows}.items():
        assert aligned(seen[name])
        assert torch.equal(seen[name], passed)


def test_the_calls_over_a_cache_say_that_a_query_is_off() -> None:
    """FlashAttention 3 ended a process by such a query: nothing had told it."""
    cache = torch.randn(2, 16, 2, 8)
    tables = {
        "page_table": torch.tensor([[0, 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([20], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 20,
    }
    values = torch.randn(3, 2, 8)
    off = stored(values, "misaligned", torch.device("cpu"))
    for passed, is_off in (((values, None), False), ((off, None), True), ((values, off), True)):
        query, rows = passed
        new = {} if rows is None else {"key": rows, "value": rows}
        assert explain(paged_attention, query, cache, cache, **tables, **new).request.misaligned is is_off
    latent, width = torch.randn(2, 16, 8), {"v_head_dim": 4, "scale": 0.3}
    for query, is_off in ((values, False), (off, True)):
        assert explain(mla_attention, query, latent, **tables, **width).request.misaligned is is_off
