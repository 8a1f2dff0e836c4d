"""`alibi_as_bias` against the reference: slopes by kernels that add masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from polyattn.contract import AttentionRequest, Bound
from polyattn.lowering import get_lowering

from .harness import EXACT, GATES, cases, dense, exact, families_of, gates, of_families, offers, takes

ROWS = takes(("dense", "varlen", "paged"), alibi=False)
ASKED = {"alibi": (True,), "kv_parts": (0,), "chunked_prefix": (False,), "tree": (False,), "segments": ("",)}


@EXACT
@given(of_families("dense", "varlen", "paged", **ASKED))
def test_numbers_are_those_of_the_reference(case):
    exact(case, ROWS, ("alibi_as_bias",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64,), alibi=(True,), segments=("",)))
def test_gates_hold_in_half_precision(case):
    gates(case, ROWS, ("alibi_as_bias",))


def test_the_bias_is_float32_and_one_for_all_samples():
    seen = []
    kernel = Bound(lambda *tensors, attn_mask: seen.append(attn_mask))
    request = dense(alibi=True, dtype="bfloat16", s_relation="fewer").normalised()
    (rewrite,) = offers("alibi_as_bias", request)
    query, key = torch.randn(2, 3, 4, 64), torch.randn(2, 5, 4, 64)
    run = get_lowering("alibi_as_bias").bind(request, rewrite, [kernel], []).forward
    run(query, key, key, alibi=torch.tensor([1.0, 0.5, 0.25, 0.0]).bfloat16())
    assert (seen[0].shape, seen[0].dtype) == ((1, 4, 3, 5), torch.float32)
    assert seen[0][0, 1, 0].tolist() == [-1.0, -0.5, 0.0, -0.5, -1.0], "the first of three queries is at key 2"


def test_what_it_offers():
    (rewrite,) = offers("alibi_as_bias", dense(alibi=True, mask="bool"))
    assert (rewrite.inner[0].mask, rewrite.inner[0].alibi) == ("additive", False)
    assert families_of("alibi_as_bias", alibi=True) == {"dense", "varlen", "paged"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"alibi": True, "tree": True, "mask": "bool"},
        {"alibi": True, "transform": "vmap"},
        {"alibi": True, "dtype": "fp8_e4m3"},
        {"alibi": True, "family": "paged", "page_size": 16, "kv_parts": 1},
        {"alibi": True, "family": "paged", "page_size": 16, "chunked_prefix": True},
    ],
)
def test_it_offers_nothing_beyond(fields):
    assert offers("alibi_as_bias", AttentionRequest(**fields)) == []
