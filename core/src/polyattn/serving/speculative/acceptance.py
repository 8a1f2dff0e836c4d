"""This module decides which drafts the target model accepts. A chain is a tree whose nodes have one child: one walk
serves both.

The walk visits the nodes in storage order, in which a parent comes before its children and siblings in the order they
are tried. It is vectorised over the batch and runs where its tensors are: N_d - 1 steps, no host sync, no shape that
depends on a value, so a device graph can record it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ...semantics.validation import contents_readable

if TYPE_CHECKING:
    from ..step.tree import DraftTree

__all__ = ["Accepted", "drawn_accept", "greedy_accept", "sampled_accept"]


@dataclasses.dataclass(frozen=True, eq=False)
class Accepted:
    """Describes what a verified step gives. Columns past a row's `lengths` hold -1.

    Attributes:
        nodes: int64 [N, N_d], the accepted path from the root on: `nodes[n, : lengths[n] + 1]` are the nodes whose K/V
            stay, the root among them.
        tokens: int64 [N, N_d], the new tokens: `lengths[n]` accepted drafts, then the bonus token.
        lengths: int64 [N], accepted drafts, 0 to N_d - 1.
        bonus: int64 [N], the target's own token after the path; the root of the next tree.
    """

    nodes: Tensor
    tokens: Tensor
    lengths: Tensor
    bonus: Tensor

    @property
    def last(self) -> Tensor:
        """int64 [N], the last node of each path: a state that is kept by request goes on from the one after it
        (`RequestStates.commit`)."""
        return self.nodes.gather(1, self.lengths[:, None]).squeeze(1)

    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """(nodes, tokens) of each row on the host, without the -1; one copy, which waits for the device."""
        both = torch.stack((self.nodes, self.tokens)).tolist()
        return tuple([[i for i in row if i >= 0] for row in part] for part in both)  # type: ignore[return-value]


def greedy_accept(tree: DraftTree, tokens: Tensor, logits: Tensor) -> Accepted:
    """Keep the drafts that greedy decoding of the target would have produced.

    A draft is accepted if its parent is and it is the argmax of the parent's logits; ties go to the lowest token id, as
    `torch.argmax` breaks them. Of siblings with one token the first counts.

    Args:
        tree: N trees of N_d nodes; node 0 is the root. Another node without a parent is on no path.
        tokens: int64 [N, N_d], the token of each node, the root's included.
        logits: float [N, N_d, V], of the target at each node.

    Raises:
        InvalidInputError: shapes, dtypes or devices that do not fit.
    """
    return _walked(_checked(tree, tokens, "logits", logits), tokens, logits.argmax(-1))


def drawn_accept(tree: DraftTree, tokens: Tensor, drawn: Tensor) -> Accepted:
    """Keep the drafts that plain sampling would have drawn.

    A draft is accepted if its parent is and it is the token that was drawn after the parent. So chosen candidates are
    accepted as often as by `sampled_accept`, and where a draw depends on its place in the text only, the new tokens are
    those of decoding without drafts, whatever was drafted. Of siblings with one token the first counts.

    Args:
        tree, tokens: as `greedy_accept`.
        drawn: int64 [N, N_d], for each node a token drawn from the target's distribution after it.

    Raises:
        InvalidInputError: shapes, dtypes or devices that do not fit.
    """
    for name, given in (("tokens", tokens), ("drawn", drawn)):
        if given.shape != tree.parents.shape or given.dtype != torch.int64 or given.device != tree.parents.device:
            raise InvalidInputError(
                f"{name} is {tuple(given.shape)} {given.dtype} on {given.device}; one int64 for each node of the trees "
                f"is needed, {tuple(tree.parents.shape)} on {tree.parents.device}"
            )
    return _walked(tree.parents, tokens, drawn)


def _walked(parents: Tensor, tokens: Tensor, said: Tensor) -> Accepted:
    """The path of the drafts that the target says itself: `said` [N, N_d], its token after each node."""
    node, wanted = torch.zeros_like(tokens[:, 0]), said[:, 0]
    took = [torch.ones_like(node, dtype=torch.bool)]
    for i in range(1, tokens.shape[1]):
        took.append((parents[:, i] == node) & (tokens[:, i] == wanted))
        node = torch.where(took[i], i, node)
        wanted = torch.where(took[i], said[:, i], wanted)
    return _accepted(torch.stack(took, 1), tokens, wanted)


def sampled_accept(
    tree: DraftTree,
    tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    *,
    uniforms: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Accepted:
    """Keep drafts so that the new tokens are distributed as if the target alone had been sampled.

    The candidates of a node are tried one after the other against what is left of the target's distribution p:
    candidate x, drawn from q, is accepted with probability min(1, p(x) / q(x)); else p becomes norm(max(p - q, 0)) and
    q loses x. When all are rejected, or the path has no further candidates, the last token is drawn from p. For a
    chain this is speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv
    2302.01318); for a tree the multi-round rejection of SpecInfer (Miao et al., arXiv 2305.09781, section 4.3) for
    candidates drawn without replacement (Jeon et al., arXiv 2402.14160).

    Without `draft_probs` a candidate is its own certainty, q(x) = 1: it is accepted with probability p(x). That suits
    any candidates, and for those that were chosen, such as the best of `TreeDraft`, it is the rule. With
    `draft_probs` drawn candidates are accepted more often, but all that were drawn have to be in the tree, in order:
    leaving out those that look bad is a choice, and biases the result (`draw_children`, `wide_tree`).

    Args:
        tree, tokens: as `greedy_accept`; siblings in the order they were drawn.
        target_probs: float [N, N_d, V], the target's distribution after each node, temperature and truncation applied.
        draft_probs: [N, N_d, V], what the children of each node were drawn from (rows of leaves are not read);
            None = see above. A candidate of probability 0 was not drawn and is skipped.
        uniforms: [N, N_d] in [0, 1), of the dtype of `target_probs`: column i decides node i, column 0 draws the last
            token. None = drawn from `generator`.
        generator: of the device of the tensors, None = torch's own.

    Raises:
        InvalidInputError: shapes, dtypes or devices that do not fit, or uniforms and generator both.
    """
    parents = _checked(tree, tokens, "target_probs", target_probs)
    if draft_probs is not None:
        _same("draft_probs", draft_probs, target_probs, tuple(target_probs.shape))
    if uniforms is None:
        uniforms = torch.rand(tokens.shape, generator=generator, dtype=target_probs.dtype, device=target_probs.device)
    elif generator is not None:
        raise InvalidInputError("uniforms and generator are two sources of chance; pass one of them")
    _same("uniforms", uniforms, target_probs, tuple(tokens.shape))
    node = torch.zeros_like(tokens[:, 0])
    took = [torch.ones_like(node, dtype=torch.bool)]
    p, q = target_probs[:, 0], None if draft_probs is None else draft_probs[:, 0]
    for i in range(1, tokens.shape[1]):
        tried = parents[:, i] == node
        token = tokens[:, i, None]
        p_x = p.gather(1, token)[:, 0]
        if q is None:
            accepted = tried & (uniforms[:, i] < p_x)
            rest = _normalised(p.scatter(1, token, 0.0), p)
        else:
            q_x = q.gather(1, token)[:, 0]
            tried = tried & (q_x > 0)
            accepted = tried & (uniforms[:, i] * q_x < p_x)
            rest = _normalised((p - q).clamp(min=0), p)
            left = _normalised(q.scatter(1, token, 0.0), torch.zeros_like(q))
        rejected = (tried & ~accepted)[:, None]
        p = torch.where(accepted[:, None], target_probs[:, i], torch.where(rejected, rest, p))
        if q is not None and draft_probs is not None:
            q = torch.where(accepted[:, None], draft_probs[:, i], torch.where(rejected, left, q))
        node = torch.where(accepted, i, node)
        took.append(accepted)
    return _accepted(torch.stack(took, 1), tokens, _drawn(p, uniforms[:, 0]))


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights [N, V] that sum to 1; `otherwise` where there is nothing left but rounding."""
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass, otherwise)


