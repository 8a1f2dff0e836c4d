"""Capability as data: rows of constraints over the request's fields, and the verdict they give.

A capability is an OR of rows, a row an AND of constraints. One source feeds the verdicts with reasons, the
support matrix, the conformance cases and what hosts ask before they build a layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from ..errors import PluginError, did_you_mean
from .request import AttentionRequest, request_fields

__all__ = [
    "ANY",
    "SESSION",
    "Accepted",
    "AtLeast",
    "Constraint",
    "Has",
    "NotEmpty",
    "OneOf",
    "Range",
    "Rejected",
    "Row",
    "SubsetOf",
    "Verdict",
    "WiderThan",
    "Window",
    "judge",
    "row",
]


class Constraint(Protocol):
    """What one field may be. `reason` is None when `value` is allowed, else the end of a sentence.

    A constraint may have `allows(value) -> bool` too: whether `reason` is None, without the making of a sentence.
    """

    def reason(self, value: Any) -> str | None: ...

    def describe(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class _Any:
    def reason(self, value: Any) -> None:
        return None

    def describe(self) -> str:
        return "any"


ANY: Constraint = _Any()
"""The field is supported at every value."""


@dataclasses.dataclass(frozen=True)
class _Session:
    def reason(self, value: Any) -> str | None:
        if value is not True:
            return None
        return (
            "is a call by itself, for which this kernel would plan on the host while the graph is recorded: record a "
            "step of polyattn.serving, which is planned before, or use a backend that does not plan"
        )

    def describe(self) -> str:
        return "planned steps of polyattn.serving"


SESSION: Constraint = _Session()
"""`graph_capture` of a kernel that plans on the host: recorded through `Bound.session`, never as a call by itself."""


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The value is one of `values` (pairs too: `dims=((192, 128),)`)."""

    values: tuple[Any, ...]

    def allows(self, value: Any) -> bool:
        return value in self.values

    def reason(self, value: Any) -> str | None:
        return None if value in self.values else f"is not {self.describe()}"

    def describe(self) -> str:
        shown = ", ".join(str(v) for v in self.values)
        return shown if len(self.values) == 1 else f"one of {shown}"


@dataclasses.dataclass(frozen=True)
class Range:
    """A number from `low` to `high` (None = no bound), a multiple of `multiple_of`."""

    low: float | None = None
    high: float | None = None
    multiple_of: int = 1

    def allows(self, value: Any) -> bool:
        good = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        return good and not (self.multiple_of > 1 and value % self.multiple_of)

    def reason(self, value: Any) -> str | None:
        good = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        return None if good and not (self.multiple_of > 1 and value % self.multiple_of) else f"is not {self.describe()}"

    def describe(self) -> str:
        low, high = self.low, self.high
        bounds = f"{low} to {high}" if None not in (low, high) else f">= {low}" if high is None else f"<= {high}"
        if low is None and high is None:
            bounds = "any number"
        return bounds + (f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else "")


@dataclasses.dataclass(frozen=True)
class SubsetOf:
    """A tuple whose members all come from `values` (gradients)."""

    values: tuple[str, ...]

    def reason(self, value: Any) -> str | None:
        extra = sorted(set(value) - set(self.values))
        return f"includes {', '.join(extra)}, allowed: {', '.join(self.values) or 'none'}" if extra else None

    def describe(self) -> str:
        return "of " + ", ".join(self.values)


@dataclasses.dataclass(frozen=True)
class NotEmpty:
    """A tuple with at least one member (gradients)."""

    def reason(self, value: Any) -> str | None:
        return None if value else f"is not {self.describe()}"

    def describe(self) -> str:
        return "at least one"


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """A version tuple of at least `low`. An unknown version () passes: it was not measured, not refused."""

    low: tuple[int, ...]

    def reason(self, value: Any) -> str | None:
        return None if not value or tuple(value) >= self.low else f"is not {self.describe()}"

    def describe(self) -> str:
        return ">= " + ".".join(map(str, self.low))


@dataclasses.dataclass(frozen=True)
class Has:
    """A tuple of features that contains `member` (or lacks it, with `present=False`)."""

    member: str
    present: bool = True

    def reason(self, value: Any) -> str | None:
        return None if (self.member in value) is self.present else f"is not {self.describe()}"

    def describe(self) -> str:
        return f"{'with' if self.present else 'without'} {self.member}"


@dataclasses.dataclass(frozen=True)
class Window:
    """Sliding windows: which of the two bounds the kernel knows (S4; in normal form causal has no right bound)."""

    left: bool = True
    right: bool = True

    def reason(self, value: Any) -> str | None:
        left, right = value
        if left >= 0 and not self.left:
            return "has a left bound"
        if right >= 0 and not self.right:
            return "has a right bound"
        return None

    def describe(self) -> str:
        return "both bounds" if self.left and self.right else "left bound" if self.left else "right bound"


