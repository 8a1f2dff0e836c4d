"""This module makes trees of candidates from a draft model's probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ..step.tree import DraftTree

__all__ = ["Beam", "TreeDraft", "draw_children", "wide_tree"]


@dataclasses.dataclass(frozen=True, eq=False)
class Beam:
    """Describes what the draft model runs next.

    Attributes:
        tree: the root and the beams so far, [N, 1 + topk * level] nodes; the last topk are the new ones, those before
            have their K/V in the draft model's cache.
        tokens: int64 [N, 1 + topk * level], of these nodes.
    """

    tree: DraftTree
    tokens: Tensor


class TreeDraft:
    """Grow a tree level by level and keep its best nodes, as EAGLE-2 does (Li et al., arXiv 2406.16858, section 4).

    Each node of the beam proposes its topk best continuations; the topk of all of them with the best cumulative
    probability are the next beam. At the end the best nodes of everything proposed make the tree. With topk = 1 it is
    a chain. The nodes are chosen, not drawn: `sampled_accept` is given no draft_probs for them.

    Runs on the device of its tensors without waiting for it.

        draft = TreeDraft(root, topk=4)
        beam = draft.grow(log_probs)              # [N, 1, V], of the draft model at the root
        for _ in range(steps - 1):
            beam = draft.grow(log_probs)          # [N, topk, V], at the last topk nodes of beam.tree
        tree, tokens = draft.best(drafts)
    """

    def __init__(self, root: Tensor, topk: int) -> None:
        """
        Args:
            root: int64 [N], the last accepted tokens. topk: continuations of a node, and width of the beam, >= 1.

        Raises:
            InvalidInputError: root or topk is something else.
        """
        if root.ndim != 1 or root.dtype != torch.int64:
            raise InvalidInputError(f"root is {tuple(root.shape)} {root.dtype}; one int64 token a row is needed, [N]")
        if topk < 1:
            raise InvalidInputError(f"topk={topk} leaves a draft without tokens; 1 (a chain) or more is needed")
        self.topk = topk
        zero = torch.zeros_like(root)[:, None]
        # Everything proposed, the root first: a parent always comes before its children.
        self._tokens, self._parents, self._scores = [root[:, None]], [zero - 1], [zero.new_zeros(zero.shape).float()]
        self._count = 1
        self._beam = zero  # the nodes that grow next, as numbers of what is proposed
        self._beam_tokens, self._beam_parents = root[:, None], zero - 1
        self._newest = zero  # the same nodes as numbers of the beams' tree

    def grow(self, log_probs: Tensor) -> Beam:
        """Add the continuations of the newest nodes.

        Args:
            log_probs: float [N, 1, V] at the root, then [N, topk, V] at the last topk nodes of the beam.

        Raises:
            InvalidInputError: another shape, or a vocabulary smaller than topk.
        """
        rows, width = self._beam.shape
        if log_probs.ndim != 3 or tuple(log_probs.shape[:2]) != (rows, width):
            raise InvalidInputError(
                f"log_probs has shape {tuple(log_probs.shape)}; [{rows}, {width}, V] is needed: one distribution for "
                f"each of the newest nodes"
            )
        if log_probs.shape[2] < self.topk:
            raise InvalidInputError(
                f"topk={self.topk} continuations of {log_probs.shape[2]} tokens cannot be had; lower topk"
            )
        values, tokens = log_probs.topk(self.topk, -1)
        before = torch.cat(self._scores, 1).gather(1, self._beam)
        scores = (before[:, :, None] + values.float()).reshape(rows, -1)
        parents = self._beam.repeat_interleave(self.topk, 1)
        tokens = tokens.reshape(rows, -1)
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._scores.append(scores)
        # In the order of the tree, so that equal scores keep parents before children.
        best = scores.topk(self.topk, -1).indices.sort(-1).values
        self._beam = best + self._count
        self._count += tokens.shape[1]
        above = self._newest.gather(1, best // self.topk)
        self._beam_tokens = torch.cat((self._beam_tokens, tokens.gather(1, best)), 1)
        self._beam_parents = torch.cat((self._beam_parents, above), 1)
        nodes = self._beam_parents.shape[1]
        self._newest = torch.arange(nodes - self.topk, nodes, device=best.device).expand(rows, -1)
        return Beam(DraftTree.from_parents(self._beam_parents.int()), self._beam_tokens)

    def best(self, nodes: int) -> tuple[DraftTree, Tensor]:
        """The tree of the root and the nodes - 1 best candidates, by cumulative probability.

        Args:
            nodes: N_d, the root included.

        Returns:
            (tree, tokens int64 [N, N_d]).

        Raises:
            InvalidInputError: there are not so many candidates.
        """
        if not 1 <= nodes <= self._count:
            raise InvalidInputError(
                f"a tree of {nodes} nodes cannot be made of a root and {self._count - 1} candidates; allowed: 1 to "
                f"{self._count}, or more levels"
            )
        scores = torch.cat(self._scores, 1)[:, 1:]
        # A child is never better than its parent, and comes after it: a stable sort keeps every parent.
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : nodes - 1].sort(-1).values + 1
        chosen = torch.nn.functional.pad(chosen, (1, 0))  # the root
        parents = torch.cat(self._parents, 1).gather(1, chosen)
        found = torch.searchsorted(chosen, parents)
        found[:, 0] = -1
        return DraftTree.from_parents(found.int()), torch.cat(self._tokens, 1).gather(1, chosen)


def draw_children(probs: Tensor, count: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw tokens one after the other without replacement, in one pass: an exponential race (Efraimidis and Spirakis
    2006), the same draw as the Gumbel top-k trick (Kool et al., arXiv 1903.06059).

    Args:
        probs: [..., V], the draft model's distribution at the nodes whose children these are. count: children each.
        generator: of the device of `probs`, None = torch's own.

    Returns:
        int64 [..., count] in the order drawn. Where fewer tokens have a probability, tokens of probability 0 fill up,
        which `sampled_accept` skips.

    Raises:
        InvalidInputError: more children than tokens, or none.
    """
    if not 1 <= count <= probs.shape[-1]:
        raise InvalidInputError(f"count={count} children of {probs.shape[-1]} tokens; allowed: 1 to {probs.shape[-1]}")
    arrival = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / arrival.clamp(min=torch.finfo(probs.dtype).tiny)).topk(count, -1).indices


def wide_tree(widths: Sequence[int], rows: int, device: torch.device | str = "cpu") -> DraftTree:
    """The tree that drawn candidates fill: every node of level l has `widths[l]` children, which lie side by side.

    Args:
        widths: children of the root, of each of those, and so on; (1, 1, 1) is a chain of three drafts.
        rows: N.

    Raises:
        InvalidInputError: a level without nodes.
    """
    if any(width < 1 for width in widths):
        raise InvalidInputError(f"widths={tuple(widths)} has a level without nodes; leave out what is not drafted")
    parents, first = [-1], 0
    for level, width in enumerate(widths):
        nodes = math.prod(widths[:level])
        parents += [first + node for node in range(nodes) for _ in range(width)]
        first += nodes
    return DraftTree.from_parents(torch.tensor(parents, dtype=torch.int32, device=device).repeat(rows, 1))
