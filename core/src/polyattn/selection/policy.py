"""What is asked of selection besides the request: who was named, what was measured, and how strictly."""

from __future__ import annotations

import dataclasses

from ..contract import AttentionRequest

__all__ = ["Choice", "Policy"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend somebody asked for, and where: `argument`, `use_backend`, `force_backend`, `component x`, ...

    Attributes:
        like: of a measurement, the request that was measured, where it is another one: a backend that serves the two
            in different ways is not chosen for it. kind: and whose kernels were measured (`names.kind_of`): those of
            no other library are chosen for it. how: what `Selection.source` says of it.
    """

    name: str
    source: str
    like: AttentionRequest | None = None
    kind: str = ""
    how: str = "tuned"


@dataclasses.dataclass(frozen=True)
class Policy:
    """How to decide.

    Attributes:
        choice: the highest-ranking explicit choice, None = automatic.
        tuned: what was measured or predicted for this request on this device: backends, the fastest first, and why.
        avoid: backends, or NAME/KIND, not to be chosen by themselves. notes: what measuring has to say besides.
        strict: a documented fallback is an error.
        lowering: exact rewrites may be used where a backend does not take a request as it is.
        what_if: judge planned adapters as if built, and do not ask for evidence.
        replaced: backends that documented fallbacks replaced on the way here; none is come back to.
        tuning: the mode (`polyattn.tuning`) that it was made under; "" = nobody asked.
    """

    choice: Choice | None = None
    tuned: tuple[Choice, ...] = ()
    avoid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    strict: bool = False
    lowering: bool = True
    what_if: bool = False
    replaced: tuple[str, ...] = ()
    tuning: str = ""
