"""The families of calls as data: what their functions take, what comes back, and what is differentiable.

One table is behind the checks of what a plugin hands over, the lengths of a call, the custom ops and their gradients,
and the kit's families. `protocols.py` says the same in prose, with shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

__all__ = ["FAMILY_SPECS", "Argument", "Extent", "FamilySpec", "packed_batch"]

Extent = tuple[int, int, int]
"""(B, N or `packed_batch`; the longest S_q; the longest S_k)."""

Kind = Literal["tensor", "optional", "int", "tables", "parts"]


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a family's functions.

    Attributes:
        kind: tensor; optional, a tensor or None; int, a number of the host; tables,
            `PagedTables`; parts, a sequence of `KVPart`.
        grad: the gradient's name in `AttentionRequest.grad`; empty = this argument has none.
        backward: the family's backward takes it too.
        given_when: a request field. The argument is given only while the field is on, so that packages that are older
            than the field go on. Empty = always given, if only as None.
    """

    name: str
    kind: Kind = "tensor"
    grad: str = ""
    backward: bool = True
    given_when: str = ""


@dataclasses.dataclass(frozen=True)
class FamilySpec:
    """One family.

    Attributes:
        positional: the leading tensors. keywords: the others without `out`, in the order of the custom op.
        layouts: of a request. second: what comes back beside the output: an `lse` where it is asked for, or a `state`.
        forward, backward: names of the protocols in `polyattn.contract`; no backward = empty.
        extent: reads the lengths of a call from the arguments of `Bound.forward`, with the layout in front.
        call: the public function. beside: further keywords of the forward, which no custom op takes.
        added: optional tensors that joined later. Forward and backward take them, and the custom op behind its plan
            with None as default, so that graphs of before are as they were. Each has a `given_when`.
    """

    name: str
    positional: tuple[Argument, ...]
    keywords: tuple[Argument, ...]
    layouts: tuple[str, ...]
    extent: Callable[..., Extent]
    forward: str
    call: str
    backward: str = ""
    second: Literal["lse", "state"] = "lse"
    beside: tuple[Argument, ...] = ()
    added: tuple[Argument, ...] = ()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All that a custom op takes before its plan: neither `out`, nor what is beside, nor what was added."""
        return (*self.positional, *self.keywords)

    @functools.cached_property
    def conditional(self) -> tuple[str, ...]:
        """The request fields that decide whether an argument is given."""
        every = (*self.arguments, *self.beside, *self.added)
        return tuple(dict.fromkeys(one.given_when for one in every if one.given_when))

    @property
    def differentiable(self) -> tuple[Argument, ...]:
        """Arguments that a custom op gives gradients of, in order."""
        return tuple(one for one in self.arguments if one.grad)

    def head_axis(self, layout: str) -> int:
        """Axis of H_q in the LSE of a call."""
        return 2 if layout == "BSHD" else 1

    def taken(self, function: Literal["forward", "backward"]) -> Iterator[tuple[Argument, str]]:
        """The keywords of a function, each as a signature has it with its default."""
        for one in self.keywords:
            if function == "forward" or one.backward:
                default = {"optional": "=None", "parts": "=()"}.get(one.kind, "")
                yield one, one.name + default
        for one in self.added:
            yield one, f"{one.name}=None"
        if function == "forward":
            for one in (*self.beside, Argument("out", "optional")):
                yield one, f"{one.name}=None"


def _by_layout(layout: str, query: Any, key: Any, *rest: Any, **keywords: Any) -> Extent:
    length = 1 if layout == "BSHD" else 2
    return query.shape[0], query.shape[length], key.shape[length]


def packed_batch(sequences: int, tokens: int, longest: int) -> int:
    """How many sequences of the longest length have as many queries as a packed call, rounded up.

    The number of sequences says little of a packed call: one long prompt among 95 of a few tokens works like one.

    Args:
        sequences: N. tokens: T_q. longest: S_q of the longest, or a bound of it.
    """
    return min(sequences, -(-tokens // max(longest, 1)))


def _by_cu_seqlens(
    layout: str, *tensors: Any, cu_seqlens_q: Any, max_seqlen_q: int, max_seqlen_k: int, **keywords: Any
) -> Extent:
    return packed_batch(cu_seqlens_q.shape[0] - 1, tensors[0].shape[0], max_seqlen_q), max_seqlen_q, max_seqlen_k


def _by_tables(layout: str, *tensors: Any, tables: Any, **keywords: Any) -> Extent:
    return tables.seq_lens.shape[0], tables.max_seqlen_q, tables.max_seqlen_k


def _by_row(layout: str, query: Any, *rest: Any, cu_seqlens: Any = None, **keywords: Any) -> Extent:
    # Lengths within a packed row are on the device: no sequence is longer than the row.
    batch, length = query.shape[:2]
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1, length, length


_QUERY = Argument("query", grad="query")
_QKV = (_QUERY, Argument("key", grad="key"), Argument("value", grad="value"))
_MASK = Argument("attn_mask", "optional")
_SINKS = Argument("sinks", "optional", grad="sinks", backward=False)
_LENGTHS = (
    *(Argument("cu_seqlens_q"), Argument("cu_seqlens_k")),
    *(Argument("max_seqlen_q", "int"), Argument("max_seqlen_k", "int")),
)
_TABLES = Argument("tables", "tables")
_ALIBI = Argument("alibi", "optional", given_when="alibi")
_SEGMENTS = tuple(Argument(f"{side}_segments", "optional", given_when="segments") for side in "qk")
_PARTS = Argument("kv_parts", "parts", given_when="kv_parts")

_SPECS = (
    FamilySpec(
        "dense",
        _QKV,
        (_MASK, _SINKS),
        layouts=("BSHD", "BHSD"),
        extent=_by_layout,
        forward="DenseForward",
        backward="DenseBackward",
        beside=(Argument("place", "optional", given_when="place"),),
        added=(_ALIBI, *_SEGMENTS),
        call="attention",
    ),
    FamilySpec(
        "varlen",
        _QKV,
        (_MASK, _SINKS, *_LENGTHS),
        layouts=("THD",),
        extent=_by_cu_seqlens,
        forward="VarlenForward",
        backward="VarlenBackward",
        added=(_ALIBI,),
        call="varlen_attention",
    ),
    FamilySpec(
        "paged",
        (Argument("query"), Argument("key_cache"), Argument("value_cache")),
        (
            _TABLES,
            *(Argument(name, "optional") for name in ("key", "value", "attn_mask", "sinks", "k_scale", "v_scale")),
            _PARTS,
        ),
        layouts=("THD",),
        extent=_by_tables,
        forward="PagedForward",
        added=(_ALIBI,),
        call="paged_attention",
    ),
    FamilySpec(
        "mla",
        (Argument("query"), Argument("cache")),
        (_TABLES, _MASK, _PARTS),
        layouts=("THD",),
        extent=_by_tables,
        forward="MLAForward",
        added=(Argument("token_indices", "optional", given_when="token_topk"),),
        call="mla_attention",
    ),
    FamilySpec(
        "block_sparse",
        _QKV,
        (Argument("block_counts"), Argument("block_indices"), Argument("block_valid", "optional")),
        layouts=("BHSD",),
        extent=_by_layout,
        forward="BlockSparseForward",
        backward="BlockSparseBackward",
        call="block_sparse_attention",
        added=(Argument("block_starts", "optional", given_when="block_starts"),),
    ),
    FamilySpec(
        "linear",
        _QKV,
        (
            *(Argument("gate", grad="gate"), Argument("beta", grad="beta")),
            *(Argument("state", "optional", grad="state"), Argument("cu_seqlens", "optional")),
        ),
        layouts=("BSHD",),
        extent=_by_row,
        forward="LinearForward",
        second="state",
        beside=(
            *(Argument(name, "optional", given_when="raw_gates") for name in ("a_log", "dt_bias", "gate_bound")),
            *(Argument("state_slots", "optional", given_when="state_slots"),),
            *(Argument("parents", "optional", given_when="tree"),),
        ),
        call="linear_attention",
    ),
)
FAMILY_SPECS = {spec.name: spec for spec in _SPECS}
