"""Finding the cheapest chain of exact rewrites from a request to what a kernel takes. Pure: no torch, no device."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..contract import AttentionRequest, Rejected, Row, Verdict, request_fields
from ..contract.capability import is_of, lacks
from .base import KEPT, Lowering, Rewrite
from .catalogue import get_lowering, lowerings
from .ways import Stop, Ways

__all__ = ["MAX_STEPS", "Plan", "Planner", "in_reach", "refused_fields"]

MAX_STEPS = 6
"""Longest chain: each field that a kernel of one layout, one head dim and one head count lacks is a step."""

SAME_COST = 1e-6
"""Costs are sums, whose last digits are rounded: plans this near are compared when they are whole."""

_EVERYTHING = frozenset({*(f.name for f in request_fields()), "group", "dims", "same_dims", "kv_storage"})


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a request is served by one backend.

    Attributes:
        request: in normal form.
        lowering, rewrite: the first step; "" and None where the backend takes the request as it is.
        inner: plans of `rewrite.inner`. helpers: what serves `rewrite.helpers`, as the planner was told.
        cost: of all steps, in passes (`Rewrite.cost`).
    """

    request: AttentionRequest
    lowering: str = ""
    rewrite: Rewrite | None = None
    inner: tuple[Plan, ...] = ()
    helpers: tuple[Any, ...] = ()
    cost: float = 0.0

    def steps(self) -> Iterator[Plan]:
        """Every rewrite of the plan, outermost first."""
        if self.rewrite is not None:
            yield self
            for plan in self.inner:
                yield from plan.steps()

    @property
    def names(self) -> tuple[str, ...]:
        """The lowerings, outermost first, each once."""
        return tuple(dict.fromkeys(step.lowering for step in self.steps()))

    @property
    def length(self) -> int:
        """The longest way from the request to the kernel, in steps."""
        return 0 if self.rewrite is None else 1 + max((plan.length for plan in self.inner), default=0)

    def lines(self) -> list[str]:
        """The steps for people: name, what it does here, cost."""
        lines = []
        for step in self.steps():
            rewrite = step.rewrite or Rewrite((), 0.0)
            detail = rewrite.detail or get_lowering(step.lowering).summary
            more = f"; the rest by {', '.join(map(str, step.helpers))}" if step.helpers else ""
            lines.append(f"{step.lowering}: {detail} (cost {rewrite.cost:g}){more}")
        return list(dict.fromkeys(lines))


def refused_fields(
    rows: Sequence[Row], request: AttentionRequest, fixable: frozenset[str] = _EVERYTHING
) -> frozenset[str] | None:
    """The fields that rows refuse of a request; None where a row takes it as it is (`Row.lowered` left aside).

    A row that refuses a field outside `fixable` is out of reach and says nothing. Of a row of another family nothing is
    known but that it refuses `family`, and that it is out of reach where it refuses what no rewrite changes.
    """
    stop = Stop(request)
    return _refused_fields(in_reach(rows, stop), stop, fixable)


def _refused_fields(rows: Iterable[Row], stop: Stop, fixable: frozenset[str]) -> frozenset[str] | None:
    """`refused_fields` of rows that are in reach."""
    request, refused = stop.request, set()
    for row in rows:
        if not is_of(row, request.family):
            refused.add("family")
        elif (missing := lacks(row, request, stop.active, fixable)) is not None:
            if not missing:
                return None
            refused.update(missing)
    return frozenset(refused)


def in_reach(rows: Iterable[Row], stop: Stop) -> Sequence[Row]:
    """The rows that may take a request, or what rewrites make of it: none does that refuses what no rewrite changes."""
    return [row for row in rows if lacks(_kept(row), stop.request, stop.kept, row.lowered) is not None]


@functools.lru_cache(maxsize=65536)
def _kept(row: Row) -> Row:
    """What a row says of the fields that no rewrite changes."""
    when, allows = ({n: c for n, c in named.items() if n in KEPT} for named in (row.when, row.allows))
    return Row(when, allows)


@functools.lru_cache(maxsize=4096)
def _fixable(offered: tuple[Lowering, ...], used: frozenset[str]) -> frozenset[str]:
    """What the lowerings relieve of that were not used on the way here."""
    return frozenset().union(*(lowering.fields for lowering in offered if lowering.name not in used))


@functools.lru_cache(maxsize=4096)
def _relieving(offered: tuple[Lowering, ...], used: frozenset[str], refused: frozenset[str]) -> Sequence[Lowering]:
    """Those of them that relieve of a field that is refused."""
    return [one for one in offered if one.name not in used and not refused.isdisjoint(one.fields)]


