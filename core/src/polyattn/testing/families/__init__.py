"""The families that the kit computes. What differs between them is in their entries; checks, gates and reports do not
know them. A family is computed by its entry, an instance of a subclass of `Family`, here or from outside:

    >>> from polyattn.testing.families import FAMILIES, Family
    >>> class Mine(Family): ...
    >>> FAMILIES["mine"] = Mine()  # doctest: +SKIP
"""

from .base import DTYPES, Call, Family, Lengths, Part, Variants
from .block_sparse import BlockSparse
from .dense import Dense
from .latent import Latent
from .linear import Linear
from .packed import Varlen
from .paged import Paged

__all__ = ["DTYPES", "FAMILIES", "Call", "Family", "Lengths", "Part", "Variants"]

FAMILIES: dict[str, Family] = {
    "dense": Dense(),
    "varlen": Varlen(),
    "paged": Paged(),
    "mla": Latent(),
    "block_sparse": BlockSparse(),
    "linear": Linear(),
}
