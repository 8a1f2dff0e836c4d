"""`chunked_prefix_by_lse` against the reference, in chunks of a few tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given

from polyattn.lowering import bind
from polyattn.lowering.chunked_prefix_by_lse import ChunkedPrefixByLSE

from .harness import EXACT, GATES, Lowered, families_of, offers, takes
from .serving import cached, exact, gates, make, steps, words

WHOLE = takes(("paged", "mla"), chunked_prefix=False)
CHUNKED = {"family": ("paged", "mla"), "phase": ("extend", "prefill"), "fixed": (("chunked_prefix", True),)}
LONGER = ((3, 8), (1, 5), (2, 0), (4, 4), (2, 30), (5, 21))


@pytest.fixture(autouse=True, scope="module")
def _short_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkedPrefixByLSE, "tokens", 5)
        yield


@EXACT
@given(steps(**CHUNKED, kv=(("auto", ""), ("fp8_e4m3", "token"))))
def test_chunks_of_the_prefix_merge_to_the_whole(step):
    exact(step, WHOLE, ("chunked_prefix_by_lse",))


@pytest.mark.parametrize("page_size", [1, 4, 5, 6, 64])
@pytest.mark.parametrize("family", ["paged", "mla"])
def test_many_chunks(family, page_size):
    request = cached(family, page_size=page_size, chunked_prefix=True, dtype="float64", lse=True)
    for seed in range(8):
        exact(make(request, LONGER, seed), WHOLE, ("chunked_prefix_by_lse",))


@GATES
@given(steps(dtype="bfloat16", **CHUNKED, head_dim=(64,), v_head_dim=(64,), page_size=(16,)))
def test_gates_hold_in_half_precision(step):
    gates(step, WHOLE, ("chunked_prefix_by_lse",))


def calls(step):
    """(max_seqlen_k, seq_lens, columns of the table) of the kernel's calls."""
    seen = []
    target = Lowered(WHOLE, "autograd", ("chunked_prefix_by_lse",))

    def load(request):
        bound = target.load(request)

        def forward(*tensors, **given):
            tables = given["tables"]
            seen.append((tables.max_seqlen_k, tables.seq_lens.tolist(), tables.page_table.shape[1]))
            return bound.forward(*tensors, **given)

        return dataclasses.replace(bound, forward=forward)

    bind(target.plan(step.request), load, load).forward(*step.tensors, **words(step.given))
    return seen


def test_no_call_sees_more_keys_than_a_chunk_and_the_queries():
    step = make(cached(page_size=4, chunked_prefix=True), LONGER, 0)
    # Chunks of 8, pages of 4; at most 7 + 5 keys are left for the last part.
    whole = [(8, [8 if s_k - s_q >= end else 0 for s_q, s_k in LONGER], 2) for end in (8, 16, 24)]
    assert calls(step) == [(12, [8, 5, 0, 4, 6, 5], 3), *whole]


def test_a_prefix_shorter_than_a_chunk_costs_nothing_more():
    step = make(cached(page_size=8, chunked_prefix=True), ((3, 8), (1, 5)), 0)
    assert calls(step) == [(8, [8, 5], 2)]


def test_a_bound_beyond_the_table_makes_no_calls():
    step = make(cached(page_size=4, chunked_prefix=True), ((3, 8),), 0)
    step.given["max_seqlen_k"] = 10**6
    assert len(calls(step)) == 2


def test_chunks_are_pages():
    sizes = {page: offers("chunked_prefix_by_lse", cached(page_size=page, chunked_prefix=True)) for page in (1, 4, 64)}
    assert [r.detail for (r,) in sizes.values()] == [f"chunks of {n} tokens" for n in (5, 8, 64)]


def test_what_it_does_not_offer():
    def asked(**fields):
        return cached(**{"chunked_prefix": True, **fields})

    assert families_of("chunked_prefix_by_lse", chunked_prefix=True, phase="extend", page_size=8) == {"paged", "mla"}
    refused = [
        asked(chunked_prefix=False),
        asked(phase="decode", s_relation="one"),
        asked(phase="verify"),
        asked(window=(5, -1)),
        asked(chunk=4),
        asked(mask="bool"),
        asked(causal="top_left"),
        asked(alibi=True),
        asked(kv_parts=1),
    ]
    for request in refused:
        assert not offers("chunked_prefix_by_lse", request), request.summary()
