"""ForwardBatch: what it says of itself, and what it refuses."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from polyattn.contract import AttentionRequest
from polyattn.errors import InvalidInputError
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.tree import DraftTree

EXTEND: dict[str, Any] = {"mode": ForwardMode.EXTEND, "rows": [4, 1], "seq_lens": [7, 3], "query_lens": [2, 3]}
DECODE: dict[str, Any] = {"mode": ForwardMode.DECODE, "rows": [4, 1], "seq_lens": [7, 3], "query_lens": [1, 1]}
VERIFY: dict[str, Any] = {"mode": ForwardMode.TARGET_VERIFY, "rows": [4, 1], "seq_lens": [7, 3], "query_lens": [3, 3]}


def test_every_mode_has_a_phase_of_the_request():
    phases = {mode.name: mode.phase for mode in ForwardMode}
    assert phases == {
        "EXTEND": "extend",
        "DECODE": "decode",
        "MIXED": "extend",
        "TARGET_VERIFY": "verify",
        "DRAFT_EXTEND": "extend",
        "IDLE": "decode",
    }
    for phase in phases.values():
        AttentionRequest(phase=phase).normalised()


def test_an_extend_batch():
    batch = ForwardBatch(**EXTEND)
    assert (batch.sequences, batch.tokens, batch.max_seqlen_q, batch.max_seqlen_k) == (2, 5, 3, 7)
    assert batch.prefix_lens == [5, 0]
    assert batch.cu_seqlens_q == [0, 2, 5]
    assert batch.positions() == [5, 6, 0, 1, 2]


def test_padding_has_the_query_length_of_the_rows():
    batch = ForwardBatch(**DECODE, padding=3)
    assert (batch.sequences, batch.tokens) == (5, 5)
    assert batch.all_query_lens == [1] * 5
    assert batch.positions() == [6, 2, 0, 0, 0]
    tree = DraftTree.from_parents([[-1, 0, 0], [-1, 0, 1]])
    assert ForwardBatch(**VERIFY, tree=tree, padding=1).tokens == 9
    assert ForwardBatch(ForwardMode.IDLE, [], [], [], padding=2).tokens == 2
    assert ForwardBatch(**EXTEND, padding=1, padding_query_len=3).cu_seqlens_q == [0, 2, 5, 8]


def test_positions_of_a_tree_count_depths():
    tree = DraftTree.from_parents([[-1, 0, 0], [-1, 0, 1]])
    assert ForwardBatch(**VERIFY, tree=tree).positions() == [4, 5, 5, 0, 1, 2]
    assert ForwardBatch(**VERIFY).positions() == [4, 5, 6, 0, 1, 2]


def test_an_idle_batch_is_empty():
    batch = ForwardBatch(ForwardMode.IDLE, [], [], [])
    assert (batch.sequences, batch.tokens, batch.max_seqlen_q, batch.max_seqlen_k) == (0, 0, 0, 0)
    assert batch.positions() == []


def test_next_and_follows():
    batch = ForwardBatch(**DECODE, padding=1)
    assert batch.max_seqlen_k == 7
    following = batch.next()
    assert following == ForwardBatch(ForwardMode.DECODE, [4, 1], [8, 4], [1, 1], padding=1)
    assert (following.max_seqlen_k, batch.max_seqlen_k) == (8, 7)
    assert following.follows(batch)
    assert following.next().follows(following)
    assert not batch.follows(batch)
    assert not following.next().follows(batch)
    for changed in ({"rows": [4, 2]}, {"seq_lens": [8, 5]}, {"rows": [4], "seq_lens": [8], "query_lens": [1]}):
        assert not ForwardBatch(**{**DECODE, "seq_lens": [8, 4], **changed}, padding=1).follows(batch)
    assert not ForwardBatch(**{**DECODE, "seq_lens": [8, 4]}).follows(batch)
    assert not ForwardBatch(**{**DECODE, "mode": ForwardMode.EXTEND, "seq_lens": [8, 4]}, padding=1).follows(batch)


def test_a_padded_batch_is_the_batch_made_with_padding():
    tree = DraftTree.from_parents([[-1, 0, 0], [-1, 0, 1]])
    for batch, tokens in ((ForwardBatch(**DECODE), 1), (ForwardBatch(**VERIFY, tree=tree), 3)):
        _ = batch.tokens, batch.max_seqlen_k, batch.cu_seqlens_q, batch.all_query_lens, batch.sequences
        padded, want = batch.padded(2, tokens), dataclasses.replace(batch, padding=2)
        assert padded == want
        for name in ("sequences", "tokens", "max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "all_query_lens"):
            assert getattr(padded, name) == getattr(want, name), name
        assert batch.padding == 0
        assert batch.padded(0, tokens) is batch


def test_what_follows_is_known_by_how_it_was_made(monkeypatch):
    """Without a look at the lengths, which grow with the batch; what was made in another way is compared."""
    batch = ForwardBatch(**DECODE)
    first, following = batch.padded(2, 1), batch.next().padded(2, 1)
    assert ForwardBatch(**{**DECODE, "seq_lens": [8, 4]}, padding=2).follows(first)
    other = ForwardBatch(**{**DECODE, "rows": [4, 2]}).padded(2, 1)
    monkeypatch.setattr(ForwardBatch, "rows", property(lambda batch: pytest.fail("compared")), raising=False)
    assert following.follows(first)
    assert not following.padded(0, 1).follows(batch), "other padding"
    assert pickle.loads(pickle.dumps(following)).padding == 2
    with pytest.raises(pytest.fail.Exception, match="compared"):
        following.follows(other)


def test_the_longest_row_of_what_follows():
    for lens, cross in (([8, 4], False), ([1, 1], False), ([0, 0], True), ([5, 0], True)):
        batch = ForwardBatch(**{**DECODE, "seq_lens": lens}, cross=cross)
        for _ in range(3):
            batch = batch.next()
            again = ForwardBatch(**{**DECODE, "seq_lens": batch.seq_lens}, cross=cross)
            assert batch.max_seqlen_k == again.max_seqlen_k
            assert batch.padded(2, 1).max_seqlen_k == again.max_seqlen_k
    nobody = ForwardBatch(ForwardMode.DECODE, [], [], [])
    assert nobody.next().max_seqlen_k == nobody.max_seqlen_k == 0


def test_only_a_decode_step_has_a_next():
    with pytest.raises(InvalidInputError, match="what follows a step in mode EXTEND is not known"):
        ForwardBatch(**EXTEND).next()


def test_keys_of_an_encoder_may_be_fewer_than_queries():
    batch = ForwardBatch(**{**EXTEND, "seq_lens": [1, 0]}, cross=True)
    assert batch.max_seqlen_k == 3  # a bound


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "extend"}, "mode='extend' is no ForwardMode: use one of EXTEND, DECODE"),
        ({"rows": [4]}, "one row, one sequence length and one query length each, not 1 rows, 2 seq_lens, 2 query_lens"),
        ({"padding": -1}, "padding=-1: it counts rows"),
        ({"rows": [4, 4]}, r"rows=\[4, 4\]: every row is 0 or more and comes once"),
        ({"rows": [-1, 4]}, r"rows=\[-1, 4\]: every row"),
        ({"query_lens": [0, 3]}, "row 4 has seq_len 7 and query_len 0: a row has 1 new token or more"),
        ({"query_lens": [2, 4]}, "row 1 has seq_len 3 and query_len 4.*new tokens included"),
        ({"seq_lens": [7, -1], "cross": True}, "row 1 has seq_len -1"),
        ({"seq_lens": [7, 3.0]}, r"seq_lens=\[7, 3.0\]: 'float' object.*a batch is made of whole numbers"),
        ({"rows": ("a", "b")}, r"rows=\('a', 'b'\): 'str' object"),
        ({"mode": ForwardMode.IDLE}, "an IDLE batch has no rows, not 2"),
        ({"mode": ForwardMode.DECODE}, "a DECODE batch has 1 new token for each row, not 3"),
        ({"padding": 1}, r"query_lens are \[2, 3\], and rows of padding need a length: give padding_query_len"),
        ({"padding": 1, "padding_query_len": 0}, "padding_query_len=0: a row of padding has 1 token or more"),
        ({"tree": DraftTree.chain(2, 3)}, "a tree goes with mode TARGET_VERIFY, not with EXTEND"),
        (
            {"tree": DraftTree.chain(2, 3), "mode": ForwardMode.TARGET_VERIFY},
            r"3 drafts for each of 2 rows, the batch 2 rows with query_lens \[2, 3\]",
        ),
        ({**VERIFY, "tree": DraftTree.chain(1, 3)}, "3 drafts for each of 1 rows, the batch 2 rows"),
        (
            {**VERIFY, "tree": DraftTree.chain(2, 3), "padding": 1, "padding_query_len": 2},
            "padding_query_len=2: every row of this TARGET_VERIFY batch has 3 new tokens, those of padding too",
        ),
        ({**DECODE, "padding": 1, "padding_query_len": 2}, "padding_query_len=2: every row of this DECODE batch has 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        ForwardBatch(**{**EXTEND, **changes})


def test_a_scheduler_goes_on_with_its_own_lists():
    running, lens, new = [4, 1], [7, 3], [1, 1]
    batch = ForwardBatch(ForwardMode.DECODE, running, lens, new)
    running[1], lens[1] = 2, 9
    assert (batch.rows, batch.seq_lens, batch.query_lens) == ([4, 1], [7, 3], [1, 1])
    assert not ForwardBatch(ForwardMode.DECODE, running, [8, 4], new).follows(batch), "row 2 is not row 1 a token later"


def test_numbers_are_those_of_the_host():
    batch = ForwardBatch(ForwardMode.DECODE, range(2), torch.tensor([7, 3]).numpy(), [1, 1])
    assert (batch.rows, batch.seq_lens) == ([0, 1], [7, 3])
    batch = ForwardBatch(ForwardMode.DECODE, (0, 1), list(torch.tensor([7, 3]).numpy()), [True, 1])
    assert {type(number) for numbers in (batch.rows, batch.seq_lens) for number in numbers} == {int}
    with pytest.raises(InvalidInputError, match=r"rows is a tensor, and a batch is made of host numbers: pass rows.to"):
        ForwardBatch(ForwardMode.DECODE, torch.tensor([0, 1]), [7, 3], [1, 1])


def test_sequences_may_attend_one_encoder():
    assert ForwardBatch(ForwardMode.DECODE, [2, 2], [5, 5], [1, 1], cross=True).rows == [2, 2]


def test_more_padding_and_padding_that_cannot_be():
    batch = ForwardBatch(**DECODE)
    assert batch.padded(2, 1).padded(1, 1) == ForwardBatch(**DECODE, padding=3)
    with pytest.raises(InvalidInputError, match="padding=-1: it counts rows, 0 or more"):
        batch.padded(-1, 1)
    with pytest.raises(InvalidInputError, match="padding_query_len=3: every row of this DECODE batch has 1 new tokens"):
        batch.padded(2, 3)