_Sought = tuple[Stop, frozenset[str]]


class Planner:
    """Plans for one provider of one backend.

    Args:
        rows: its capability.
        narrow: the plugin's own say on a request that the rows take (None = it agrees).
        helper: what serves a helper's request, None where nothing does; its `str` names it.
        only: names of the lowerings that may be used; None = all.
        ways: rewrites that were made for other providers, with their `helper` in the place of this.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        narrow: Callable[[AttentionRequest], Verdict | None] = lambda request: None,
        helper: Callable[[AttentionRequest], Any | None] = lambda request: None,
        only: Sequence[str] | None = None,
        ways: Ways | None = None,
    ) -> None:
        self._rows, self._narrow, self._ways = rows, narrow, ways or Ways(helper)
        self._lowerings = lowerings() if only is None else tuple(get_lowering(name) for name in only)
        self._near: Sequence[Row] = ()
        self._narrowed: dict[Stop, bool] = {}
        self._plans: dict[_Sought, tuple[Plan | None, float]] = {}

    def plan(self, request: AttentionRequest, steps: int = MAX_STEPS, below: float = math.inf) -> Plan | None:
        """The cheapest plan of at most `steps` rewrites in a row, the shortest of equal ones; None where there is none
        that costs less than `below`. A request under a transform is not rewritten: under vmap a rewrite's tensors would
        be those of the whole batch, and no rewrite was shown to carry tangents or second derivatives."""
        return self.plan_at(self._ways.at(request.normalised()), steps, below)

    def plan_at(self, stop: Stop, steps: int = MAX_STEPS, below: float = math.inf) -> Plan | None:
        """`plan` for a request that is in the ways."""
        self._plans.clear()
        self._near = in_reach(self._rows, stop)
        steps = steps if stop.request.transform in ("", "subclass") else 0
        return self._plan(stop, steps, frozenset(), below)

    def _plan(self, stop: Stop, steps: int, used: frozenset[str], below: float) -> Plan | None:
        # The same rewrites in another order lead to the same request: each such state is planned once.
        found, sought = self._plans.get((stop, used), (None, -math.inf))
        if found is None and sought < below:
            found = self._search(stop, steps, used, below)
            self._plans[stop, used] = found, below
        return found if found is not None and found.cost < below else None

    def _search(self, stop: Stop, steps: int, used: frozenset[str], below: float) -> Plan | None:
        fixable = _fixable(self._lowerings, used) if steps else frozenset()
        refused = self._refused(stop, fixable)
        if refused is None:
            return Plan(stop.request)
        if not refused or not steps:
            return None
        best: Plan | None = None
        for lowering in _relieving(self._lowerings, used, refused):
            fits = False
            for rewrite, inner in self._ways.of(stop, lowering):
                # Offers come cheapest first: one that fits leaves nothing for a dearer one to do.
                if fits:
                    break
                if rewrite.cost > best.cost if best is not None else rewrite.cost >= below:
                    continue
                most = below if best is None else best.cost + SAME_COST
                found = self._rewritten(stop, lowering, rewrite, inner, steps - 1, used, most)
                if found is None:
                    continue
                if best is None or (found.cost, found.length) < (best.cost, best.length):
                    best = found
                fits = all(lowering.fields.isdisjoint(self._refused(at, fixable) or ()) for at in inner)
        return best

    def _rewritten(
        self,
        stop: Stop,
        lowering: Lowering,
        rewrite: Rewrite,
        stops: Sequence[Stop],
        steps: int,
        used: frozenset[str],
        below: float,
    ) -> Plan | None:
        inner = []
        for at in stops:
            plan = self._plan(at, steps, used | {lowering.name}, below - rewrite.cost)
            if plan is None:
                return None
            inner.append(plan)
        helpers = []
        for wanted in rewrite.helpers:
            helper = self._ways.help(wanted)
            if helper is None:
                return None
            helpers.append(helper)
        # Of alternatives one runs; what several calls cost more than one is in the rewrite's own cost.
        cost = rewrite.cost + max((plan.cost for plan in inner), default=0.0)
        return Plan(stop.request, lowering.name, rewrite, tuple(inner), tuple(helpers), cost)

    def _refused(self, stop: Stop, fixable: frozenset[str]) -> frozenset[str] | None:
        refused = _refused_fields(self._near, stop, fixable)
        if refused is None:
            if stop not in self._narrowed:
                self._narrowed[stop] = isinstance(self._narrow(stop.request), Rejected)
            # What the plugin itself refuses names no field: any rewrite may help.
            return _EVERYTHING if self._narrowed[stop] else None
        return refused
