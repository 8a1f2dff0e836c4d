"""Random calls. What kernels and adapters trip over is frequent: windows, softcaps, sinks, rows that see no key,
S_q != S_k, lengths of 0 and 1 and just beyond a block of 64. Everything else is small, so that a second tries many; a
fraction is long, over many tiles of a kernel.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, TypeVar

from ...contract import AttentionRequest, relation
from ..cases import Case
from ..problems import off_boundary
from .deriving import CHANGED, WAYS, derivable
from .saying import SAYINGS
from .wrong import wrongs

__all__ = ["LONGEST", "SHORT", "Drawn", "draw", "scores", "settled"]

_T = TypeVar("_T")

SERVING = ("paged", "mla")
WRONG = 0.25
"""How many calls are spoilt, so that they must be refused by everybody."""

DERIVED = 0.25
"""How many of the calls whose derivatives can be compared are derived."""

SAID = 0.15
"""How many of the other right calls are made with scalars of other types as well."""

LONG = 0.12
"""How many calls are long: of more keys than `SHORT`, and of `LONGEST` at most."""
SHORT, LONGEST = 130, 3000

_SCORES = 2**24
"""Most scores of a long call: 2,900 queries and keys of two heads."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Describes one drawn call: a case of the kit, and how it is spoilt: a name of `polyattn.testing.fuzz.wrong`, or
    nothing. Or how it is derived: a name of `polyattn.testing.fuzz.deriving`. Or with which types its numbers and flags
    are said too: a name of `polyattn.testing.fuzz.saying`."""

    case: Case
    wrong: str = ""
    way: str = ""
    saying: str = ""

    @property
    def id(self) -> str:
        return " ".join(filter(None, (self.case.id, self.wrong, self.way, self.saying)))


def draw(seed: int, number: int) -> Drawn:
    """Call number `number` of a seed: the same on every machine, whatever was drawn before."""
    rng = random.Random(f"{seed} {number}")
    family = _often(rng, dense=9, varlen=5, paged=4, mla=2)
    long = rng.random() < LONG
    lengths = _long(rng, family) if long else _lengths(rng, family)
    request = _request(rng, family, lengths)
    case = Case(
        request=request,
        lengths=lengths,
        storage=_some(rng, 0.4, "contiguous", ("gapped", "padded", "transposed", "misaligned", "expanded")),
        out=_some(rng, 0.2, "", ("contiguous", "strided")),
        sink=_some(rng, 0.4, "usual", ("dominant", "off")),
        logits=_some(rng, 0.6, "usual", ("late",)) if long else _some(rng, 0.12, "usual", ("late", "low", "high")),
        mask_shape=_some(rng, 0.6, "full", ("batch", "heads", "one", "expanded")),
        mask_dtype=_some(rng, 0.2, "same", ("float32",)),
        closed_rows=rng.random() < 0.3,
    )
    wrong = rng.choice(wrongs(family)) if rng.random() < WRONG else ""
    case = settled(case)
    if wrong or not derivable(case) or rng.random() >= DERIVED:
        said = "" if wrong or case.request.dropout else _some(rng, SAID, "", SAYINGS)
        return Drawn(case, wrong, saying=said)
    exact = dataclasses.replace(case, request=dataclasses.replace(case.request, dtype="float64"), mask_dtype="same")
    return Drawn(settled(exact), way=rng.choice((*WAYS, CHANGED)))


def scores(case: Case) -> int:
    """Logits of a call: what it costs."""
    return case.request.heads * sum(s_q * s_k for s_q, s_k in case.lengths)


def settled(case: Case) -> Case:
    """The case a caller can make of these values: what follows from others is set to what follows from them."""
    r, lengths = case.request, case.lengths
    serving = r.family in SERVING
    if serving:
        # The queries are the last tokens of their sequences; no tokens at all marks a padding row.
        lengths = tuple((q, k if k >= q else 0) for q, k in lengths)
    longest_q, longest_k = (max((n[side] for n in lengths), default=0) for side in (0, 1))
    changes: dict[str, Any] = {"grad": _grad(r), "layout": r.layout if r.family == "dense" else "THD"}
    if serving:
        decode = longest_q == 1
        changes |= {"phase": "decode" if decode else "extend", "s_relation": "one" if decode else "fewer"}
        changes["zero_size"] = not sum(q for q, _ in lengths)
        if changes["zero_size"]:
            changes["save_kv_cache"] = None  # there are no new rows
    else:
        same = r.family == "dense" or (r.s_relation == "equal" and all(q == k for q, k in lengths))
        changes["s_relation"] = relation(longest_q, longest_k) if same else "one" if longest_q == 1 else "more"
        changes["zero_size"] = not all(sum(n[side] for n in lengths) for side in (0, 1))
    if r.family == "mla":
        changes |= {"kv_heads": 1, "scale": r.softmax_scale}
        changes["v_head_dim"] = min(r.v_head_dim, r.head_dim)
    if r.scale == 0 and r.dtype in ("bfloat16", "float16"):
        # All logits are 0: plain torch makes no error in the LSE, so that nobody else may make one either.
        changes |= {"lse": False, "grad": _grad(dataclasses.replace(r, lse=False))}
    if r.dropout:
        # Statistics need many rows that see many keys, and all of each row's weight.
        off: dict[str, Any] = {
            "mask": "none",
            "sinks": False,
            "causal": "none",
            "window": (-1, -1),
            "deterministic": False,
        }
        off |= {"heads": 8, "kv_heads": 2}
        lengths = ((67, 67),) * 4
        changes |= {**off, "s_relation": "equal", "zero_size": False, "grad": _grad(dataclasses.replace(r, **off))}
    request = dataclasses.replace(r, **changes)
    settled = dataclasses.replace(
        case,
        request=dataclasses.replace(request, misaligned=False),
        lengths=lengths,
        check="dropout" if request.dropout else "values",
        storage="contiguous" if case.storage == "expanded" and (serving or not lengths) else case.storage,
        out="" if request.grad else case.out,
        sink=case.sink if request.sinks else "usual",
        logits="usual" if case.far and (not request.softmax_scale or request.sinks or request.dropout) else case.logits,
        mask_shape=case.mask_shape if request.mask != "none" else "full",
        mask_dtype=case.mask_dtype if request.mask == "additive" else "same",
        closed_rows=case.closed_rows and request.mask != "none",
        new_rows=request.save_kv_cache is not None,
    )
    if off_boundary(settled):
        settled = dataclasses.replace(settled, request=dataclasses.replace(settled.request, misaligned=True))
    return settled


def _grad(request: AttentionRequest) -> tuple[str, ...]:
    """The gradients that such a call can take."""
    absent = {
        "mask": request.mask != "additive",
        "sinks": not request.sinks,
        "lse": True,
    }
    wanted = tuple(name for name in request.grad if not absent.get(name) and request.family not in SERVING)
    return (*wanted, "lse") if wanted and request.lse else wanted


def _some(rng: random.Random, share: float, usual: _T, others: Sequence[_T]) -> _T:
    """Draw one of `others` with this probability, else the usual value."""
    return rng.choice(others) if rng.random() < share else usual


def _often(rng: random.Random, **weights: int) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _length(rng: random.Random) -> int:
    """Mostly a few, often around a block or two of 64."""
    return rng.choice((0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 63, 64, 65, 66, 100, 128, 130))


def _lengths(rng: random.Random, family: str) -> tuple[tuple[int, int], ...]:
    if family == "dense":
        s_q, s_k = _pair(rng)
        return ((s_q, s_k),) * rng.choice((1, 1, 2, 3))
    count = rng.choice((1, 2, 3, 4))
    if family in SERVING:
        decode = rng.random() < 0.4
        keys = [_length(rng) for _ in range(count)]
        return tuple((min(1, k) if decode else rng.randint(0, min(k, 9)) if k else rng.randint(0, 1), k) for k in keys)
    if rng.random() < 0.3:
        return tuple((n, n) for n in (_length(rng) for _ in range(count)))
    return tuple(_pair(rng) for _ in range(count))


def _long(rng: random.Random, family: str) -> tuple[tuple[int, int], ...]:
    """Mostly a few queries of many keys: what is wrong from one tile to the next shows in them, and that is cheap."""
    keys = rng.choice((128, 129, 192, 256, 257, 300, 320, 384, 513, 600, 1025, 1100, 2049, rng.randint(131, LONGEST)))
    kind = _often(rng, one=2, fewer=5, several=2, equal=1, more=0 if family in SERVING else 1)
    few = rng.randint(2, 9)
    queries = {"one": 1, "fewer": few, "several": rng.randint(10, 300), "equal": keys, "more": keys}[kind]
    pair = (min(queries, keys), keys) if kind != "more" else (keys, rng.randint(1, 300))
    others = () if family == "dense" or rng.random() < 0.5 else _lengths(rng, family)
    return (pair, *others)


def _pair(rng: random.Random) -> tuple[int, int]:
    kind = _often(rng, equal=3, one=2, fewer=3, more=3)
    long = max(_length(rng), 1) if rng.random() < 0.9 else 0
    short = rng.randint(0, min(long, 9))
    return {"equal": (long, long), "one": (1, long), "fewer": (short, long), "more": (long, short)}[kind]


def _request(rng: random.Random, family: str, lengths: tuple[tuple[int, int], ...]) -> AttentionRequest:
    serving = family in SERVING
    kv_heads, group = rng.choice((1, 2, 2, 3)), _some(rng, 0.6, 1, (2, 3, 4, 8))
    most = max(_SCORES // max(sum(s_q * s_k for s_q, s_k in lengths), 1), 1)
    kv_heads = min(kv_heads, most)
    group = min(group, most // kv_heads)
    keys = max((s_k for _, s_k in lengths), default=0)
    head_dim = rng.choice((8, 8, 8, 16, 24, 32, 40, 64, 5))
    kv_dtype = _some(rng, 0.25, "auto", ("fp8_e4m3", "fp8_e5m2", "float32")) if family == "paged" else "auto"
    scaled = 0.0 if family != "paged" else 0.15 if kv_dtype == "auto" else 0.8
    return AttentionRequest(
        family=family,  # type: ignore[arg-type]
        dtype=_often(rng, float32=5, bfloat16=2, float16=2, float64=1),
        head_dim=head_dim,
        v_head_dim=_some(rng, 0.3, head_dim, (1, 4, 8, 16, 24)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        layout=rng.choice(("BSHD", "BHSD")),
        causal=_often(rng, none=3, bottom_right=5, top_left=1 if serving else 2),  # type: ignore[arg-type]
        window=(_bound(rng, keys), _bound(rng, keys)) if rng.random() < 0.5 else (-1, -1),
        softcap=_some(rng, 0.35, 0.0, (0.5, 2.0, 5.0, 30.0)) if family != "mla" else 0.0,
        sinks=family != "mla" and rng.random() < 0.35,
        mask=_often(rng, none=5, bool=4, additive=2),  # type: ignore[arg-type]
        # Logits must stay of order one for a relative error to mean anything.
        scale=_some(rng, 0.35, None, (round(1.5 * head_dim**-0.5, 6), 0.25, 0.0, -0.25)),
        dropout=0.25 if not serving and rng.random() < 0.02 else 0.0,
        lse=rng.random() < 0.6,
        grad=_gradients(rng) if not serving and rng.random() < 0.45 else (),
        deterministic=rng.random() < 0.1,
        s_relation="equal" if all(q == k for q, k in lengths) and rng.random() < 0.8 else "more",
        page_size=rng.choice((1, 2, 5, 16, 64)) if serving else 0,
        kv_layout=rng.choice(("NHD", "HND")) if family == "paged" else "",
        kv_dtype=kv_dtype,
        kv_scales=_some(rng, scaled, "", ("tensor", "head", "token")),
        save_kv_cache=_some(rng, 0.55, None, (False, True)) if family == "paged" else None,
    )


def _bound(rng: random.Random, keys: int) -> int:
    """Draw one bound of a window; for long calls often one around a tile."""
    if keys > SHORT and rng.random() < 0.7:
        return rng.choice((-1, 63, 127, 128, 129, 255, 256, keys // 2, keys // 3, rng.randint(0, keys)))
    return rng.choice((-1, -1, 0, 1, 2, 3, 7, 16, 63, 64, 200))


def _gradients(rng: random.Random) -> tuple[str, ...]:
    every = ("query", "key", "value", "mask", "sinks")
    return every if rng.random() < 0.5 else tuple(name for name in every if rng.random() < 0.5)
