"""`dequantise_kv` against the reference: every kind of cache, read and written."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from polyattn.errors import UnsupportedRequestError
from polyattn.lowering import bind, dequantise_kv, lengths
from polyattn.semantics import reference
from polyattn.semantics.paged_kv import Pool

from .harness import EXACT, GATES, Lowered, families_of, offers, takes
from .serving import cached, exact, gates, make, run, same, steps, words

PLAIN = takes(("paged", "mla"), kv_dtype="auto", kv_scales="")
READ_ONLY = takes(("paged", "mla"), kv_dtype="auto", kv_scales="", save_kv_cache=False)
PER_NUMBER = tuple(
    (dtype, scales) for dtype in ("fp8_e4m3", "fp8_e5m2", "int8") for scales in ("", "tensor", "head", "token")
)
FP4 = (("fp4_e2m1", "block16"),)
OWN = tuple(("auto", scales) for scales in ("tensor", "head", "token"))
"""Caches of the query's dtype whose numbers are to be multiplied all the same."""
LENGTHS = ((3, 8), (1, 5), (2, 0))


@EXACT
@given(steps(family=("paged",), kv=PER_NUMBER))
def test_one_number_each(step):
    exact(step, PLAIN, ("dequantise_kv",))


@GATES
@given(steps(family=("paged",), kv=FP4, head_dim=(16, 48), v_head_dim=(32,)))
def test_two_numbers_a_byte(step):
    exact(step, PLAIN, ("dequantise_kv",))


@GATES
@given(steps(family=("mla",), kv=(("fp8_e4m3", "block128"),), mask=("none", "bool"), window=((-1, -1), (3, -1))))
def test_latent_rows(step):
    exact(step, PLAIN, ("dequantise_kv",))


@GATES
@given(steps(family=("paged",), kv=(("bfloat16", ""), ("float32", "head"), ("float16", "tensor"), *OWN)))
def test_a_cache_of_floats_that_is_not_quantised(step):
    exact(step, PLAIN, ("dequantise_kv",))


@GATES
@given(steps(dtype="bfloat16", kv=(*PER_NUMBER, *FP4), head_dim=(64,), v_head_dim=(64,), page_size=(16,)))
def test_gates_hold_in_half_precision(step):
    gates(step, PLAIN, ("dequantise_kv",))


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv", [*PER_NUMBER, *OWN], ids="-".join)
def test_the_caches_are_bit_for_bit_those_of_the_reference(kv, layout, saved):
    """The definition reads quantised caches itself: the same output, and the same bytes stored."""
    fields = {"kv_dtype": kv[0], "kv_scales": kv[1], "kv_layout": layout, "save_kv_cache": saved}
    step = make(cached(dtype="float64", **fields), LENGTHS, 1, new=True)
    # More than the largest number of the dtype, in rows that are written.
    step.given["key"][0], step.given["value"][1] = 1e6, -1e6
    theirs = [t.clone() for t in step.tensors]
    options = {name: value for name, value in step.given.items() if not name.startswith("max_seqlen")}
    right = reference.paged_attention(*theirs, kv_layout=layout, save_kv_cache=saved, **options)
    got = run(step, READ_ONLY, ("dequantise_kv",))
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    assert all(same(a, b) for a, b in zip(step.tensors, theirs, strict=True))


def test_only_pages_in_the_table_are_dequantised_and_only_as_many_as_are_in_use():
    seen = []
    target = Lowered(PLAIN, "autograd")

    def load(request):
        def forward(query, key_cache, value_cache, *, tables, **given):
            seen.append((tuple(key_cache.shape), tables.page_table.tolist()))
            return torch.zeros(*query.shape[:2], value_cache.shape[-1])

        return dataclasses.replace(target.load(request), forward=forward)

    step = make(cached(kv_dtype="fp8_e4m3"), LENGTHS, 0)
    large = [torch.cat([t, t, t]) for t in step.tensors[1:]]
    wide = torch.nn.functional.pad(step.given["page_table"], (0, 500), value=10**6)
    bound = bind(target.plan(step.request), load, load)
    bound.forward(step.tensors[0], *large, **words({**step.given, "page_table": wide, "max_seqlen_k": 12}))
    assert seen == [((6, 8, 2, 16), [[0, 1], [2, 3], [4, 5]])]