@dataclasses.dataclass(frozen=True)
class WiderThan:
    """A sliding window that reaches over more than `keys` keys beside the query's own one, bounded to the left, and to
    the right too if `right` says so."""

    keys: int
    right: bool = False

    def reason(self, value: Any) -> str | None:
        left, right = value
        bounded = left >= 0 and (right >= 0 or not self.right)
        return None if bounded and left + max(right, 0) > self.keys else f"is not {self.describe()}"

    def describe(self) -> str:
        return f"a window bounded {'on both sides' if self.right else 'to the left'}, of more than {self.keys + 1} keys"


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant of a capability: it applies `when` all of these hold, and then allows these values.

    Attributes:
        when: field -> constraint; a row whose `when` does not hold has nothing to say about the request.
        allows: field -> constraint; every required field, and every option that may leave its off value.
        lowered: field -> name of the exact rewrite that serves values outside `allows` (DESIGN: lowerings).
        note: where the limits come from.
    """

    when: Mapping[str, Constraint]
    allows: Mapping[str, Constraint]
    lowered: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    def __hash__(self) -> int:
        return id(self)

    @functools.cached_property
    def _tests(self) -> Sequence[tuple[str, Callable[[Any], bool]]]:
        """What may fail, by field. A row is asked about far more requests than it takes: it makes no sentence here."""
        limits = [*self.when.items(), *self.allows.items()]
        return [(name, _test(limit)) for name, limit in limits if limit is not ANY]

    @functools.cached_property
    def _undeclared(self) -> Sequence[str]:
        have = {*self.allows, *self.when}
        names = {"family", "dtype", "dims" if "dims" in have else "head_dim"}
        return [f"the capability row does not declare {n}" for n in sorted(names - have)]

    @functools.cached_property
    def _of_family(self) -> Callable[[str], bool]:
        return _test(self.when.get("family", ANY))

    def applies(self, request: AttentionRequest) -> list[str]:
        """The `when` clauses that do not hold, as sentences; empty when the row applies."""
        return _sentences(request, self.when, {})[0]

    def misses(self, request: AttentionRequest, active: Iterable[tuple[str, Any]]) -> tuple[list[str], list[str]]:
        """(reasons this row refuses the request, lowerings it needs to accept it)."""
        reasons, lowerings = _sentences(request, self.allows, self.lowered)
        for name, value in active:
            if name not in self.allows and name not in self.when and not self._covers(name):
                if name in self.lowered:
                    lowerings.append(self.lowered[name])
                else:
                    reasons.append(f"{name}={_show(value)} is not declared")
        return reasons, list(dict.fromkeys(lowerings))

    def _covers(self, name: str) -> bool:
        # A pair constraint on (D_qk, D_v) declares D_v.
        return name == "v_head_dim" and ("dims" in self.allows or "dims" in self.when)


def is_of(row: Row, family: str) -> bool:
    """Whether a row speaks of a family."""
    return row._of_family(family)


def lacks(row: Row, request: AttentionRequest, active: Iterable[str], among: Collection[str]) -> list[str] | None:
    """The fields in which a row refuses a request; None where one of these is not `among` those that matter.

    Args:
        active: names of the options that are not off (`AttentionRequest.active`).
    """
    missing = []
    for name, allowed in row._tests:
        if not allowed(getattr(request, name)):
            if name not in among:
                return None
            missing.append(name)
    for name in active:
        if name not in row.allows and name not in row.when and not row._covers(name):
            if name not in among:
                return None
            missing.append(name)
    return missing


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _sentences(
    request: AttentionRequest, named: Mapping[str, Constraint], lowered: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """(what does not hold, as sentences; the lowerings of those fields that have one)."""
    reasons, lowerings = [], []
    for name, constraint in named.items():
        value = getattr(request, name)
        if constraint is ANY or (type(constraint) is OneOf and value in constraint.values):
            continue
        if (ending := constraint.reason(value)) is None:
            continue
        if name in lowered:
            lowerings.append(lowered[name])
        else:
            reasons.append(f"{name}={_show(value)} {ending}")
    return reasons, lowerings


def _test(limit: Constraint) -> Callable[[Any], bool]:
    """Whether a constraint allows a value, as one function."""
    if type(limit) is OneOf:
        return limit.values.__contains__
    if type(limit) is SubsetOf:
        return frozenset(limit.values).issuperset
    allows: Callable[[Any], bool] | None = getattr(limit, "allows", None)
    return allows or (lambda value: limit.reason(value) is None)


def _constraint(name: str, value: Any) -> Constraint | None:
    """Shorthand of rows: True = any value, False = not declared, a value or a tuple of values = one of them."""
    if value is True:
        return ANY
    if value is False:
        return None
    if hasattr(value, "reason"):
        return cast(Constraint, value)
    if isinstance(value, (set, frozenset, tuple, list)):
        values = tuple(value) if isinstance(value, (tuple, list)) else tuple(sorted(value))
        return (SubsetOf if name == "grad" else OneOf)(values)
    return OneOf((value,))


def _condition(name: str, value: Any) -> Constraint | None:
    """The same in a condition, where True and False are values: nothing is declared there, so nothing is left out."""
    return OneOf((value,)) if isinstance(value, bool) else _constraint(name, value)


def holds(named: Mapping[str, Constraint], request: AttentionRequest) -> bool:
    """Whether every condition holds for a request. No sentence is made."""
    for name, constraint in named.items():
        value = getattr(request, name)
        # Most conditions are these, and there are some thirty in the first call of a kind.
        if type(constraint) is OneOf:
            if value not in constraint.values:
                return False
        elif constraint is ANY:
            continue
        elif (allows := getattr(constraint, "allows", None)) is not None:
            if not allows(value):
                return False
        elif constraint.reason(value) is not None:
            return False
    return True


_NAMES = frozenset({*(f.name for f in request_fields()), "group", "dims", "same_dims", "kv_storage"})
"""What rows, rules and `when` clauses may speak of: the request's fields and its derived values."""


