"""Draft trees: the forms they are kept in, and what they mean for attention (S8)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyattn
from polyattn.errors import InvalidInputError
from polyattn.semantics import reference
from polyattn.serving.step.tree import DraftTree

SETTINGS = settings(max_examples=60, deadline=None)


@st.composite
def parents(draw, most: int = 12) -> list[list[int]]:
    """[N, N_d]; several roots are legal."""
    n, nodes = draw(st.integers(1, 3)), draw(st.integers(1, most))
    return [[draw(st.integers(-1, i - 1)) for i in range(nodes)] for _ in range(n)]


def same(tree: DraftTree, listed: list[list[int]]) -> bool:
    return tree.parents.dtype == torch.int32 and tree.parents.tolist() == listed


@SETTINGS
@given(parents())
def test_mask_and_depths_are_those_of_the_reference(listed):
    tree = DraftTree.from_parents(listed)
    for n, row in enumerate(listed):
        assert torch.equal(tree.mask[n], reference.tree_mask(row))
        depths = []
        for parent in row:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        assert tree.depths[n].tolist() == depths


def test_a_long_chain_has_the_causal_mask():
    for nodes in (1, 2, 3, 31, 32, 33, 64):
        tree = DraftTree.chain(2, nodes)
        assert torch.equal(tree.mask, torch.ones(2, nodes, nodes).tril().bool())
        assert tree.depths.tolist() == [list(range(nodes))] * 2


@SETTINGS
@given(parents(), st.data())
def test_round_trips(listed, data):
    tree = DraftTree.from_parents(listed)
    nodes = tree.draft_tokens
    assert same(DraftTree.from_qlen_only(tree.to_qlen_only(), nodes), listed)
    assert same(DraftTree.from_bitmask(tree.to_bitmask(), nodes), listed)
    prefixes = [data.draw(st.integers(0, 5)) for _ in listed]
    assert same(DraftTree.from_full_mask(tree.to_full_mask(prefixes), prefixes, nodes), listed)
    _, first, sibling = tree.links()
    assert same(DraftTree.from_links(first, sibling), listed)
    assert same(DraftTree.from_links(first.int(), sibling.int()), listed)


@SETTINGS
@given(parents(), st.data())
def test_full_mask_is_rows_of_prefix_and_drafts(listed, data):
    prefixes = [data.draw(st.integers(0, 5)) for _ in listed]
    want = [reference.verify_mask(p, row).flatten() for p, row in zip(prefixes, listed, strict=True)]
    assert torch.equal(DraftTree.from_parents(listed).to_full_mask(prefixes), torch.cat(want))


@SETTINGS
@given(parents(20))
def test_bit_mask_is_little_endian(listed):
    tree = DraftTree.from_parents(listed)
    bits = tree.to_bitmask()
    nodes = tree.draft_tokens
    assert bits.dtype == (torch.uint8 if nodes <= 8 else torch.uint16 if nodes <= 16 else torch.uint32)
    want = [sum(1 << j for j in range(nodes) if row[j]) for row in tree.mask.flatten(0, 1).tolist()]
    assert bits.long().tolist() == want


def test_bit_mask_of_32_drafts():
    tree = DraftTree.chain(1, 32)
    assert tree.to_bitmask().long().tolist() == [2 ** (i + 1) - 1 for i in range(32)]
    assert same(DraftTree.from_bitmask(tree.to_bitmask(), 32), tree.parents.tolist())


@SETTINGS
@given(parents())
def test_links_walk_the_children_in_order(listed):
    index, first, sibling = DraftTree.from_parents(listed).links()
    assert index.flatten().tolist() == list(range(index.numel()))
    assert {t.dtype for t in (index, first, sibling)} == {torch.int64}
    for n, row in enumerate(listed):
        for node in range(len(row)):
            found, child = [], int(first[n, node])
            while child >= 0:
                found.append(child)
                child = int(sibling[n, child])
            assert found == [i for i, parent in enumerate(row) if parent == node]


@SETTINGS
@given(parents(6), st.data())
def test_attn_mask_is_the_verify_mask(listed, data):
    tree = DraftTree.from_parents(listed)
    nodes = tree.draft_tokens
    prefixes = [data.draw(st.integers(0, 5)) for _ in listed]
    seq_lens = torch.tensor([p + nodes for p in prefixes], dtype=torch.int32)
    longest = max(prefixes) + nodes + data.draw(st.integers(0, 2))
    mask = tree.attn_mask(seq_lens, longest)
    assert mask.shape == (len(listed), 1, nodes, longest)
    for n, row in enumerate(listed):
        assert torch.equal(mask[n, 0, :, : prefixes[n] + nodes], reference.verify_mask(prefixes[n], row))


# ------------------------------------------------------------------------------------------------------- attention

H_Q, H_KV, D, PAGE = 4, 2, 8, 4


class Pages:
    """Sequences of random keys in pages in disorder."""

    def __init__(self, prefixes: list[int], drafts: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.drafts, self.lens = drafts, [p + drafts for p in prefixes]
        columns = max(-(-n // PAGE) for n in self.lens)
        count = len(prefixes) * columns
        self.table = torch.randperm(count, generator=generator).int().view(len(prefixes), columns)
        self.key, self.value = normal(count, PAGE, H_KV, D), normal(count, PAGE, H_KV, D)
        self.query = normal(len(prefixes) * drafts, H_Q, D)

    def dense(self, n: int) -> tuple[Tensor, Tensor]:
        """[1, S_k, H_kv, D] of sequence n."""
        rows = (pool[self.table[n].long()].flatten(0, 1)[: self.lens[n]] for pool in (self.key, self.value))
        key, value = (t.unsqueeze(0) for t in rows)
        return key, value

    def verify(self, **given: object) -> Tensor:
        counts = torch.arange(len(self.lens) + 1, dtype=torch.int32) * self.drafts
        return polyattn.paged_attention(
            self.query,
            self.key,
            self.value,
            page_table=self.table,
            seq_lens=torch.tensor(self.lens, dtype=torch.int32),
            cu_seqlens_q=counts,
            max_seqlen_q=self.drafts,
            max_seqlen_k=max(self.lens),
            backend="reference",
            **given,
        )


@settings(max_examples=25, deadline=None)
@given(parents(6), st.data())
def test_verify_under_a_tree_is_dense_attention_under_its_mask(listed, data):
    tree = DraftTree.from_parents(listed)
    prefixes = [data.draw(st.integers(0, 9)) for _ in listed]
    pages = Pages(prefixes, tree.draft_tokens, data.draw(st.integers(0, 10**6)))
    seq_lens = torch.tensor(pages.lens, dtype=torch.int32)
    out = pages.verify(attn_mask=tree.attn_mask(seq_lens, max(pages.lens)), tree=True)
    for n, row in enumerate(listed):
        key, value = pages.dense(n)
        query = pages.query.unflatten(0, (len(listed), -1))[n : n + 1]
        mask = reference.verify_mask(prefixes[n], row)[None, None]
        want = polyattn.attention(query, key, value, attn_mask=mask, backend="reference")
        torch.testing.assert_close(out.unflatten(0, (len(listed), -1))[n : n + 1], want, rtol=1e-12, atol=1e-12)


def test_a_chain_is_a_causal_extend():
    for drafts, prefixes in itertools.product((1, 2, 5), ([0, 3], [9, 4])):
        pages = Pages(prefixes, drafts, seed=drafts)
        tree = DraftTree.chain(len(prefixes), drafts)
        mask = tree.attn_mask(torch.tensor(pages.lens, dtype=torch.int32), max(pages.lens))
        torch.testing.assert_close(
            pages.verify(attn_mask=mask, tree=True), pages.verify(causal=True), rtol=1e-12, atol=1e-12
        )


# --------------------------------------------------------------------------------------------------------- refusals


def mask_of(listed: list[list[int]]) -> Tensor:
    return DraftTree.from_parents(listed).mask.clone()


def without_self() -> Tensor:
    mask = mask_of([[-1, 0, 0]])
    mask[0, 1, 1] = False
    return mask.flatten()


def grandparent_only() -> Tensor:
    mask = mask_of([[-1, 0, 1]])
    mask[0, 2, 0] = False
    return mask.flatten()


def hidden_prefix() -> Tensor:
    full = DraftTree.chain(2, 2).to_full_mask([3, 1])
    full[1] = False
    return full


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftTree(torch.zeros(2, 3)), r"parents is \[2, 3\] torch.float32; int32 \[N, N_d\]"),
        (lambda: DraftTree([[-1]]), "parents is a list; int32"),
        (lambda: DraftTree(torch.zeros(2, 0, dtype=torch.int32)), r"parents is \[2, 0\].*N_d >= 1"),
        (lambda: DraftTree.from_parents([[-1, 2, 0]]), r"parents\[0, 1\] = 2: .* come before it \(-1 to 0\)"),
        (lambda: DraftTree.from_parents([[-2]]), r"parents\[0, 0\] = -2"),
        (lambda: DraftTree.from_parents([[-1, 0], [-1]]), r"rows of \[1, 2\] nodes.*pad a smaller tree"),
        (lambda: DraftTree.from_qlen_only(without_self(), 3), r"node 1 of request 0 must see itself.*it sees \[0\]"),
        (lambda: DraftTree.from_qlen_only(grandparent_only(), 3), r"node 2 of request 0 .*it sees \[1, 2\]"),
        (lambda: DraftTree.from_qlen_only(torch.ones(5, dtype=torch.bool), 2), "mask is .*, 4 for each request"),
        (lambda: DraftTree.from_qlen_only(torch.ones(4), 2), "a flat tensor of torch.bool is needed"),
        (lambda: DraftTree.from_full_mask(torch.ones(2, 2, dtype=torch.bool), [1], 1), "a flat tensor of torch.bool"),
        (lambda: DraftTree.from_full_mask(torch.ones(7, dtype=torch.bool), [3, 1], 2), "7 cells; 2 drafts.*have 16"),
        (lambda: DraftTree.from_full_mask(hidden_prefix(), [3, 1], 2), r"hides a key before the drafts \(cell 1\)"),
        (lambda: DraftTree.chain(2, 2).to_full_mask([1]), "prefix_lens has 1 entries for 2 trees"),
        (lambda: DraftTree.chain(2, 0), r"chain\(2, 0\): 0 or more sequences and 1 or more drafts"),
        (lambda: DraftTree.chain(-1, 2), r"chain\(-1, 2\)"),
        (lambda: DraftTree.from_qlen_only(torch.ones(4, dtype=torch.bool), 0), "draft_tokens=0: a tree has 1 node"),
        (lambda: DraftTree.from_full_mask(torch.ones(4, dtype=torch.bool), [1], 0), "draft_tokens=0"),
        (lambda: DraftTree.from_bitmask(torch.ones(4, dtype=torch.uint8), 0), "draft_tokens=0"),
        (lambda: DraftTree.chain(1, 33).to_bitmask(), "33 drafts: a bit mask holds up to 32; use to_qlen_only"),
        (lambda: DraftTree.from_bitmask(torch.ones(9, dtype=torch.uint8), 9), "a flat tensor of torch.uint16"),
        (
            lambda: DraftTree.from_links(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)),
            r"next_token is \[1, 2\], next_sibling \[2\]",
        ),
        (
            lambda: DraftTree.from_links(torch.tensor([[2, -1, -1]]), torch.tensor([[-1, -1, 1]])),
            "no tree in order: the first child",
        ),
        (
            lambda: DraftTree.chain(2, 2).attn_mask(torch.ones(1, dtype=torch.int32), 4),
            r"seq_lens is \[1\] and max_seqlen_k 4; these trees have 2 rows of 2 drafts",
        ),
        (lambda: DraftTree.chain(1, 2).attn_mask(torch.ones(1, dtype=torch.int32), 1), "max_seqlen_k 1"),
    ],
)
def test_what_is_no_tree_is_refused(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_contents_on_a_device_are_not_read(monkeypatch):
    monkeypatch.setattr("polyattn.serving.step.tree.contents_readable", lambda tensor: False)
    DraftTree.from_parents([[-1, 2, 0]])
    DraftTree.from_qlen_only(without_self(), 3)
