"""The families that the kit computes. What differs between them is in their entries; checks, gates and reports do not
know them. A family is computed by its entry, an instance of a subclass of `Family`, here or from outside:

    >>> from polyattn.testing.families import FAMILIES, Family
    >>> class Mine(Family): ...
    >>> FAMILIES["mine"] = Mine()  # doctest: +SKIP
"""

from ..cases import Case
from .base import DTYPES, Call, Family, Lengths, Part, Variants
from .block_sparse import BlockSparse
from .dense import Dense
from .latent import Latent
from .linear import Linear
from .packed import Varlen
from .paged import Paged
from .placed import PlacedCalls
from .video import SLA, STA, SVG2, VSA, VMoBA, Window

__all__ = ["DTYPES", "FAMILIES", "METHODS", "Call", "Family", "Lengths", "Part", "PlacedCalls", "Variants", "family_of"]

FAMILIES: dict[str, Family] = {
    "dense": Dense(),
    "varlen": Varlen(),
    "paged": Paged(),
    "mla": Latent(),
    "block_sparse": BlockSparse(),
    "linear": Linear(),
}

METHODS: dict[str, PlacedCalls] = {
    "window_video_attn": Window(),
    "sliding_tile_attn": STA(),
    "video_sparse_attn": VSA(),
    "sla_attn": SLA(),
    "sage_sla_attn": SLA(),
    "vmoba_attn": VMoBA(),
    "sparse_video_gen_2_attn": SVG2(),
}
"""What the kit knows of methods, by the name of the backend: calls with a place are computed by these."""


def family_of(case: Case) -> Family:
    """Return the entry that computes a case."""
    return METHODS[case.place.method] if case.place else FAMILIES[case.request.family]
