"""Accepted drafts: greedy equals plain decoding, sampled is exact in distribution.

The models are Markov: the distribution after a node depends on its token, so every path can be summed over. Exactness
is shown twice: by enumeration (all drafts with their weights, all cells of a grid of uniforms on whose lines every
decision falls), and by a chi-square test on 200,000 samples of random distributions.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from polyattn.errors import InvalidInputError
from polyattn.serving.speculative import (
    Accepted,
    TreeDraft,
    draw_children,
    drawn_accept,
    greedy_accept,
    sampled_accept,
    wide_tree,
)
from polyattn.serving.step.tree import DraftTree

SAMPLES = 200_000


def distribution(table: Tensor, root: int, length: int) -> Tensor:
    """Plain decoding: [V] * length, the probability of each sequence after `root`."""
    found = table[root]
    for _ in range(length - 1):
        found = found[..., None] * table
    return found


def completed(accepted: Accepted, table: Tensor, length: int, weights: Tensor) -> Tensor:
    """The distribution of the first `length` tokens when plain decoding goes on after those that were accepted."""
    size = table.shape[0]
    total = torch.zeros([size] * length, dtype=torch.float64)
    counts = accepted.lengths + 1
    for count in range(1, int(counts.max()) + 1):
        of = counts == count
        kept = min(count, length)
        index = torch.zeros_like(counts[of])
        for column in range(kept):
            index = index * size + accepted.tokens[of, column]
        mass = torch.zeros(size**kept, dtype=torch.float64).index_add_(0, index, weights[of])
        mass = mass.reshape([size] * kept)
        for _ in range(length - kept):
            mass = mass[..., None] * table
        total += mass
    return total


def chi_square_fits(counts: Tensor, expected: Tensor) -> bool:
    """Within five standard deviations of what chance alone gives."""
    assert expected.min() >= 5, "cells too small for the test"
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = counts.numel() - 1
    return statistic < freedom + 5 * math.sqrt(2 * freedom)


def random_table(size: int, seed: int, temperature: float = 1.0) -> Tensor:
    logits = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.softmax(logits / temperature, -1)


def grid(cells: int, columns: int) -> Tensor:
    """[cells ** columns, columns]: the middle of every cell."""
    middle = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    return torch.cartesian_prod(*[middle] * columns).reshape(-1, columns)


# Greedy ---------------------------------------------------------------------------------------------------------------


def plain_greedy(table: Tensor, root: int, count: int) -> list[int]:
    found = [root]
    for _ in range(count):
        found.append(int(table[found[-1]].argmax()))
    return found[1:]


@pytest.mark.parametrize("topk, steps, drafts", [(1, 3, 4), (2, 2, 5), (3, 3, 8), (4, 2, 10)])
def test_greedy_speculation_gives_the_tokens_of_plain_decoding(topk: int, steps: int, drafts: int) -> None:
    size, wanted = 12, 40
    target = random_table(size, 1)
    draft = torch.softmax(target.log() + 0.8 * random_table(size, 2).log(), -1)  # agrees often, not always
    roots = torch.arange(3)
    done: list[list[int]] = [[] for _ in roots]
    accepted_drafts = 0
    while min(map(len, done)) < wanted:
        growing = TreeDraft(roots, topk)
        beam = growing.grow(draft.log()[roots][:, None])
        for _ in range(steps - 1):
            beam = growing.grow(draft.log()[beam.tokens[:, -topk:]])
        tree, tokens = growing.best(drafts)
        found = greedy_accept(tree, tokens, target[tokens])
        for row, new in zip(done, found.lists()[1], strict=True):
            row += new
        accepted_drafts += int(found.lengths.sum())
        roots = found.bonus
    for first, row in enumerate(done):
        assert row[:wanted] == plain_greedy(target, first, wanted)
    assert accepted_drafts > wanted  # else the drafts were never tested


def test_greedy_paths_lengths_and_bonus() -> None:
    #      0        row 0: 0 -> 2 -> 4 is what the target says; row 1: nothing is.
    #    1   2
    #   3   4 5
    tree = DraftTree.from_parents([[-1, 0, 0, 1, 2, 2]] * 2)
    tokens = torch.tensor([[7, 1, 2, 3, 4, 5], [7, 1, 2, 3, 4, 5]])
    predicted = torch.tensor([[2, 0, 4, 0, 6, 0], [6, 1, 4, 5, 6, 7]])
    logits = torch.nn.functional.one_hot(predicted, 8).float()
    found = greedy_accept(tree, tokens, logits)
    assert found.lists() == ([[0, 2, 4], [0]], [[2, 4, 6], [6]])
    assert found.lengths.tolist() == [2, 0]
    assert found.bonus.tolist() == [6, 6]
    assert found.nodes.tolist()[1] == [0, -1, -1, -1, -1, -1]


def test_ties_go_to_the_lowest_token_as_in_plain_decoding() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, :, 2:] = 1.0  # 2 and 3 tie
    tree = DraftTree.from_parents([[-1, 0, 0]])
    found = greedy_accept(tree, torch.tensor([[0, 3, 2]]), logits)
    assert found.lists() == ([[0, 2]], [[2, 2]])


def test_of_siblings_with_one_token_the_first_counts() -> None:
    tree = DraftTree.from_parents([[-1, 0, 0, 1, 2]])
    tokens = torch.tensor([[0, 1, 1, 2, 3]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 3, 3, 0, 0]]), 4).float()
    found = greedy_accept(tree, tokens, logits)
    assert found.lists() == ([[0, 1]], [[1, 3]])  # not node 2 with its fitting child


def test_a_root_alone_gives_the_bonus_token() -> None:
    logits = torch.tensor([[[0.0, 3.0]]])
    found = greedy_accept(DraftTree.chain(1, 1), torch.tensor([[0]]), logits)
    assert found.lists() == ([[0]], [[1]])


def test_further_roots_are_on_no_path() -> None:
    tree = DraftTree.from_parents([[-1, -1, 0]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 1, 0]]), 2).float()
    assert greedy_accept(tree, torch.tensor([[0, 1, 1]]), logits).lists() == ([[0, 2]], [[1, 0]])


# Sampled, by enumeration ----------------------------------------------------------------------------------------------

P8 = torch.tensor([[2, 3, 3], [4, 3, 1], [1, 5, 2]], dtype=torch.float64) / 8
Q8 = torch.tensor([[4, 2, 2], [2, 2, 4], [2, 4, 2]], dtype=torch.float64) / 8


def drawn_chains(draft: Tensor, root: int, drafts: int) -> tuple[Tensor, Tensor]:
    """Every chain of drafts, [M, 1 + drafts], and its probability under the draft model."""
    chains = [(root, *rest) for rest in itertools.product(range(draft.shape[0]), repeat=drafts)]
    weights = [math.prod(float(draft[a, b]) for a, b in itertools.pairwise(chain)) for chain in chains]
    return torch.tensor(chains), torch.tensor(weights, dtype=torch.float64)


def every_case(tokens: Tensor, weights: Tensor, cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each row of tokens with each cell of the grid: tokens, uniforms, weights."""
    uniforms = grid(cells, tokens.shape[1])
    count = len(uniforms)
    return (
        tokens.repeat_interleave(count, 0),
        uniforms.repeat(len(tokens), 1),
        weights.repeat_interleave(count) / count,
    )


