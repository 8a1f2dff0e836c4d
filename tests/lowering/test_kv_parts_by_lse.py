"""`kv_parts_by_lse` against the reference: any groups over any rows; cascades and split KV against the flat call."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from polyattn.contract import KVPart
from polyattn.semantics.reference import mla_attention, paged_attention

from .harness import EXACT, GATES, families_of, offers, takes
from .serving import cached, close, divided, exact, gates, int32, make, run

WHOLE = takes(("paged", "mla"), kv_parts=False)
BOTH = {"family": ("paged", "mla")}


@EXACT
@given(
    divided(**BOTH, mask=("none", "bool"), kv=(("auto", ""), ("auto", ""), ("fp8_e4m3", "head"), ("fp8_e5m2", "token")))
)
def test_every_query_sees_the_row_of_its_group_in_each_part(step):
    exact(step, WHOLE, ("kv_parts_by_lse",))


@GATES
@given(divided(dtype="bfloat16", **BOTH, head_dim=(64,), v_head_dim=(64,), page_size=(16,)))
def test_gates_hold_in_half_precision(step):
    gates(step, WHOLE, ("kv_parts_by_lse",))


# ------------------------------------------------------------------------------------------------------ flat or not

P = 4


def flat(family, lengths, seed=0, **fields):
    """(step, answer) of a call over one table."""
    request = cached(family, page_size=P, dtype="float64", lse=True, **fields)
    step = make(request, lengths, seed)
    call = paged_attention if family == "paged" else mla_attention
    width = {} if family == "paged" else {"v_head_dim": request.dims[1]}
    hosts = ("max_seqlen_q", "max_seqlen_k")
    options = {name: value for name, value in step.given.items() if name not in hosts}
    scale = {"scale": request.scale, "softcap": request.softcap, "causal": request.causal}
    return step, call(*step.tensors, **options, **scale, **width, return_lse=True)


def over(step, table, seq_lens, parts, **fields):
    """The same queries over a table of their own and parts in the same pool."""
    grouped = any(part.max_seqlen_q > 1 for part in parts)
    relation = "more" if grouped else step.request.s_relation
    request = dataclasses.replace(step.request, kv_parts=len(parts), s_relation=relation, **fields)
    own = {"page_table": table, "seq_lens": seq_lens, "max_seqlen_k": int(seq_lens.max()), "kv_parts": parts}
    return dataclasses.replace(step, request=request, given={**step.given, **own})


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("family", ["paged", "mla"])
def test_a_cascade_of_three_levels_is_the_flat_call(family, queries):
    """A system prompt for all, a document for each half, a conversation for each sequence."""
    levels, own = ([2], [3, 1]), [2, 5, 1, 4]
    lengths = [(queries, P * (2 + levels[1][n // 2]) + k + queries) for n, k in enumerate(own)]
    phase = {"phase": "decode", "s_relation": "one"} if queries == 1 else {}
    step, _ = flat(family, lengths, **phase)
    table = step.given["page_table"]
    # The pages of the levels are those of the first sequence that has them.
    for n in range(4):
        shared = 2 + levels[1][n // 2]
        table[n, :2] = table[0, :2]
        table[n, 2:shared] = table[n // 2 * 2, 2:shared]
    right = dataclasses.replace(step).answer(_exactly, torch.float64)

    prompt = KVPart(table[:1, :2], int32(2 * P), int32(0, 4 * queries), 4 * queries, 2 * P)
    documents = torch.full((2, 3), 10**6, dtype=torch.int32)
    documents[0], documents[1, :1] = table[0, 2:5], table[2, 2:3]
    halves = int32(0, 2 * queries, 4 * queries)
    middle = KVPart(documents, int32(3 * P, P), halves, 2 * queries, 3 * P)
    tails = torch.full((4, table.shape[1]), 10**6, dtype=torch.int32)
    for n in range(4):
        shared = 2 + levels[1][n // 2]
        tails[n, : table.shape[1] - shared] = table[n, shared:]
    cascade = over(step, tails, int32(*(k + queries for k in own)), [prompt, middle])
    out, lse = run(cascade, WHOLE, ("kv_parts_by_lse",))
    close("out", out, right[0])
    close("lse", lse, right[1])


def _exactly(query, key, value, mask, sinks, request):
    from polyattn.testing.plain import reference_attention

    return reference_attention(query, key, value, mask, sinks, request)


def dealt(table, lengths, ranks):
    """Pages dealt round robin: (table, lengths) of each rank."""
    for rank in range(ranks):
        kept = [sum(min(P, s - P * c) for c in range(rank, -(-s // P), ranks)) for s in lengths]
        yield table[:, rank::ranks].contiguous(), int32(*kept)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("family", ["paged", "mla"])
def test_keys_split_over_ranks_are_the_unsplit_call_in_decode(family, ranks):
    lengths = [1, 4, 23, 30, 9]
    sinks = {"sinks": True, "softcap": 2.0} if family == "paged" else {}
    step, right = flat(family, [(1, n) for n in lengths], phase="decode", s_relation="one", **sinks)
    own, *others = dealt(step.given["page_table"], lengths, ranks)
    parts = [KVPart(table, lens, torch.arange(6, dtype=torch.int32), 1, int(lens.max())) for table, lens in others]
    got = run(over(step, *own, parts), WHOLE, ("kv_parts_by_lse",))
    close("out", got[0], right[0])
    close("lse", got[1], right[1])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("family", ["paged", "mla"])
def test_a_prefix_split_over_ranks_is_the_unsplit_call_in_extend(family, ranks):
    """The ranks hold the prefix, which ends with a page; the new tokens are the call's own, under their causal mask."""
    queries, prefix = [3, 1, 6], [8, 20, 0]
    step, right = flat(family, [(q, q + k) for q, k in zip(queries, prefix, strict=True)])
    table, starts = step.given["page_table"], step.given["cu_seqlens_q"]
    own = torch.full_like(table, 10**6)
    for n, k in enumerate(prefix):
        own[n, : table.shape[1] - k // P] = table[n, k // P :]
    parts = [KVPart(t, lens, starts, 6, int(lens.max())) for t, lens in dealt(table, prefix, ranks)]
    got = run(over(step, own, int32(*queries), parts), WHOLE, ("kv_parts_by_lse",))
    close("out", got[0], right[0])
    close("lse", got[1], right[1])


def test_new_rows_are_written_before_parts_are_read():
    """A part may name the very page that this call writes."""
    step = make(cached(page_size=P, dtype="float64", save_kv_cache=True), ((2, 6),), 0, new=True)
    page = step.given["page_table"][:, 1:2]
    part = KVPart(page, int32(2), int32(0, 2), 2, 2)
    got = run(over(step, step.given["page_table"], int32(6), [part]), WHOLE, ("kv_parts_by_lse",))
    after = dataclasses.replace(step, request=dataclasses.replace(step.request, save_kv_cache=None))
    plain = {name: value for name, value in step.given.items() if name not in ("key", "value")}
    again = over(dataclasses.replace(after, given=plain), step.given["page_table"], int32(6), [part])
    assert torch.equal(got, run(again, WHOLE, ("kv_parts_by_lse",)))


# -------------------------------------------------------------------------------------------------------- the offer


def test_decode_asks_for_decode_when_every_group_is_one_query():
    """So that a kernel that only decodes can serve split KV."""
    decode = {"phase": "decode", "s_relation": "one", "causal": "none", "kv_parts": 3}
    (rewrite,) = offers("kv_parts_by_lse", cached(**decode, sinks=True))
    own, part = rewrite.inner
    assert [(r.phase, r.s_relation, r.sinks, r.lse) for r in (own, part)] == [("decode", "one", False, True)] * 2
    assert (rewrite.cost, rewrite.detail) == (19.0, "3 parts besides the call's own keys")
    (rewrite,) = offers("kv_parts_by_lse", cached(**{**decode, "s_relation": "more", "kv_parts": 1}))
    assert [(r.phase, r.s_relation) for r in rewrite.inner] == [("decode", "one"), ("extend", "more")]
    assert rewrite.detail == "1 part besides the call's own keys"


def test_what_it_does_not_offer():
    assert families_of("kv_parts_by_lse", kv_parts=1, page_size=8) == {"paged", "mla"}
    for fields in ({"kv_parts": 0}, {"window": (3, -1)}, {"chunk": 4}, {"alibi": True}, {"tree": True, "mask": "bool"}):
        assert not offers("kv_parts_by_lse", cached(**{"kv_parts": 2, **fields})), fields
