"""Draft trees (S8): one canonical storage, and the forms that kernels and other engines keep them in.

A node sees every key before the drafts, itself and its ancestors. Whatever is asked of a tree is made on its device
without waiting for it; contents are checked where reading them costs nothing (on the CPU) or POLYATTN_VALIDATE=1 asks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ...semantics.validation import contents_readable

__all__ = ["DraftLinks", "DraftTree", "write_attn_mask"]

_WORDS = ((8, torch.uint8), (16, torch.uint16), (32, torch.uint32))


class DraftLinks(NamedTuple):
    """A tree as linked lists, int64 [N, N_d] each, -1 = none, as acceptance kernels walk it.

    Attributes:
        retrieve_index: the place of each node among the N * N_d packed tokens.
        retrieve_next_token: its first child. retrieve_next_sibling: the next child of its parent.
    """

    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class DraftTree:
    """The drafts of N requests, N_d nodes each.

    Attributes:
        parents: int32 [N, N_d], the parent of each node, -1 for a root; a parent comes before its children. Node 0 is
            usually the one root, the last token that was accepted.

    Raises:
        InvalidInputError: wrong shape or dtype, or a parent that does not come before its child.
    """

    parents: Tensor

    def __post_init__(self) -> None:
        parents = self.parents
        if not isinstance(parents, Tensor) or parents.ndim != 2 or parents.dtype != torch.int32 or not parents.shape[1]:
            is_tensor = isinstance(parents, Tensor)
            shown = f"{list(parents.shape)} {parents.dtype}" if is_tensor else f"a {type(parents).__name__}"
            raise InvalidInputError(
                f"parents is {shown}; int32 [N, N_d] with N_d >= 1 is needed, such as DraftTree.from_parents makes"
            )
        if not contents_readable(parents):
            return
        wrong = (parents >= self._nodes) | (parents < -1)
        if bool(wrong.any()):
            row, node = wrong.nonzero()[0].tolist()
            raise InvalidInputError(
                f"parents[{row}, {node}] = {int(parents[row, node])}: the parent of a draft node must come before it "
                f"(-1 to {node - 1}); number the nodes so that parents come first"
            )

    # ---------------------------------------------------------------------------------------------------- as it is

    @property
    def sequences(self) -> int:
        """N."""
        return self.parents.shape[0]

    @property
    def draft_tokens(self) -> int:
        """N_d."""
        return self.parents.shape[1]

    @property
    def _nodes(self) -> Tensor:
        return torch.arange(self.draft_tokens, dtype=torch.int32, device=self.parents.device)

    @functools.cached_property
    def mask(self) -> Tensor:
        """bool [N, N_d, N_d], True where a node (row) sees another (column): itself and its ancestors."""
        nodes = self._nodes
        # Steps of 0 or 1 towards the root; squaring doubles them until the longest path is covered.
        reach = (self.parents.unsqueeze(-1) == nodes) | (nodes.unsqueeze(-1) == nodes)
        steps = 1
        while steps < self.draft_tokens - 1:
            wide = reach.to(torch.float32)
            reach, steps = torch.bmm(wide, wide) > 0, 2 * steps
        return reach

    @functools.cached_property
    def depths(self) -> Tensor:
        """int32 [N, N_d]: ancestors of each node; its rotary position is the prefix plus this."""
        return self.mask.sum(-1, dtype=torch.int32) - 1

    def attn_mask(self, seq_lens: Tensor, max_seqlen_k: int) -> Tensor:
        """The mask of the contract for these trees.

        Args:
            seq_lens: int32 [N], keys of each row, the drafts included. max_seqlen_k: at least the longest.

        Returns:
            bool [N, 1, N_d, max_seqlen_k].

        Raises:
            InvalidInputError: `seq_lens` has another shape, or `max_seqlen_k` leaves no room for the drafts.
        """
        if tuple(seq_lens.shape) != (self.sequences,) or max_seqlen_k < self.draft_tokens:
            raise InvalidInputError(
                f"seq_lens is {list(seq_lens.shape)} and max_seqlen_k {max_seqlen_k}; these trees have "
                f"{self.sequences} rows of {self.draft_tokens} drafts, which seq_lens [{self.sequences}] counts too"
            )
        first = (seq_lens - self.draft_tokens).clamp(min=0).long()
        out = torch.empty(
            self.sequences, 1, self.draft_tokens, max_seqlen_k, dtype=torch.bool, device=self.parents.device
        )
        return write_attn_mask(out, self.mask, first[:, None] + self._nodes)

    # ------------------------------------------------------------------------------------------------- other forms

    @classmethod
    def from_parents(
        cls, parents: Tensor | Sequence[Sequence[int]], device: torch.device | str | None = None
    ) -> DraftTree:
        """Trees from parents [N, N_d], nested lists or any integer tensor."""
        if not isinstance(parents, Tensor):
            rows = [list(row) for row in parents]
            if len({len(row) for row in rows}) > 1:
                raise InvalidInputError(
                    f"parents has rows of {sorted({len(row) for row in rows})} nodes; all requests of a step have "
                    "equally many drafts: pad a smaller tree with further roots (-1)"
                )
            parents = torch.tensor(rows, dtype=torch.int32, device=device)
        return cls(parents.to(device=device, dtype=torch.int32))

    @classmethod
    def chain(cls, sequences: int, draft_tokens: int, device: torch.device | str | None = None) -> DraftTree:
        """Drafts one after another, as with topk = 1: a causal mask."""
        if sequences < 0 or draft_tokens < 1:
            raise InvalidInputError(
                f"chain({sequences}, {draft_tokens}): 0 or more sequences and 1 or more drafts of each are needed"
            )
        row = torch.arange(-1, draft_tokens - 1, dtype=torch.int32, device=device)
        return cls(row.expand(sequences, -1).contiguous())

    @classmethod
    def _from_mask(cls, mask: Tensor) -> DraftTree:
        """Trees from bool [N, N_d, N_d]. Parents come first, so that the last ancestor is the parent."""
        nodes = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
        above = mask & (nodes < nodes.unsqueeze(-1))
        tree = cls(nodes.where(above, -1).amax(-1))
        if contents_readable(mask) and not torch.equal(tree.mask, mask):
            row, node = (tree.mask != mask).any(-1).nonzero()[0].tolist()
            raise InvalidInputError(
                f"the mask is no tree: node {node} of request {row} must see itself, its parent and what its parent "
                f"sees, and no more; it sees {mask[row, node].nonzero().flatten().tolist()}"
            )
        return tree

    @classmethod
    def from_qlen_only(cls, mask: Tensor, draft_tokens: int) -> DraftTree:
        """Trees from flat bool [N * N_d * N_d], the part of the mask that is about drafts."""
        _flat("mask", mask, torch.bool, _count(draft_tokens) ** 2)
        return cls._from_mask(mask.reshape(-1, draft_tokens, draft_tokens))

    def to_qlen_only(self) -> Tensor:
        """Flat bool [N * N_d * N_d], the part of the mask that is about drafts."""
        return self.mask.flatten()

    @classmethod
    def from_full_mask(cls, mask: Tensor, prefix_lens: Sequence[int], draft_tokens: int) -> DraftTree:
        """Trees from flat bool rows of prefix_len + N_d, request after request.

        Args:
            prefix_lens: keys of each request before its drafts, host ints.
        """
        _flat("mask", mask, torch.bool, 1)
        _count(draft_tokens)
        index, size = _draft_cells(prefix_lens, draft_tokens, mask.device)
        if mask.numel() != size:
            raise InvalidInputError(
                f"mask has {mask.numel()} cells; {draft_tokens} drafts after prefixes of {list(prefix_lens)} have "
                f"{size}, prefix_len + {draft_tokens} for each draft"
            )
        if contents_readable(mask):
            hidden = mask.logical_not().index_fill(0, index.flatten(), False)
            if bool(hidden.any()):
                raise InvalidInputError(
                    f"mask hides a key before the drafts (cell {int(hidden.nonzero()[0])}); a tree mask shows every "
                    "draft all of its prefix. For another mask pass attn_mask to paged_attention"
                )
        return cls._from_mask(mask[index])

    def to_full_mask(self, prefix_lens: Sequence[int]) -> Tensor:
        """Flat bool rows of prefix_len + N_d, request after request. `prefix_lens`: host ints, [N]."""
        if len(prefix_lens) != self.sequences:
            raise InvalidInputError(f"prefix_lens has {len(prefix_lens)} entries for {self.sequences} trees")
        index, size = _draft_cells(prefix_lens, self.draft_tokens, self.parents.device)
        full = torch.ones(size, dtype=torch.bool, device=self.parents.device)
        return full.index_put_((index,), self.mask)

    @classmethod
    def from_bitmask(cls, bits: Tensor, draft_tokens: int) -> DraftTree:
        """Trees from flat uint8, uint16 or uint32 [N * N_d]: bit j of a node's number says whether it sees node j."""
        _flat("bits", bits, _word(_count(draft_tokens)), draft_tokens)
        shifts = torch.arange(draft_tokens, device=bits.device)
        seen = (bits.long().reshape(-1, draft_tokens, 1) >> shifts) & 1
        return cls._from_mask(seen.bool())

    def to_bitmask(self) -> Tensor:
        """Flat [N * N_d] of the narrowest of uint8, uint16 and uint32 that has N_d bits."""
        dtype = _word(self.draft_tokens)
        return (self.mask.long() << self._nodes.long()).sum(-1).to(dtype).flatten()

    def links(self) -> DraftLinks:
        """The trees as linked lists. Children are in the order of their numbers; roots are each other's siblings."""
        parents, nodes, N_d = self.parents.long(), self._nodes.long(), self.draft_tokens
        child = parents.unsqueeze(1) == nodes.unsqueeze(-1)
        later = (parents.unsqueeze(1) == parents.unsqueeze(-1)) & (nodes > nodes.unsqueeze(-1))
        first, sibling = (nodes.where(some, N_d).amin(-1) for some in (child, later))
        index = torch.arange(parents.numel(), device=parents.device).view_as(parents)
        return DraftLinks(index, first.where(first < N_d, -1), sibling.where(sibling < N_d, -1))

    @classmethod
    def from_links(cls, next_token: Tensor, next_sibling: Tensor) -> DraftTree:
        """Trees from linked lists, integers [N, N_d] each, as `links` makes them."""
        if next_token.ndim != 2 or next_token.shape != next_sibling.shape:
            raise InvalidInputError(
                f"next_token is {list(next_token.shape)}, next_sibling {list(next_sibling.shape)}; [N, N_d] each"
            )
        N_d = next_token.shape[1]
        nodes = torch.arange(N_d, device=next_token.device).expand(next_token.shape)

        def before(following: Tensor) -> Tensor:
            """The node whose link leads to each node, -1 = none; links to nowhere go to one place more."""
            found = torch.full_like(nodes, -1, memory_format=torch.contiguous_format)
            found = torch.cat([found, found[:, :1]], 1)
            return found.scatter_(1, following.long().where(following >= 0, N_d), nodes)[:, :N_d]

        parents, elder = before(next_token), before(next_sibling)
        for node in range(1, N_d):
            inherited = parents.gather(1, elder[:, node : node + 1].clamp(min=0)).squeeze(1)
            parents[:, node] = inherited.where(elder[:, node] >= 0, parents[:, node])
        tree = cls(parents.int())
        if contents_readable(next_token):
            _, first, sibling = tree.links()
            if not (torch.equal(first, next_token.long()) and torch.equal(sibling, next_sibling.long())):
                raise InvalidInputError(
                    "next_token and next_sibling are no tree in order: the first child of a node is the one with the "
                    "least number, and siblings follow by number"
                )
        return tree