@pytest.mark.parametrize("root", [0, 1, 2])
def test_a_chain_is_exact_by_enumeration(root: int) -> None:
    tokens, uniforms, weights = every_case(*drawn_chains(Q8, root, 2), cells=24)
    tree = DraftTree.chain(len(tokens), 3)
    found = sampled_accept(tree, tokens, P8[tokens], Q8[tokens], uniforms=uniforms)
    got = completed(found, P8, 3, weights)
    torch.testing.assert_close(got, distribution(P8, root, 3), atol=1e-12, rtol=0)
    assert 0 < found.lengths.double().mul(weights).sum() < 2


def test_chosen_candidates_are_exact_by_enumeration() -> None:
    # Two continuations of the root and one of the first, whatever they are: no draft_probs.
    table = torch.tensor([[2, 2, 4], [1, 2, 5], [4, 4, 0]], dtype=torch.float64) / 8
    one = torch.ones(1, dtype=torch.float64)
    tokens, uniforms, weights = every_case(torch.tensor([[0, 2, 1, 1]]), one, cells=8)
    tree = DraftTree.from_parents(torch.tensor([[-1, 0, 0, 1]]).repeat(len(tokens), 1))
    found = sampled_accept(tree, tokens, table[tokens], uniforms=uniforms)
    torch.testing.assert_close(completed(found, table, 3, weights), distribution(table, 0, 3), atol=1e-12, rtol=0)
    assert (found.nodes[:, 1:3] == torch.tensor([1, 3])).all(1).double().mean() == 0.25


@pytest.mark.parametrize(
    "target, draft", [([1, 3, 3, 1], [2, 2, 2, 2]), ([1, 3, 4], [4, 2, 2]), ([0, 8, 0], [2, 2, 4])]
)
def test_children_without_replacement_are_exact_by_enumeration(target: list[int], draft: list[int]) -> None:
    p, q = (torch.tensor(numbers, dtype=torch.float64) / 8 for numbers in (target, draft))
    rows, weights = [], []
    for first, second in itertools.permutations(range(len(target)), 2):
        rows.append([0, first, second])
        weights.append(float(q[first] * q[second] / (1 - q[first])))
    tokens, uniforms, weight = every_case(torch.tensor(rows), torch.tensor(weights, dtype=torch.float64), cells=24)
    shape = (*tokens.shape, len(target))
    found = sampled_accept(wide_tree((2,), len(tokens)), tokens, p.expand(shape), q.expand(shape), uniforms=uniforms)
    table = p.expand(len(target), len(target))
    torch.testing.assert_close(completed(found, table, 1, weight), p, atol=1e-12, rtol=0)


