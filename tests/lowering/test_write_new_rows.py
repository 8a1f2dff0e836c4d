"""`write_new_rows` against the reference: kernels that only read their cache, and are never handed new rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from polyattn.contract import Bound
from polyattn.errors import UnsupportedRequestError
from polyattn.lowering import bind, get_lowering, lengths
from polyattn.semantics import reference

from .harness import EXACT, GATES, Lowered, families_of, offers, takes
from .serving import Step, cached, divided, exact, gates, make, run, same, steps, words

KV = (
    ("auto", ""),
    ("auto", "token"),
    ("bfloat16", ""),
    ("fp8_e4m3", "token"),
    ("fp8_e5m2", "head"),
    ("int8", "tensor"),
)
READS = takes(("paged",), save_kv_cache=False)
"""Everything but new rows."""
LENGTHS = ((3, 8), (1, 5), (2, 0))


NAMES = ("write_new_rows",)


@EXACT
@given(steps(kv=KV, new=(True,), mask=("none", "bool"), window=((-1, -1), (3, -1))))
def test_the_kernel_finds_the_rows_in_the_cache(step):
    exact(step, READS, NAMES)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_two_numbers_a_byte(layout, saved):
    """What the kernel reads: the rows as the definition stores them, and the scales of the pages that it reads."""
    fields = {"kv_dtype": "fp4_e2m1", "kv_scales": "block16", "kv_layout": layout, "save_kv_cache": saved}
    step, seen = make(cached(**fields), LENGTHS, 0, new=True), []
    before, after = [t.clone() for t in step.tensors], Step.written(with_save(step))
    (rewrite,) = offers("write_new_rows", step.request)
    kernel = Bound(lambda query, *caches, **given: seen.append((caches, given)))
    get_lowering("write_new_rows").bind(step.request, rewrite, [kernel], []).forward(*step.tensors, **words(step.given))
    ((caches, given),) = seen
    assert all(same(a, b) for a, b in zip(step.tensors[1:], after if saved else before[1:], strict=True))
    for n, (_, length) in enumerate(LENGTHS):
        count = -(-length // step.request.page_size)
        mine, theirs = given["tables"].page_table[n, :count].long(), step.given["page_table"][n, :count].long()
        for cache, right in zip(caches, after, strict=True):
            assert same(cache[mine], right[theirs])
        for name in ("k_scale", "v_scale"):
            assert same(given[name][mine], step.given[name][theirs])


def with_save(step):
    return dataclasses.replace(step, request=dataclasses.replace(step.request, save_kv_cache=True))


@EXACT
@given(divided(new=(True,)))
def test_parts_of_the_same_pool_see_what_was_written(step):
    names = ("write_new_rows", "kv_parts_by_lse")  # a copy of the pages is of the call alone: parts come first there
    names = names if step.request.save_kv_cache else names[::-1]
    exact(step, takes(("paged",), save_kv_cache=False, kv_parts=False), names)


@GATES
@given(steps(dtype="bfloat16", kv=KV[1:], new=(True,), head_dim=(64,), v_head_dim=(64,), page_size=(16,)))
def test_gates_hold_in_half_precision(step):
    gates(step, READS, NAMES)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv", KV, ids="-".join)
def test_the_caches_are_bit_for_bit_those_of_the_reference(kv, layout, saved):
    fields = {"kv_dtype": kv[0], "kv_scales": kv[1], "kv_layout": layout, "save_kv_cache": saved}
    step = make(cached(dtype="float64", **fields), LENGTHS, 1, new=True)
    # More than the largest number of the dtype, in rows that are written.
    step.given["key"][0], step.given["value"][1] = 1e6, -1e6
    theirs = [t.clone() for t in step.tensors]
    options = {name: value for name, value in step.given.items() if not name.startswith("max_seqlen")}
    right = reference.paged_attention(*theirs, kv_layout=layout, save_kv_cache=saved, **options)
    got = run(step, READS, NAMES)
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    assert all(same(a, b) for a, b in zip(step.tensors, theirs, strict=True))


@pytest.mark.parametrize("saved", [True, False])
def test_the_kernel_is_handed_no_rows_and_a_copy_of_the_pages_in_use_alone(saved):
    step, seen = make(cached(save_kv_cache=saved), ((3, 12), (1, 5), (2, 0)), 0, new=True), []
    target = Lowered(READS, "autograd", NAMES)

    def load(request):
        bound = target.load(request)

        def forward(query, *caches, **given):
            seen.append((request, caches, given))
            return bound.forward(query, *caches, **given)

        return dataclasses.replace(bound, forward=forward)

    bind(target.plan(step.request), load, load).forward(*step.tensors, **words(step.given))
    ((request, caches, given),) = seen
    assert (request.save_kv_cache, given.get("key"), given.get("value")) == (None, None, None)
    if saved:
        assert [t.data_ptr() for t in caches] == [t.data_ptr() for t in step.tensors[1:]]
        assert given["tables"].page_table is step.given["page_table"]
    else:
        assert [t.shape[0] for t in caches] == [6, 6]
        assert given["tables"].page_table.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_copy_that_its_kernel_was_not_chosen_for_is_refused(monkeypatch):
    step = make(cached(save_kv_cache=False), LENGTHS, 0, new=True)
    monkeypatch.setattr(lengths, "_LARGE", 3 * 8 * 2 * 16)
    with pytest.raises(UnsupportedRequestError, match=r"copying the pages makes a tensor of 768 elements"):
        run(step, READS, NAMES)
    run(dataclasses.replace(step, request=dataclasses.replace(step.request, large=True)), READS, NAMES)


def test_it_says_what_it_does():
    for saved, where in ((True, "the cache"), (False, "a copy of the pages in the table")):
        request = cached(save_kv_cache=saved)
        (rewrite,) = offers("write_new_rows", request)
        assert rewrite.detail == f"new keys and values into {where}, before the kernel reads it"
        assert rewrite.inner == (dataclasses.replace(request, save_kv_cache=None).normalised(),)


def test_what_it_does_not_offer():
    assert families_of("write_new_rows", save_kv_cache=True) == {"paged"}
    refused = [
        cached(),
        cached(save_kv_cache=True, cross=True),  # the new keys are another sequence's
        cached(save_kv_cache=True, kv_layout="vectorised"),
        cached(save_kv_cache=True, kv_layout="NZ"),
        cached(save_kv_cache=False, kv_parts=1),  # which may be in the pool that is not copied
    ]
    for request in refused:
        assert not offers("write_new_rows", request), request.summary()
