"""This module defines what a lowering is. No torch here: the functions that touch tensors import it when they are
built."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

from ..contract import AttentionRequest, Bound

__all__ = ["CALL", "KEPT", "Lowering", "Rewrite"]

CALL = 4.0
"""Cost of one more kernel call, in passes over a tensor: a launch and the reads that a single call would share."""

KEPT = (
    *("platform", "arch", "toolkit", "features", "dtype", "softcap", "dropout", "deterministic", "cross"),
    *("batch_invariant", "multimodal", "kv_layout", "large", "method", "state_dtype", "transform"),
    "place",
)
"""Fields of a request that no rewrite changes: who refuses one of them is passed over without a search."""


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """Describes one way to serve a request.

    Attributes:
        inner: requests that the same backend must take, each bound once. Several where one call becomes several, or
            where the relation of the lengths is known only when the tensors are there.
        cost: what it adds, in passes: one is reading or writing a tensor of the size of an input once. Views cost 0.
            It only ranks rewrites.
        helpers: requests that any backend may take (the small part of a merge).
        detail: what is done, in a few words with the numbers: "D 40 -> 64".
    """

    inner: tuple[AttentionRequest, ...]
    cost: float
    helpers: tuple[AttentionRequest, ...] = ()
    detail: str = ""


class Lowering(abc.ABC):
    """An exact rewrite.

    Exact means: in exact arithmetic the result is the same. In floating point what a rewrite rounds stays within the
    tolerances of conformance. A rewrite applies to what it says, else it offers nothing: it never approximates.

    Attributes:
        name: as `explain` shows it and as `Row.lowered` names it.
        summary: one line for people.
        fields: the request fields (and derived values) that it can relieve a kernel of; it is tried only where a
            kernel refuses one of them.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    fields: ClassVar[frozenset[str]]

    @abc.abstractmethod
    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        """The ways it offers for a request in normal form, cheapest first; none where it does not apply. No torch."""

    @abc.abstractmethod
    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        """The functions that serve `request`, from those of `rewrite.inner` and `rewrite.helpers` in order.

        They keep all rules of `polyattn.contract`. With `Bound.backward` in `inner` the result has one too, unless
        `request.grad` is empty; without, gradients flow through torch operations.
        """