# Sampled, by chi-square -----------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_chain_is_exact_in_distribution(temperature: float) -> None:
    target, draft = random_table(4, 11, temperature), random_table(4, 12)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.zeros(SAMPLES, 4, dtype=torch.int64)
    for column in range(3):
        tokens[:, column + 1] = draw_children(draft[tokens[:, column]], 1, generator=generator)[:, 0]
    found = sampled_accept(DraftTree.chain(SAMPLES, 4), tokens, target[tokens], draft[tokens], generator=generator)
    got = completed(found, target, 2, torch.ones(SAMPLES, dtype=torch.float64))
    assert chi_square_fits(got, SAMPLES * distribution(target, 0, 2))


def drawn_tree(draft: Tensor, widths: tuple[int, ...], rows: int, generator: torch.Generator) -> Tensor:
    """Tokens of `wide_tree(widths)` with root 0, drawn level by level."""
    level = torch.zeros(rows, 1, dtype=torch.int64)
    levels = [level]
    for width in widths:
        level = draw_children(draft[level], width, generator=generator).reshape(rows, -1)
        levels.append(level)
    return torch.cat(levels, 1)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("widths", [(3,), (2, 2), (3, 1)])
def test_a_drawn_tree_is_exact_in_distribution(widths: tuple[int, ...]) -> None:
    target, draft = random_table(5, 21), random_table(5, 22)
    generator = torch.Generator().manual_seed(7)
    tokens = drawn_tree(draft, widths, SAMPLES, generator)
    tree = wide_tree(widths, SAMPLES)
    found = sampled_accept(tree, tokens, target[tokens], draft[tokens], generator=generator)
    got = completed(found, target, 2, torch.ones(SAMPLES, dtype=torch.float64))
    assert chi_square_fits(got, SAMPLES * distribution(target, 0, 2))
    plain = sampled_accept(
        DraftTree.chain(SAMPLES, 2), tokens[:, :2], target[tokens[:, :2]], draft[tokens[:, :2]], generator=generator
    )
    # What the further candidates are for.
    assert (found.lengths > 0).double().mean() > (plain.lengths > 0).double().mean() + 0.02


def test_the_best_tree_is_exact_in_distribution() -> None:
    target, draft = random_table(5, 31), random_table(5, 32)
    growing = TreeDraft(torch.zeros(1, dtype=torch.int64), 2)
    beam = growing.grow(draft.log()[None, :1])
    beam = growing.grow(draft.log()[beam.tokens[:, -2:]])
    tree, tokens = growing.best(5)
    tree = DraftTree.from_parents(tree.parents.repeat(SAMPLES, 1))
    tokens = tokens.repeat(SAMPLES, 1)
    found = sampled_accept(tree, tokens, target[tokens], generator=torch.Generator().manual_seed(9))
    got = completed(found, target, 2, torch.ones(SAMPLES, dtype=torch.float64))
    assert chi_square_fits(got, SAMPLES * distribution(target, 0, 2))


def test_the_chi_square_test_sees_a_wrong_rule() -> None:
    # Drafts drawn at another temperature than draft_probs says: a common mistake.
    target, draft, said = random_table(4, 11), random_table(4, 12, 0.8), random_table(4, 12)
    generator = torch.Generator().manual_seed(5)
    tokens = drawn_tree(draft, (1, 1), SAMPLES, generator)
    found = sampled_accept(DraftTree.chain(SAMPLES, 3), tokens, target[tokens], said[tokens], generator=generator)
    got = completed(found, target, 2, torch.ones(SAMPLES, dtype=torch.float64))
    assert not chi_square_fits(got, SAMPLES * distribution(target, 0, 2))


# Sampled, edges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_certain_target_gives_greedy_decoding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, widths = 200, (3, 2)
    table = torch.nn.functional.one_hot(torch.randint(6, (6,), generator=generator), 6).to(dtype)
    draft = random_table(6, 4).to(dtype)
    tokens = drawn_tree(draft, widths, rows, generator)
    tree = wide_tree(widths, rows)
    wanted = greedy_accept(tree, tokens, table[tokens])
    for probs in (draft[tokens], None):
        found = sampled_accept(tree, tokens, table[tokens], probs, generator=generator)
        assert found.lists() == wanted.lists()