def write_attn_mask(out: Tensor, mask: Tensor, columns: Tensor) -> Tensor:
    """Write the mask of the contract in place: all True but for the columns of the drafts.

    Args:
        out: bool [N, 1, N_d, max_seqlen_k]. mask: bool [N, N_d, N_d]. columns: int64 [N, N_d], of each draft.
    """
    index = columns[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
    return out.fill_(True).scatter_(3, index, mask.unsqueeze(1))


def _count(draft_tokens: int) -> int:
    if draft_tokens < 1:
        raise InvalidInputError(f"draft_tokens={draft_tokens}: a tree has 1 node or more")
    return draft_tokens


def _flat(name: str, given: Tensor, dtype: torch.dtype, unit: int) -> None:
    if given.ndim != 1 or given.dtype != dtype or given.numel() % unit:
        raise InvalidInputError(
            f"{name} is {list(given.shape)} {given.dtype}; a flat tensor of {dtype} is needed"
            + (f", {unit} for each request" if unit > 1 else "")
        )


def _word(draft_tokens: int) -> torch.dtype:
    for width, dtype in _WORDS:
        if draft_tokens <= width:
            return dtype
    raise InvalidInputError(
        f"{draft_tokens} drafts: a bit mask holds up to 32; use to_qlen_only, one byte for each pair of drafts"
    )


def _draft_cells(prefix_lens: Sequence[int], draft_tokens: int, device: torch.device) -> tuple[Tensor, int]:
    """Return where the cells of drafts are among flat rows of prefix_len + N_d: int64 [N, N_d, N_d]; and how many
    cells."""
    starts = [0, *accumulate(draft_tokens * (prefix + draft_tokens) for prefix in prefix_lens)]
    start, prefix = torch.tensor([starts[:-1], list(prefix_lens)], dtype=torch.int64, device="cpu").to(
        device, non_blocking=True
    )
    nodes = torch.arange(draft_tokens, device=device)
    row = (start + prefix)[:, None] + nodes * (prefix[:, None] + draft_tokens)
    return row.unsqueeze(-1) + nodes, starts[-1]
