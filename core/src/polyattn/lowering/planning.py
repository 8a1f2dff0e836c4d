"""Finding the cheapest chain of exact rewrites from a request to what a kernel takes. Pure: no torch, no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..contract import AttentionRequest, Rejected, Row, Verdict, request_fields
from .base import Lowering, Rewrite
from .catalogue import get_lowering, lowerings

__all__ = ["MAX_STEPS", "Plan", "Planner", "refused_fields"]

MAX_STEPS = 6
"""Longest chain: each field that a kernel of one layout, one head dim and one head count lacks is a step."""

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

    A row that refuses a field outside `fixable` is out of reach and says nothing; of a row of another family nothing is
    known but that it refuses `family`.
    """
    active = request.active()
    refused: set[str] = set()
    for row in rows:
        family = row.when.get("family")
        if family is not None and family.reason(request.family) is not None:
            refused.add("family")
            continue
        named = {*row.when, *row.allows}
        missing = {
            name
            for limits in (row.when, row.allows)
            for name, limit in limits.items()
            if limit.reason(getattr(request, name)) is not None
        }
        missing |= {n for n, _ in active if n not in named and not (n == "v_head_dim" and "dims" in named)}
        if not missing:
            return None
        if missing <= fixable:
            refused |= missing
    return frozenset(refused)


class Planner:
    """Plans for one provider of one backend.

    Args:
        rows: its capability.
        narrow: the plugin's own say on a request that the rows take (None = it agrees).
        helper: what serves a helper's request, None where nothing does; its `str` names it.
        only: names of the lowerings that may be used; None = all.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        narrow: Callable[[AttentionRequest], Verdict | None] = lambda request: None,
        helper: Callable[[AttentionRequest], Any | None] = lambda request: None,
        only: Sequence[str] | None = None,
    ) -> None:
        self._rows, self._narrow, self._helper = rows, narrow, helper
        self._lowerings = lowerings() if only is None else tuple(get_lowering(name) for name in only)
        self._narrowed: dict[AttentionRequest, bool] = {}
        self._plans: dict[tuple[AttentionRequest, frozenset[str]], Plan | None] = {}

    def plan(self, request: AttentionRequest, steps: int = MAX_STEPS) -> Plan | None:
        """The cheapest plan of at most `steps` rewrites in a row, the shortest of equal ones; None where there is
        none. A request under a transform is not rewritten: under vmap a rewrite's tensors would be those of the whole
        batch, and no rewrite was shown to carry tangents or second derivatives."""
        request = request.normalised()
        self._plans.clear()
        return self._plan(request, steps if request.transform in ("", "subclass") else 0, frozenset())

    def _plan(self, request: AttentionRequest, steps: int, used: frozenset[str]) -> Plan | None:
        # The same rewrites in another order lead to the same request: each such state is planned once.
        state = (request, used)
        if state not in self._plans:
            self._plans[state] = self._search(request, steps, used)
        return self._plans[state]

    def _search(self, request: AttentionRequest, steps: int, used: frozenset[str]) -> Plan | None:
        left = [lowering for lowering in self._lowerings if lowering.name not in used] if steps else []
        refused = self._refused(request, left)
        if refused is None:
            return Plan(request)
        best: Plan | None = None
        for lowering in left:
            if refused.isdisjoint(lowering.fields):
                continue
            for rewrite in lowering.rewrites(request):
                if best is not None and rewrite.cost > best.cost:
                    continue
                found = self._rewritten(request, lowering, rewrite, steps - 1, used)
                if found is None:
                    continue
                if best is None or (found.cost, found.length) < (best.cost, best.length):
                    best = found
                # Offers come cheapest first: one that fits leaves nothing for a dearer one to do.
                if all(lowering.fields.isdisjoint(self._refused(plan.request, left) or ()) for plan in found.inner):
                    break
        return best

    def _rewritten(
        self, request: AttentionRequest, lowering: Lowering, rewrite: Rewrite, steps: int, used: frozenset[str]
    ) -> Plan | None:
        rewrite = dataclasses.replace(rewrite, inner=tuple(map(_by_itself, rewrite.inner)))
        inner = []
        for wanted in rewrite.inner:
            plan = self._plan(wanted, steps, used | {lowering.name})
            if plan is None:
                return None
            inner.append(plan)
        helpers = []
        for wanted in rewrite.helpers:
            helper = self._helper(_by_itself(wanted))
            if helper is None:
                return None
            helpers.append(helper)
        # Of alternatives one runs; what several calls cost more than one is in the rewrite's own cost.
        cost = rewrite.cost + max((plan.cost for plan in inner), default=0.0)
        return Plan(request, lowering.name, rewrite, tuple(inner), tuple(helpers), cost)

    def _refused(self, request: AttentionRequest, left: Sequence[Lowering]) -> frozenset[str] | None:
        refused = refused_fields(self._rows, request, frozenset().union(*(lowering.fields for lowering in left)))
        if refused is None:
            if request not in self._narrowed:
                self._narrowed[request] = isinstance(self._narrow(request), Rejected)
            # What the plugin itself refuses names no field: any rewrite may help.
            return _EVERYTHING if self._narrowed[request] else None
        return refused


def _by_itself(request: AttentionRequest) -> AttentionRequest:
    """Return the request in normal form. What is rewritten is no layer of the step that was planned, whose tables it
    does not read: where it is recorded, it is as a call by itself."""
    if request.graph_capture == "session":
        request = dataclasses.replace(request, graph_capture=True)
    return request.normalised()