@pytest.mark.parametrize("takes_it", [True, False])
@pytest.mark.parametrize("saved", [None, True, False])
def test_a_package_copies_the_pages_that_it_can(saved, takes_it, monkeypatch):
    """It gets the columns in use, after new rows are stored; what lies behind a sequence's last token it leaves."""
    asked = []

    class Ops:
        def dequantised(self, request, cache, scale, page_table, seq_lens):
            asked.append((request, cache, scale, page_table, seq_lens))
            if not takes_it:
                return None
            owned = page_table.long().where(torch.arange(page_table.shape[1]) * 8 < seq_lens[:, None], 0)
            made = Pool(request, cache, scale).pages(owned.flatten(), torch.float32).unflatten(0, owned.shape)
            real = torch.arange(page_table.shape[1] * 8).view(-1, 8) < seq_lens[:, None, None]
            return made.where(real[..., None, None], torch.nan).flatten(0, 1)

    fields = {"kv_dtype": "fp8_e4m3", "kv_scales": "token", "save_kv_cache": saved}
    results = []
    for ops in (None, Ops()):
        step = make(cached(**fields), LENGTHS, 1, new=saved is not None)
        given = {**step.given, "page_table": torch.nn.functional.pad(step.given["page_table"], (0, 500), value=10**6)}
        monkeypatch.setattr(dequantise_kv, "device_ops", lambda device_type, ops=ops: ops)
        results.append((run(dataclasses.replace(step, given=given), READ_ONLY, ("dequantise_kv",)), *step.tensors))
    for plain, found in zip(*results, strict=True):
        assert same(plain, found) if isinstance(plain, torch.Tensor) else all(map(same, plain, found))
    assert [(one[0].kv_scales, tuple(one[3].shape)) for one in asked] == [("token", (3, 1))] * 2
    assert all(one[1] is cache for one, cache in zip(asked, step.tensors[1:], strict=True))


def test_a_package_without_such_a_kernel_leaves_the_pages_to_core(monkeypatch):
    monkeypatch.setattr(dequantise_kv, "device_ops", lambda device_type: object())
    exact(make(cached(dtype="float64", kv_dtype="int8", kv_scales="head"), LENGTHS, 1), PLAIN, ("dequantise_kv",))


def test_a_copy_that_its_kernel_was_not_chosen_for_is_refused(monkeypatch):
    """What counts is the copy: every sequence has its own, up to the longest."""
    step = make(cached(kv_dtype="fp8_e4m3"), LENGTHS, 0)
    monkeypatch.setattr(lengths, "_LARGE", 3 * 8 * 2 * 16)
    with pytest.raises(UnsupportedRequestError, match=r"dequantising the cache makes a tensor of 768 elements"):
        run(step, PLAIN, ("dequantise_kv",))
    run(dataclasses.replace(step, request=dataclasses.replace(step.request, large=True)), PLAIN, ("dequantise_kv",))


def test_it_says_what_it_does():
    request = cached(kv_dtype="fp8_e4m3", kv_scales="head", dtype="bfloat16", save_kv_cache=True)
    (rewrite,) = offers("dequantise_kv", request)
    told = "each call moves 5 times the bytes of the pages that it names"
    assert rewrite.detail == f"cache fp8_e4m3 with scales by head -> bfloat16; {told}"
    plain = {"kv_dtype": "auto", "kv_scales": "", "save_kv_cache": None}
    assert rewrite.inner == (dataclasses.replace(request, **plain).normalised(),)


@pytest.mark.parametrize(
    ("kv_dtype", "kv_scales", "dtype", "times"),
    [("fp4_e2m1", "block16", "bfloat16", "8.1"), ("fp8_e5m2", "", "float32", "9"), ("bfloat16", "", "float32", "5")],
)
def test_it_says_what_a_call_moves(kv_dtype, kv_scales, dtype, times):
    (rewrite,) = offers("dequantise_kv", cached(kv_dtype=kv_dtype, kv_scales=kv_scales, dtype=dtype))
    assert f"each call moves {times} times the bytes" in rewrite.detail


def test_what_it_does_not_offer():
    assert families_of("dequantise_kv", kv_dtype="fp8_e4m3") == {"paged", "mla"}
    assert offers(
        "dequantise_kv", cached("mla", kv_dtype="fp8_e4m3", kv_scales="block128", head_dim=576, v_head_dim=512)
    )
    refused = [
        cached(),
        cached(dtype="bfloat16", kv_dtype="float32"),  # the kernel would see rounded values
        cached(dtype="bfloat16", kv_dtype="float16"),
        cached(dtype="fp8_e4m3", kv_dtype="fp4_e2m1", kv_scales="block16"),
        cached(kv_dtype="fp8_e4m3", kv_scales="block128"),
        cached(kv_dtype="fp4_e2m1", kv_scales="tensor"),
        cached(kv_dtype="fp8_e4m3", kv_parts=1),
        cached("mla", kv_dtype="fp8_e4m3", kv_scales="tensor", head_dim=576, v_head_dim=512),
        cached("mla", kv_dtype="fp8_e4m3", kv_scales="block128"),  # no rows of 576
        cached("mla", kv_scales="tensor"),
    ]
    for request in refused:
        assert not offers("dequantise_kv", request), request.summary()
