"""This module lists the values at which each field of a request is tried: its off value, its bounds, something between,
and something outside.

Which of these lie inside a backend's capability is read from its rows, never written here.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from ..contract import DTYPES, FAMILIES, PHASES, AttentionRequest, Constraint, Range, Row, request_fields
from ..contract.request import Field
from ..contract.vocabulary import WORDS

__all__ = ["CANDIDATES", "CONTEXT", "FLAGS", "candidates", "declared", "inside", "taken", "unmet"]

CONTEXT = frozenset(
    (
        *("platform", "arch", "toolkit", "features", "heads", "kv_heads", "layout", "place", "options"),
        *("q_bucket", "k_bucket", "batch_bucket"),
    )
)
"""Fields that no row has to declare: facts of the machine, shapes that are tried through other fields, and a place,
which only methods look at."""

CANDIDATES: dict[str, tuple[Hashable, ...]] = {
    "family": FAMILIES,
    "dtype": DTYPES,
    "head_dim": (64, 16, 40, 1, 128, 256),
    "phase": PHASES,
    "kv_dtype": ("auto", "float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8"),
    "v_head_dim": (0, 24, 64, 128),
    "group": (1, 4, 8),
    "causal": WORDS["causal"],
    # Left, right and both; the row's own key alone; no bound in effect because it is wider than the keys.
    "window": ((-1, -1), (17, -1), (-1, 9), (8, 5), (0, 0), (300, 300)),
    "chunk": (0, 16, 1),
    "softcap": (0.0, 2.0, 30.0),
    "sinks": (False, True),
    "mask": WORDS["mask"],
    "alibi": (False, True),
    "segments": WORDS["segments"],
    "tree": (False, True),
    # As a multiple of the default: logits must stay of order one for a relative error to mean anything.
    "scale": (None, 1.5),
    "dropout": (0.0, 0.25),
    "lse": (False, True),
    "grad": (
        (),
        ("query", "key", "value"),
        ("query",),
        ("key", "value"),
        ("query", "key", "value", "mask"),
        ("query", "key", "value", "sinks"),
        ("query", "key", "value", "mask", "sinks"),
        ("mask",),
        ("sinks",),
    ),
    "deterministic": (False, True),
    "batch_invariant": (False, True),
    "graph_capture": WORDS["graph_capture"],
    "s_relation": WORDS["s_relation"],
    "cross": (False, True),
    "multimodal": (False, True),
    "page_size": (0, 1, 5, 16, 64),
    "kv_layout": WORDS["kv_layout"],
    "kv_scales": WORDS["kv_scales"],
    "save_kv_cache": (None, False, True),
    "kv_parts": (0, 1, 3),
    "spec_topk": (0, 1, 4),
    "chunked_prefix": (False, True),
    "token_topk": (0, 5, 24),
    "method": ("", "gdn", "kda", "dual_chunk"),
    "block_map": (False, True),
    "block_sizes": (False, True),
    "block_starts": (False, True),
    "block_shape": ((0, 0), (64, 64), (128, 128), (64, 128), (48, 48)),
    "state_dtype": ("", "float32", "bfloat16"),
    "state_layout": WORDS["state_layout"],
    "state_slots": (False, True),
    "state_out": WORDS["state_out"],
    "raw_gates": WORDS["raw_gates"],
    "beta_range": (1, 2),
    "qk_norm": (False, True),
    "zero_size": (False, True),
    "large": (False, True),
    "misaligned": (False, True),
    "transform": WORDS["transform"],
}
"""Every judged field (a test compares it with the request), and `group`, which is judged without being one."""

FLAGS = frozenset(("cross", "multimodal"))
"""Fields that say where tensors come from and change no number: tried alone, not in combinations."""


def candidates(name: str, rows: Sequence[Row]) -> tuple[Hashable, ...]:
    """The values one field is tried at, the bounds of every row's range and what lies just beyond them included."""
    found = list(CANDIDATES[name])
    for row in rows:
        for constraint in (row.when.get(name), row.allows.get(name)):
            if isinstance(constraint, Range):
                found += _around(constraint)
            found += getattr(constraint, "values", ()) if name != "grad" else ()
    return tuple(dict.fromkeys(found))


def _around(bounds: Range) -> Iterator[Hashable]:
    step = bounds.multiple_of
    whole = all(b is None or (float(b).is_integer() and abs(b) >= 1) for b in (bounds.low, bounds.high))
    if not whole:
        return
    for bound in (bounds.low, bounds.high):
        if bound is not None:
            yield from (n for n in (int(bound) - step, int(bound), int(bound) + step) if n > 0)
    if step > 1 and bounds.low is not None:
        yield int(bounds.low) + 1


def inside(name: str, row: Row) -> tuple[Hashable, ...]:
    """The candidates that one row takes, off value included where it is one of them."""
    return taken(name, row, candidates(name, [row]))


def taken(name: str, row: Row, values: Sequence[Hashable]) -> tuple[Hashable, ...]:
    """Return which values of a field one row takes."""
    constraints = [c for c in (row.when.get(name), row.allows.get(name)) if c is not None]
    if not constraints and name not in row.lowered:
        return (_off(name),)
    return tuple(v for v in values if all(c.reason(v) is None for c in constraints))


def _off(name: str) -> Hashable:
    if name == "group":
        return 1
    value: Hashable = getattr(AttentionRequest(), name)
    return value


def declared(rows: Sequence[Row], request: AttentionRequest) -> bool:
    """Return whether some row says it serves a request in normal form: the kit's own reading, to hold selection
    against."""
    return any(next(unmet(row, request), None) is None for row in rows)


def unmet(row: Row, request: AttentionRequest) -> Iterator[str]:
    """The fields for which a row does not say that it serves a request in normal form."""
    kind: Any = type(request)
    constraints, named, unnamed = _words(row, kind)
    yield from (name for name, constraint in constraints if constraint.reason(getattr(request, name)) is not None)
    if request.group != 1 and "group" not in named:
        yield "group"
    yield from (f.name for f in unnamed if f.kind != "option" or not f.is_off(request))


@functools.lru_cache(maxsize=4096)
def _words(row: Row, kind: type[AttentionRequest]) -> tuple[list[tuple[str, Constraint]], set[str], list[Field]]:
    """(what a row says of fields, the fields that it names, those that it does not)."""
    constraints = [*row.when.items(), *((n, c) for n, c in row.allows.items() if n not in row.lowered)]
    named = {*row.when, *row.allows, *row.lowered}
    if "dims" in named:
        named |= {"head_dim", "v_head_dim"}
    return constraints, named, [f for f in request_fields(kind) if f.kind != "context" and f.name not in named]
