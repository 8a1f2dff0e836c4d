"""Speculative decoding: drafts are laid out as trees, verified in one call, and their accepted path is kept.

- `drafting.py`: from a draft model's probabilities to a tree of candidates. `acceptance.py`: which of them the target
  model takes, greedy or sampled, exact in distribution. `committing.py`: where the K/V of the accepted path belong.

Node 0 of every tree is its root: the last token that was accepted, whose K/V the verifying call writes with those of
the drafts. The logits of a node say what follows it.
"""

from .acceptance import Accepted, drawn_accept, greedy_accept, sampled_accept
from .committing import commit
from .drafting import Beam, TreeDraft, draw_children, wide_tree

__all__ = [
    "Accepted",
    "Beam",
    "TreeDraft",
    "commit",
    "draw_children",
    "drawn_accept",
    "greedy_accept",
    "sampled_accept",
    "wide_tree",
]
