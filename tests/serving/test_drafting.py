"""Trees from a draft model's probabilities: the best nodes of everything proposed, against a plain search."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from polyattn.errors import InvalidInputError
from polyattn.serving.speculative import TreeDraft, draw_children, wide_tree
from polyattn.serving.step.tree import DraftTree

SIZE = 9


@pytest.fixture
def table() -> Tensor:
    """log-probabilities [V, V] of the token after a token."""
    logits = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.log_softmax(2 * logits, -1)


def grown(table: Tensor, roots: Tensor, topk: int, steps: int) -> TreeDraft:
    draft = TreeDraft(roots, topk)
    beam = draft.grow(table[roots][:, None])
    for _ in range(steps - 1):
        beam = draft.grow(table[beam.tokens[:, -topk:]])
    return draft


def proposed(table: Tensor, root: int, topk: int, steps: int) -> dict[tuple[int, ...], float]:
    """Every candidate as the tokens that lead to it, with its log-probability: a beam search in plain Python."""
    beam = {(): 0.0}
    found = {}
    for _ in range(steps):
        level = {}
        for path, score in beam.items():
            values = table[path[-1] if path else root]
            for token in values.topk(topk).indices.tolist():
                level[(*path, token)] = score + float(values[token])
        found.update(level)
        beam = dict(sorted(level.items(), key=lambda item: -item[1])[:topk])
    return found


def paths(tree: DraftTree, tokens: Tensor) -> list[list[tuple[int, ...]]]:
    """The tokens that lead to each node, without the root's."""
    found = []
    for parents, row in zip(tree.parents.tolist(), tokens.tolist(), strict=True):
        here: list[tuple[int, ...]] = []
        for parent, token in zip(parents, row, strict=True):
            here.append(() if parent < 0 else (*here[parent], token))
        found.append(here)
    return found


@pytest.mark.parametrize("topk, steps, nodes", [(1, 4, 5), (2, 3, 7), (3, 3, 10), (4, 2, 21), (3, 1, 2), (2, 2, 1)])
def test_the_tree_holds_the_best_candidates(table: Tensor, topk: int, steps: int, nodes: int) -> None:
    roots = torch.tensor([3, 0, 5])
    tree, tokens = grown(table, roots, topk, steps).best(nodes)
    assert tree.parents.shape == tokens.shape == (3, nodes)
    assert torch.equal(tokens[:, 0], roots)
    for root, here in zip(roots.tolist(), paths(tree, tokens), strict=True):
        candidates = proposed(table, root, topk, steps)
        best = sorted(candidates, key=lambda path: -candidates[path])[: nodes - 1]
        assert here[0] == ()
        assert sorted(here[1:]) == sorted(best)


def test_levels_come_one_after_the_other(table: Tensor) -> None:
    tree, _ = grown(table, torch.arange(SIZE), 3, 3).best(12)
    assert (tree.depths.diff(dim=1) >= 0).all()


def test_one_continuation_makes_a_chain(table: Tensor) -> None:
    tree, tokens = grown(table, torch.tensor([3]), 1, 4).best(5)
    assert torch.equal(tree.parents, DraftTree.chain(1, 5).parents)
    wanted = [3]
    for _ in range(4):
        wanted.append(int(table[wanted[-1]].argmax()))
    assert tokens[0].tolist() == wanted


def test_certain_children_never_come_without_their_parents() -> None:
    # Every score ties: each node has one continuation of probability 1, the others have none.
    table = torch.full((4, 4), -torch.inf)
    table[torch.arange(4), (torch.arange(4) + 1) % 4] = 0.0
    for nodes in range(1, 12):
        tree, _ = grown(table, torch.tensor([0]), 2, 3).best(nodes)
        assert tree.parents.tolist()[0][0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(tree.parents.tolist()[0]) if node)


def test_beams_are_trees_of_their_own(table: Tensor) -> None:
    draft = TreeDraft(torch.tensor([2, 6]), 2)
    beam = draft.grow(table[torch.tensor([2, 6])][:, None])
    assert beam.tree.parents.tolist() == [[-1, 0, 0]] * 2
    for level in (2, 3):
        before = paths(beam.tree, beam.tokens)
        beam = draft.grow(table[beam.tokens[:, -2:]])
        assert beam.tree.parents.shape == beam.tokens.shape == (2, 1 + 2 * level)
        for root, here, there in zip((2, 6), paths(beam.tree, beam.tokens), before, strict=True):
            assert here[:-2] == there
            candidates = {p: s for p, s in proposed(table, root, 2, level).items() if len(p) == level}
            assert sorted(here[-2:]) == sorted(sorted(candidates, key=lambda p: -candidates[p])[:2])


def test_nothing_is_read_on_the_host() -> None:
    roots = torch.zeros(3, dtype=torch.int64, device="meta")
    draft = TreeDraft(roots, 2)
    draft.grow(torch.zeros(3, 1, SIZE, device="meta"))
    draft.grow(torch.zeros(3, 2, SIZE, device="meta"))
    tree, tokens = draft.best(5)
    assert tree.parents.shape == tokens.shape == (3, 5)


def test_children_are_drawn_without_replacement_in_order() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    rows = 200_000
    drawn = draw_children(probs.expand(rows, 4), 3, generator=torch.Generator().manual_seed(1))
    assert all(len(set(row)) == 3 for row in drawn[:500].tolist())
    counts = torch.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16).reshape(4, 4)
    statistic = 0.0
    for first, second in itertools.permutations(range(4), 2):
        expected = rows * float(probs[first] * probs[second] / (1 - probs[first]))
        statistic += (float(counts[first, second]) - expected) ** 2 / expected
    assert statistic < 11 + 5 * (2 * 11) ** 0.5
    assert counts.diagonal().sum() == 0


def test_drawing_more_than_there_is_fills_up() -> None:
    drawn = draw_children(torch.tensor([[0.0, 1.0, 0.0]]), 2)
    assert drawn[0, 0] == 1
    assert drawn[0, 1] in (0, 2)


@pytest.mark.parametrize(
    "widths, parents",
    [((), [-1]), ((1, 1), [-1, 0, 1]), ((2, 2), [-1, 0, 0, 1, 1, 2, 2]), ((3, 1), [-1, 0, 0, 0, 1, 2, 3])],
)
def test_wide_trees(widths: tuple[int, ...], parents: list[int]) -> None:
    assert wide_tree(widths, 2).parents.tolist() == [parents] * 2


def refused(function, *args) -> str:
    with pytest.raises(InvalidInputError) as caught:
        function(*args)
    return str(caught.value)


def test_refusals(table: Tensor) -> None:
    root = torch.tensor([1])
    assert "root is (1,) torch.int32" in refused(TreeDraft, root.int(), 2)
    assert "topk=0 leaves a draft without tokens" in refused(TreeDraft, root, 0)
    draft = TreeDraft(root, 2)
    assert "[1, 1, V] is needed" in refused(draft.grow, table[None])
    assert "topk=2 continuations of 1 tokens" in refused(draft.grow, torch.zeros(1, 1, 1))
    draft.grow(table[root][:, None])
    assert "a root and 2 candidates; allowed: 1 to 3" in refused(draft.best, 4)
    assert "a tree of 0 nodes" in refused(draft.best, 0)
    assert "count=4 children of 3 tokens; allowed: 1 to 3" in refused(draw_children, torch.ones(3), 4)
    assert "widths=(2, 0) has a level without nodes" in refused(wide_tree, (2, 0), 1)