def _drawn(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token of each row of [N, V] by its cumulative distribution; never one of probability 0."""
    cumulative = probs.cumsum(-1)
    at = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def _accepted(took: Tensor, tokens: Tensor, bonus: Tensor) -> Accepted:
    """Build the result from the accepted nodes, bool [N, N_d], which are a path: storage order is the order of the
    path."""
    wide = tokens.shape[1]
    column = torch.arange(wide, device=tokens.device)
    lengths = took.sum(1) - 1
    order = torch.where(took, column, wide).sort(1).values
    nodes = torch.where(order < wide, order, -1)
    following = torch.cat((nodes[:, 1:], nodes.new_full((len(nodes), 1), -1)), 1)
    new = torch.where(following >= 0, tokens.gather(1, following.clamp(min=0)), -1)
    return Accepted(nodes, torch.where(column == lengths[:, None], bonus[:, None], new), lengths, bonus)


def _checked(tree: DraftTree, tokens: Tensor, name: str, given: Tensor) -> Tensor:
    """The parents [N, N_d] of a call whose tensors fit together."""
    shape = tuple(tree.parents.shape)
    if tuple(tokens.shape) != shape or tokens.dtype != torch.int64:
        raise InvalidInputError(
            f"tokens is {tuple(tokens.shape)} {tokens.dtype}; one int64 for each node of the trees is needed, {shape}"
        )
    if given.ndim != 3 or tuple(given.shape[:2]) != shape or not given.is_floating_point():
        raise InvalidInputError(
            f"{name} is {tuple(given.shape)} {given.dtype}; floats of shape [N, N_d, V] = [{shape[0]}, {shape[1]}, V] "
            f"are needed: reshape the packed rows of the verifying call"
        )
    if not tree.parents.device == tokens.device == given.device:
        raise InvalidInputError(
            f"tree is on {tree.parents.device}, tokens on {tokens.device}, {name} on {given.device}; one device is "
            f"needed"
        )
    if not contents_readable(tokens) or not tokens.numel():
        return tree.parents
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= given.shape[2]:
        raise InvalidInputError(
            f"tokens has ids from {least} to {most}; {name} has a vocabulary of "
            f"{given.shape[2]}, so 0 to {given.shape[2] - 1} are allowed (also in nodes of padding)"
        )
    return tree.parents


def _same(name: str, given: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(given.shape) != shape or given.dtype != like.dtype or given.device != like.device:
        raise InvalidInputError(
            f"{name} is {tuple(given.shape)} {given.dtype} on {given.device}; {shape} {like.dtype} on {like.device} is "
            f"needed, as target_probs has it"
        )