def _known(name: str) -> str:
    if name not in _NAMES:
        raise PluginError(f"capability row names {name!r}, which is no request field.{did_you_mean(name, _NAMES)}")
    return name


def row(
    *, when: Mapping[str, Any] | None = None, lowered: Mapping[str, str] | None = None, note: str = "", **allows: Any
) -> Row:
    """Build a row from shorthand.

    Example:
        >>> row(when={"arch": ("sm90",)}, family="dense", dtype=("bfloat16", "float16"),
        ...     head_dim=Range(8, 256, multiple_of=8), causal=True, lse=True).allows["lse"] is ANY
        True

    Raises:
        PluginError: a name that is no request field.
    """
    # A row of another family has nothing to say about a request, so it is never its nearest miss.
    family = {"family": allows.pop("family")} if "family" in allows else {}
    whens = {k: c for k, v in family.items() if (c := _constraint(k, v))}
    whens.update({_known(k): c for k, v in (when or {}).items() if (c := _condition(k, v))})
    allow = {_known(k): c for k, v in allows.items() if (c := _constraint(k, v))}
    return Row(whens, allow, {_known(k): v for k, v in (lowered or {}).items()}, note)


@dataclasses.dataclass(frozen=True)
class Accepted:
    """The backend serves the request. `lowerings`: the exact rewrites it needs, in order."""

    lowerings: tuple[str, ...] = ()
    row: Row | None = None

    def __bool__(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Rejected:
    """The backend does not serve the request, and why: each reason names field, value and what is allowed."""

    reasons: tuple[str, ...]

    def __init__(self, reasons: Sequence[str] | str) -> None:
        object.__setattr__(self, "reasons", (reasons,) if isinstance(reasons, str) else tuple(reasons))

    def __bool__(self) -> bool:
        return False


Verdict = Accepted | Rejected


def taken(rows: Sequence[Row], request: AttentionRequest, active: Collection[str]) -> Accepted | None:
    """The first row that needs fewest lowerings, None where every row refuses. No sentence is made.

    Args:
        active: names of the options that are not off.
    """
    best = None
    for candidate in rows:
        if candidate._undeclared or not holds(candidate.when, request):
            continue
        missing = lacks(candidate, request, active, candidate.lowered)
        if missing is None:
            continue
        lowerings = tuple(dict.fromkeys(candidate.lowered[name] for name in missing))
        if best is None or len(lowerings) < len(best.lowerings):
            best = Accepted(lowerings, candidate)
            if not lowerings:
                break
    return best


def judge(rows: Sequence[Row], request: AttentionRequest, active: Iterable[tuple[str, Any]] | None = None) -> Verdict:
    """The verdict of capability rows: the first row that needs fewest lowerings, else the nearest miss's reasons."""
    active = tuple(request.active() if active is None else active)
    if (found := taken(rows, request, [name for name, _ in active])) is not None:
        return found
    near = [[*one._undeclared, *one.misses(request, active)[0]] for one in rows if holds(one.when, request)]
    nearest = min(near, key=len, default=[])
    return Rejected(nearest or _outside(rows, request) or ["no capability row is declared"])


def _outside(rows: Sequence[Row], request: AttentionRequest) -> list[str]:
    """Why none of the rows applies: what is wrong for the nearest. Where that is one field, what all of these want."""
    wrong = [{n: c for n, c in one.when.items() if c.reason(getattr(request, n)) is not None} for one in rows]
    fewest = min(wrong, key=len, default={})
    alike = [c for one in wrong if one.keys() == fewest.keys() for c in one.values()]
    wanted = dict.fromkeys(value for c in alike if isinstance(c, OneOf) for value in c.values)
    if len(fewest) == 1 and all(isinstance(c, OneOf) for c in alike):
        fewest = dict.fromkeys(fewest, OneOf(tuple(wanted)))
    return _sentences(request, fewest, {})[0]
