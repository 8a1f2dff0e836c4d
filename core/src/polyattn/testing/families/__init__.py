"""The families that the kit computes. What differs between them is in their entries; checks, gates and reports do not
know them.

`linear` is judged (what is not declared is refused) and not computed yet. A family becomes computed by an entry: an
instance of a subclass of `Family`, here or from outside:

    >>> from polyattn.testing.families import FAMILIES, Family
    >>> class Linear(Family): ...
    >>> FAMILIES["linear"] = Linear()  # doctest: +SKIP
"""

from .base import DTYPES, Call, Family, Lengths, Part, Variants
from .block_sparse import BlockSparse
from .dense import Dense
from .latent import Latent
from .packed import Varlen
from .paged import Paged

__all__ = ["DTYPES", "FAMILIES", "Call", "Family", "Lengths", "Part", "Variants"]

FAMILIES: dict[str, Family] = {
    "dense": Dense(),
    "varlen": Varlen(),
    "paged": Paged(),
    "mla": Latent(),
    "block_sparse": BlockSparse(),
}
