"""Choices that depend on the lengths of each call: what was measured for a request may differ from length to length.

A call's signature has no lengths in it, so that random ones do not miss. Where measurements disagree between lengths,
the functions bound for a signature are these: they look at the lengths, which costs one lookup more.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..contract import AttentionRequest, Bound
from ..contract.lengths import Extent, extent_of, head_axis
from ..epoch import EPOCH
from ..selection.inspection import catalogue, served_by
from ..selection.select import Policy, Said, Selection, select
from ..selection.tuned_policy import measured_policy, policy_of, tuning_place
from ..semantics.autograd import differentiable
from ..tuning import advising, bucket, fine_bucket, meet, mode, with_lengths
from ..tuning.known import NOT_ANY, known
from .bound_table import SIGNATURES_KEPT, Recent
from .rank_agreement import agree, distributed, not_compared

if TYPE_CHECKING:
    from .binding import Chosen

__all__ = ["settled"]

_Who = tuple[Any, ...]
_Found = tuple[Extent, str, _Who]
"""Lengths that were measured, what else says how far their choice reaches, and who it is."""

ONLINE = "polyattn.bench.tuner.online"
"""Who measures calls as they come: a layer above this one, imported when it is asked for."""


def settled(chosen: Chosen, policy: Policy, load: Callable[[Selection], Chosen], *, by_length: bool) -> Chosen:
    """A choice that is the same on all ranks and, where nobody made it by name, of each call by its lengths.

    Args:
        chosen: for lengths that are not known. policy: it was made by. load: binds a selection.
        by_length: calls may be looked at one by one.

    Raises:
        ConfigError: another rank chooses otherwise.
    """
    selection, named = chosen.selection, policy.choice
    tuning = policy.tuning or mode() if named is None else "off"
    here = known(selection.request, functools.partial(tuning_place, selection.request.platform), tuning)
    rule, found = (None, ()) if here is NOT_ANY else _choices(selection.request, policy, EPOCH.value)
    if distributed():
        why = f"{selection.id} ({selection.source}: {selection.why})"
        choice = repr((_served(selection), *_outcome(rule, found, _served(selection))))
        agree(selection.request, "" if named is None else named.name, choice, why)
    else:
        not_compared()
    if named is not None:
        return chosen
    if not by_length:
        return chosen
    if found and {rule, *(who for *_, who in found)} - {None, _served(selection)}:
        switch = _Switch(chosen, policy, load, bucket if here.model is None else fine_bucket)
        bound = Bound(switch, simple=switch.simple(), session=chosen.bound.session)
        chosen = dataclasses.replace(chosen, bound=bound, at=switch.at)
    if tuning == "online":
        chosen = importlib.import_module(ONLINE).watched(chosen)
    return chosen


@functools.lru_cache(maxsize=1024)
def _choices(request: AttentionRequest, policy: Policy, epoch: int) -> tuple[_Who | None, tuple[_Found, ...]]:
    """Who serves calls that no measurement is near to, and what each measurement leads to, of this request or one like
    it; (None, ()) where nothing was measured."""
    found = advising(request, functools.partial(tuning_place, request.platform), policy.tuning)
    if not found:
        return None, ()
    said: Said = {}
    by_rule = select(request, catalogue(), dataclasses.replace(policy, tuned=()), said=said)
    led: list[_Found] = []
    decided: dict[Any, _Who] = {}  # of many lengths few have another order
    for one in found:
        reach = "" if one.kin is None else repr((one.kin.off, one.kin.batch))
        order = tuple(one.costs(recorded=bool(request.graph_capture)))
        key = (order, *one.by.items(), *(() if one.kin is None else one.kin.fields.items()))
        if key not in decided:
            decided[key] = _served(select(request, catalogue(), policy_of(policy, request, one), said=said))
        led.append((one.lengths, reach, decided[key]))
    return _served(by_rule), tuple(led)


def _outcome(rule: _Who | None, found: Sequence[_Found], served: _Who) -> tuple[Any, ...]:
    """(who serves lengths that were not measured, who the others), alike where calls of all lengths are served alike.

    What was measured and leads to who serves anyway is left out, unless it is near something that does not: the lengths
    between the two go to the nearer one.
    """
    usual = rule or served
    apart = [extent for extent, _, who in found if who != usual]
    return usual, [one for one in found if one[2] != usual or any(meet(one[0], extent) for extent in apart)]


def _served(selection: Selection) -> _Who:
    return selection.backend, selection.provider, selection.lowerings


def _at(request: AttentionRequest, policy: Policy, extent: Extent) -> Selection:
    return select(request, catalogue(), measured_policy(policy, with_lengths(request, *extent)))


class _Ways(NamedTuple):
    """How a choice is called: with everything optional as keywords, and with three tensors alone. by: who that is."""

    run: Callable[..., Any]
    simple: Callable[..., Any]
    by: str


class _Switch:
    """`Bound.forward` of several choices. Gradients flow through it whoever serves the call."""

    def __init__(
        self, chosen: Chosen, policy: Policy, load: Callable[[Selection], Chosen], rounded: Callable[[int], int]
    ) -> None:
        self._chosen, self._policy, self._load, self._rounded = chosen, policy, load, rounded
        self._extent = extent_of(chosen.request)
        self._runs: Recent[Extent, Callable[..., Any]] = Recent(SIGNATURES_KEPT)
        self._buckets: Recent[Extent, _Ways] = Recent(SIGNATURES_KEPT)
        self._bound: dict[tuple[Any, ...], _Ways] = {}

    def __call__(self, *tensors: Any, **keywords: Any) -> Any:
        extent = self._extent(*tensors, **keywords)
        run = self._runs.get(extent) or self._runs.recall(extent)
        if run is None:
            run = self._runs.keep(extent, self._find(extent).run)
        return run(*tensors, **keywords)

    def simple(self) -> Callable[..., Any] | None:
        """The short way of dense calls: the shapes as they are lead to the kernel."""
        if self._chosen.request.family != "dense":
            return None
        runs: Recent[Any, Callable[..., Any]] = Recent(SIGNATURES_KEPT)

        def call(query: Any, key: Any, value: Any) -> Any:
            shapes = (query.shape, key.shape)
            run = runs.get(shapes) or runs.recall(shapes)
            if run is None:
                run = runs.keep(shapes, self._find(self._extent(query, key)).simple)
            return run(query, key, value)

        return call

    def at(self, extent: Extent) -> str:
        """Who serves calls of these lengths."""
        return self._find(extent).by

    def _find(self, extent: Extent) -> _Ways:
        """Lengths that were not met yet: keys that grow by one with each call are, every time. What is chosen holds for
        their bucket, a fine one where predictions may choose, and is chosen once for it."""
        rounded = self._rounded
        buckets = (rounded(extent[0]), rounded(extent[1]), rounded(extent[2]))
        ways = self._buckets.get(buckets) or self._buckets.recall(buckets)
        return ways or self._buckets.keep(buckets, self._choose(extent))

    def _choose(self, extent: Extent) -> _Ways:
        selection = _at(self._chosen.selection.request, self._policy, extent)
        name = _served(selection)
        if name not in self._bound:
            request, bound = self._chosen.request, self._load(selection).bound
            if bound.backward is not None and request.grad:
                run = differentiable(bound, request.lse, head_axis(request))
                self._bound[name] = _Ways(run, run, served_by(selection))
            else:
                self._bound[name] = _Ways(bound.forward, bound.simple or bound.forward, served_by(selection))
        return self._bound[name]
