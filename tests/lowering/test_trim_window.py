"""`trim_window` against the reference: sliding windows by kernels that know none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from polyattn.contract import Bound, PagedTables
from polyattn.lowering import bind
from polyattn.lowering.trim_window import TrimWindow
from polyattn.semantics.reference import attention

from .harness import EXACT, GATES, Lowered, cases, dense, exact, families_of, gates, offers, takes

NAMES = ("trim_window",)
OFF = {"window": ((-1, -1),)}
WINDOWS = ((2, -1), (3, 2), (0, 0), (0, -1), (-1, 1), (5, 1), (40, -1))
DENSE = {"window": WINDOWS, "chunk": (0,), "where": lambda request: request.window != (-1, -1)}
ONE = {**DENSE, "s_relation": ("one",), "causal": ("none", "bottom_right")}
CACHED = {**ONE, "page_size": (1,), "lengths": None}


@settings(EXACT, max_examples=100)
@given(cases(**ONE))
def test_one_query_sees_the_last_keys(case):
    exact(case, takes(**OFF), NAMES)


@settings(EXACT, max_examples=110)
@given(cases(**DENSE))
def test_several_queries_get_a_mask(case):
    exact(case, takes(**OFF), NAMES)


@settings(EXACT, max_examples=70)
@given(cases("paged", new_rows=(False, True), save_kv_cache=(False, True), kv_layout=("NHD", "HND"), **CACHED))
def test_one_query_over_single_token_pages(case):
    exact(case, takes("paged", **OFF), NAMES)


@settings(EXACT, max_examples=25)
@given(cases("mla", sinks=(False,), **CACHED))
def test_one_query_over_single_token_pages_of_latent_rows(case):
    exact(case, takes("mla", **OFF), NAMES)


@settings(GATES, max_examples=10)
@given(cases(dtype="bfloat16", head_dim=(64,), **{**DENSE, "window": (*WINDOWS, (17, -1))}))
def test_gates_hold_in_half_precision(case):
    gates(case, takes(**OFF), NAMES)


@settings(GATES, max_examples=5)
@given(cases("paged", dtype="bfloat16", head_dim=(64,), **CACHED))
def test_gates_hold_over_a_cache(case):
    gates(case, takes("paged", **OFF), NAMES)


def keys_seen(request, S_q, S_k):
    """(numbers of the keys that the kernel gets, its mask)."""
    seen = []

    def forward(query, key, value, attn_mask=None, **given):
        seen.append((key[0, :, 0, 0].tolist(), attn_mask))
        return query

    plan = Lowered(takes(**OFF), "autograd", NAMES).plan(request)
    key = torch.arange(S_k, dtype=torch.float32)[None, :, None, None].expand(1, S_k, 4, 64)
    bind(plan, lambda inner: Bound(forward), None).forward(torch.zeros(1, S_q, 4, 64), key, key)
    return seen[0]


def test_keys_before_the_window_are_left_away():
    assert keys_seen(dense(s_relation="one", window=(2, -1)), 1, 7) == ([4, 5, 6], None)
    assert keys_seen(dense(s_relation="one", window=(9, -1)), 1, 7) == ([*range(7)], None)
    assert keys_seen(dense(s_relation="one", window=(-1, 2)), 1, 7) == ([*range(7)], None)
    keys, mask = keys_seen(dense(s_relation="fewer", causal="bottom_right", window=(2, -1)), 2, 9)
    assert keys == [5, 6, 7, 8]
    assert mask.tolist() == [[[[True, True, True, False], [False, True, True, True]]]]
    keys, mask = keys_seen(dense(s_relation="fewer", window=(1, 1)), 2, 9)
    assert keys == [6, 7, 8]
    assert mask.tolist() == [[[[True, True, True], [False, True, True]]]]


def test_decode_sees_the_keys_of_the_last_row_of_prefill():
    """S4, for the trimmed call."""
    q, k = torch.randn(1, 9, 4, 64), torch.randn(1, 9, 4, 64)
    request = dense(s_relation="one", window=(3, -1))
    last = Lowered(takes(**OFF), "autograd", NAMES).bound(request).forward(q[:, -1:], k, k)
    torch.testing.assert_close(last, attention(q, k, k, causal="bottom_right", window=(3, -1))[:, -1:])


def test_the_table_is_moved_on_the_device():
    """No value of a tensor is read, and no shape depends on one: meta tensors have none."""
    request = dense(family="paged", s_relation="one", phase="decode", page_size=1, window=(2, -1), mask="bool")
    (rewrite,) = offers("trim_window", request)
    got = {}

    def forward(query, key_cache, value_cache, **given):
        got.update(given)
        return query

    bound = TrimWindow().bind(request, rewrite, [Bound(forward)], [])
    with torch.device("meta"):
        query, cache = torch.zeros(3, 4, 64), torch.zeros(50, 1, 4, 64)
        lens = {name: torch.zeros(n, dtype=torch.int32) for name, n in (("seq_lens", 3), ("cu_seqlens_q", 4))}
        table, mask = torch.zeros(3, 9, dtype=torch.int32), torch.zeros(1, 4, 1, 8, dtype=torch.bool)
        host = {"max_seqlen_q": 1, "max_seqlen_k": 8}
        bound.forward(query, cache, cache, tables=PagedTables(table, **lens, **host), attn_mask=mask)
    tables = got["tables"]
    assert tables.page_table.shape == (3, 3)
    assert tables.page_table.dtype == tables.seq_lens.dtype == torch.int32
    assert got["attn_mask"].shape == (3, 4, 1, 3)
    assert tables.max_seqlen_k == 3


def test_tables_are_moved_by_sequence():
    request = dense(family="paged", s_relation="one", phase="decode", page_size=1, window=(2, -1))
    (rewrite,) = offers("trim_window", request)
    got = {}

    def forward(query, **given):
        got.update(given)
        return query

    bound = TrimWindow().bind(request, rewrite, [Bound(forward)], [])
    table = torch.tensor([[10, 11, 12, 13, 14], [20, 21, -1, -1, -1], [-1, -1, -1, -1, -1]], dtype=torch.int32)
    lengths, starts = torch.tensor([5, 2, 0], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    bound.forward(torch.zeros(3, 4, 64), tables=PagedTables(table, lengths, starts, 1, 5))
    assert got["tables"].seq_lens.tolist() == [3, 2, 0]
    assert got["tables"].page_table.tolist()[:2] == [[12, 13, 14], [20, 21, -1]]
    assert (table[0].tolist(), lengths.tolist()) == ([10, 11, 12, 13, 14], [5, 2, 0]), "the caller's stay"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="no window"),
        pytest.param({"window": (2, -1), "chunk": 4}, id="chunks, which count from the first key"),
        pytest.param({"window": (2, -1), "zero_size": True}, id="empty tensors"),
        pytest.param({"window": (2, -1), "tree": True}, id="tree"),
        pytest.param({"window": (2, -1), "transform": "subclass"}, id="subclass"),
        pytest.param({"window": (2, -1), "causal": "top_left", "s_relation": "fewer", "alibi": True}, id="distances"),
        pytest.param({"family": "varlen", "s_relation": "one", "window": (2, -1)}, id="packed: see pad_sequences"),
        pytest.param({"family": "paged", "s_relation": "one", "window": (2, -1), "page_size": 16}, id="larger pages"),
        pytest.param({"family": "paged", "s_relation": "fewer", "window": (2, -1), "page_size": 1}, id="cache, extend"),
        pytest.param(
            {"family": "paged", "s_relation": "one", "window": (2, -1), "page_size": 1, "kv_parts": 1}, id="more keys"
        ),
    ],
)
def test_it_offers_nothing_for(fields):
    assert offers("trim_window", dense(**fields)) == []


def test_what_it_offers():
    (one,) = offers("trim_window", dense(s_relation="one", window=(127, 0)))
    assert (one.cost, one.detail) == (0.0, "the last 128 keys")
    assert one.inner == (dense(s_relation="one").normalised(),)
    (single,) = offers("trim_window", dense(s_relation="one", window=(0, -1)))
    assert single.inner == (dense().normalised(),), "one key remains: the lengths are equal"
    (extend,) = offers("trim_window", dense(s_relation="fewer", causal="bottom_right", window=(127, -1)))
    assert (extend.cost, extend.detail) == (2.0, "the last S_q + 127 keys, window (127, -1) as a mask")
    assert extend.inner == (dense(s_relation="fewer", mask="bool").normalised(),)
    (additive,) = offers("trim_window", dense(window=(3, 3), mask="additive"))
    assert (additive.inner[0].mask, additive.inner[0].s_relation) == ("additive", "equal")
    assert families_of("trim_window", s_relation="one", window=(3, -1), page_size=1) == {"dense", "paged", "mla"}


@pytest.mark.parametrize("width, odd", [(64, False), (12, False), (9, True)])
def test_a_view_of_the_last_of_odd_rows_counts_as_misaligned(width, odd):
    (rewrite,) = offers("trim_window", dense(s_relation="one", window=(3, -1), head_dim=width))
    assert rewrite.inner[0].misaligned is odd