def test_a_draft_model_equal_to_the_target_is_always_right() -> None:
    table = random_table(6, 8)
    generator = torch.Generator().manual_seed(4)
    tokens = drawn_tree(table, (1, 1, 1), 5000, generator)
    found = sampled_accept(DraftTree.chain(5000, 4), tokens, table[tokens], table[tokens], generator=generator)
    assert (found.lengths == 3).all()


def test_candidates_that_were_not_drawn_are_skipped() -> None:
    # The draft model knows one token; the second child only fills the place.
    draft = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    target = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    rows = 4000
    uniforms = torch.rand(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = torch.tensor([[0, 0, 1]]).repeat(rows, 1)
    shape = (rows, 3, 3)
    found = sampled_accept(wide_tree((2,), rows), tokens, target.expand(shape), draft.expand(shape), uniforms=uniforms)
    assert (found.nodes != 2).all()
    mean = torch.bincount(found.tokens[:, 0], minlength=3) / rows
    torch.testing.assert_close(mean.double(), target, atol=0.03, rtol=0)


def test_no_token_without_probability_is_ever_drawn() -> None:
    target = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    uniforms = torch.tensor([0.0, 0.4999999, 0.5, 1 - 2**-24])[:, None]
    probs = target.expand(4, 1, 5)
    found = sampled_accept(DraftTree.chain(4, 1), torch.zeros(4, 1, dtype=torch.int64), probs, uniforms=uniforms)
    assert found.bonus.tolist() == [1, 1, 3, 3]


def test_one_seed_gives_one_result() -> None:
    table = random_table(6, 8)
    tokens = drawn_tree(table, (2, 2), 64, torch.Generator().manual_seed(4))
    runs = [
        sampled_accept(wide_tree((2, 2), 64), tokens, table[tokens], generator=torch.Generator().manual_seed(2)).tokens
        for _ in range(2)
    ]
    assert torch.equal(*runs)


def test_nothing_is_read_on_the_host() -> None:
    # Meta tensors have no contents.
    tree, tokens = wide_tree((2, 2), 3, "meta"), torch.zeros(3, 7, dtype=torch.int64, device="meta")
    probs = torch.zeros(3, 7, 5, device="meta")
    for found in (greedy_accept(tree, tokens, probs), sampled_accept(tree, tokens, probs, probs)):
        assert found.nodes.shape == found.tokens.shape == (3, 7)
        assert found.bonus.shape == found.lengths.shape == (3,)


# Refusals -------------------------------------------------------------------------------------------------------------


def refused(function, *args, **kwargs) -> str:
    with pytest.raises(InvalidInputError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_refusals() -> None:
    tree, tokens = DraftTree.chain(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    probs = torch.full((2, 3, 4), 0.25)
    uniforms = torch.zeros(2, 3)
    assert "tokens is (2, 3) torch.int32" in refused(greedy_accept, tree, tokens.int(), probs)
    assert "one int64 for each node" in refused(greedy_accept, tree, tokens[:1], probs)
    assert "logits is (2, 12)" in refused(greedy_accept, tree, tokens, probs.reshape(2, 12))
    assert "target_probs is (6, 1, 4)" in refused(sampled_accept, tree, tokens, probs.reshape(6, 1, 4))
    assert "vocabulary of 4, so 0 to 3" in refused(greedy_accept, tree, tokens + 4, probs)
    assert "one device is needed" in refused(greedy_accept, tree, tokens, probs.to("meta"))
    assert "draft_probs is (2, 2, 4)" in refused(sampled_accept, tree, tokens, probs, probs[:, 1:])
    assert "uniforms is (2, 2)" in refused(sampled_accept, tree, tokens, probs, uniforms=uniforms[:, 1:])
    both = refused(sampled_accept, tree, tokens, probs, uniforms=uniforms, generator=torch.Generator())
    assert "pass one of them" in both


def test_drawn_tokens_accept_the_drafts_that_they_are() -> None:
    #      0
    #    1   2    the second sibling was drawn, and then its child
    #        3
    tree = DraftTree.from_parents([[-1, 0, 0, 2]] * 2)
    tokens = torch.tensor([[7, 1, 2, 3], [7, 1, 2, 3]])
    found = drawn_accept(tree, tokens, torch.tensor([[2, 9, 3, 5], [4, 9, 3, 5]]))
    assert found.lists() == ([[0, 2, 3], [0]], [[2, 3, 5], [4]])


@pytest.mark.parametrize("name", ["tokens", "drawn"])
@pytest.mark.parametrize("wrong", [torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2)])
def test_drawn_tokens_that_do_not_fit(name: str, wrong: Tensor) -> None:
    given = {"tokens": torch.zeros(1, 2, dtype=torch.int64), "drawn": torch.zeros(1, 2, dtype=torch.int64), name: wrong}
    with pytest.raises(InvalidInputError, match=rf"{name} is \(1, .*one int64 for each node of the trees is needed"):
        drawn_accept(DraftTree.chain(1, 2), **given)
