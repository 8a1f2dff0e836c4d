"""This module describes what is measured: a request, and the lengths of a batch of it. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...contract import AttentionRequest, relation
from ...contract.lengths import Extent, packed_batch
from ...contract.request_json import plain_request, read_request
from ...errors import ConfigError, InvalidInputError, UnsupportedRequestError
from ...tuning import bucket, request_key, with_lengths

__all__ = ["Workload"]

CACHED = ("paged", "mla")
_LONGEST = 2**63 - 1
_UNMADE: Mapping[str, tuple[Any, ...]] = {
    "family": ("linear",),
    "zero_size": (True,),
    "alibi": (True,),
    "segments": ("shared", "pair"),
    "cross": (True,),
    "kv_layout": ("vectorised", "NZ"),
    "transform": ("functionalize", "vmap", "grad", "gradgrad", "jvp"),
}
"""Field values that no inputs are made for."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A request and the lengths of one batch.

    Attributes:
        request: in normal form. Its lengths in buckets are those of `lengths`.
        lengths: (S_q, S_k) of each sequence; S_k counts the new tokens too. Families dense and block_sparse have equal
            ones.
        shared: with one `kv_parts`, tokens before those of `lengths` that are one prefix of all sequences.

    Raises:
        InvalidInputError: lengths that the request cannot have.
    """

    request: AttentionRequest
    lengths: tuple[tuple[int, int], ...]
    shared: int = 0

    def __post_init__(self) -> None:
        request = with_lengths(self.request, *self.extent).normalised()
        object.__setattr__(self, "request", request)
        if not self.lengths or min(min(pair) for pair in self.lengths) < 1:
            raise InvalidInputError(f"lengths={list(self.lengths)[:4]}: one sequence or more, with S_q and S_k above 0")
        if max(self.longest) > _LONGEST:
            raise InvalidInputError(f"a length of {max(self.longest):,}: no tensor has more than {_LONGEST:,} rows")
        if request.heads % max(request.kv_heads, 1):
            raise InvalidInputError(
                f"heads={request.heads} is no multiple of kv_heads={request.kv_heads}: every key head serves as many"
            )
        dense = request.family in ("dense", "block_sparse")
        if dense and len(set(self.lengths)) > 1:
            raise InvalidInputError(f"the sequences of family {request.family} have one length; got {self.lengths[:4]}")
        if dense and relation(*self.longest) != request.s_relation:
            raise InvalidInputError(
                f"S_q, S_k = {self.longest} are {relation(*self.longest)}, the request says {request.s_relation}"
            )
        if request.family in CACHED and not request.cross and any(s_q > s_k for s_q, s_k in self.lengths):
            raise InvalidInputError("the new tokens of a sequence over a cache are among its keys: S_k is S_q or more")
        if request.family in CACHED and request.s_relation == "one" and self.longest[0] != 1:
            raise InvalidInputError(
                f"the request has one query per sequence, and here S_q is {self.longest[0]}: more are phase extend or "
                f"verify"
            )
        if self.shared < 0 or (self.shared and not request.kv_parts):
            raise InvalidInputError(f"shared={self.shared} with kv_parts={request.kv_parts}: a shared prefix is a part")

    @property
    def batch(self) -> int:
        """B or N."""
        return len(self.lengths)

    @property
    def longest(self) -> tuple[int, int]:
        """(S_q, S_k), each the longest."""
        return max((q for q, _ in self.lengths), default=0), max((k for _, k in self.lengths), default=0)

    @property
    def tokens(self) -> int:
        """T_q."""
        return sum(s_q for s_q, _ in self.lengths)

    @property
    def training(self) -> bool:
        """Return whether gradients are measured: the forward with its backward."""
        return bool(self.request.grad)

    @property
    def extent(self) -> Extent:
        """Its lengths as dispatch reads them from a call."""
        longest = self.longest
        packed = self.request.family == "varlen"
        return packed_batch(self.batch, self.tokens, longest[0]) if packed else self.batch, *longest

    @property
    def buckets(self) -> tuple[int, int, int]:
        """Its extent as measurements are filed."""
        return tuple(map(bucket, self.extent))  # type: ignore[return-value]

    @property
    def id(self) -> str:
        """Return one line for people."""
        s_q, s_k = self.longest
        more = f", {self.shared} shared" if self.shared else ""
        return f"{self.request.summary()}; batch {self.batch}, S_q {s_q}, S_k {s_k}{more}"

    def key(self) -> dict[str, Any]:
        """Return what measurements of it are filed under."""
        batch, s_q, s_k = self.buckets
        return {"request": request_key(self.request), "batch": batch, "q": s_q, "k": s_k}

    def check_makeable(self) -> None:
        """
        Raises:
            UnsupportedRequestError: there are no inputs or no reference for it.
        """
        for name, values in _UNMADE.items():
            if getattr(self.request, name) in values:
                raise UnsupportedRequestError(
                    f"{name}={getattr(self.request, name)} is not measured: no inputs are made for it ({self.id})"
                )
        if self.request.kv_parts > 1 or (self.request.kv_parts and not self.shared):
            raise UnsupportedRequestError(f"of kv_parts only one prefix that all share is measured ({self.id})")
        if self.request.dropout:
            raise UnsupportedRequestError(
                f"dropout is random, so no result can be checked before it is timed: {self.id}"
            )
        if self.request.family in CACHED and self.request.mask != "none" and not self.request.tree:
            raise UnsupportedRequestError(f"a mask over a cache is not measured, but for trees of drafts: {self.id}")

    def plain(self) -> dict[str, Any]:
        """Return the workload as data for JSON."""
        request = dataclasses.replace(self.request, batch_bucket=0, q_bucket=0, k_bucket=0)
        more = {"shared": self.shared} if self.shared else {}
        return {"request": plain_request(request), "lengths": [list(pair) for pair in self.lengths], **more}

    @classmethod
    def of(cls, data: Any, where: str) -> Workload:
        """Return what `plain` made.

        Raises:
            ConfigError: it is no such data; `where` begins the message.
        """
        if not isinstance(data, dict) or not {"request", "lengths"} <= set(data):
            raise ConfigError(f"{where}: a workload has a request and lengths; got {str(data)[:80]}")
        lengths, shared = data["lengths"], data.get("shared", 0)
        whole = isinstance(lengths, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in lengths
        )
        if not whole or type(shared) is not int:
            raise ConfigError(f"{where}: lengths is a list of [S_q, S_k], shared a number; got {str(data)[:80]}")
        try:
            return cls(read_request(data["request"], where), tuple((q, k) for q, k in lengths), shared)
        except InvalidInputError as exc:
            raise ConfigError(f"{where}: {exc}") from exc
