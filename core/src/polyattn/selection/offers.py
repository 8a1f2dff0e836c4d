"""What selection may choose from: registered backends, what was found out about them, and their order."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..contract import AttentionRequest, AutoRule, BackendInfo, Defect, PlatformInfo, Provider, Verdict
from ..lowering import KEPT, Stop, in_reach
from .policy import Policy

__all__ = ["Catalogue", "Offer", "Order", "may_be_automatic"]


@dataclasses.dataclass(frozen=True)
class Offer:
    """A registered backend with what was found out about it: `missing` maps provider name -> why it is not here,
    `levels` -> its evidence where that is not the backend's, `defects` -> the known faults that its libraries have in
    these versions; `chips`, `families`: the architectures and the families `evidence` is of, () = all."""

    info: BackendInfo
    plugin: str
    evidence: str
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    levels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chips: tuple[str, ...] = ()
    defects: Mapping[str, tuple[Defect, ...]] = dataclasses.field(default_factory=dict)
    families: tuple[str, ...] = ()

    def at(self, arch: str, family: str) -> Offer:
        """With the evidence that there is for one architecture and family: runs of others show nothing of them."""
        here = (not self.chips or not arch or arch in self.chips) and family in (self.families or (family,))
        return self if here else dataclasses.replace(self, evidence=self.info.evidence, chips=(), families=())

    def here(self) -> bool:
        """Whether it is built and what it needs is installed, with any of its providers."""
        return any(not p.planned and p.name not in self.missing for p in self.info.providers)

    @functools.cached_property
    def rewritten(self) -> Sequence[Provider]:
        """The providers that may serve what rewrites make of a request. These are exact for exact attention: a method
        would choose other keys of what they make."""
        return [p for p in self.info.providers if not p.planned and p.name not in self.missing and not p.is_method]

    def in_reach(self, stop: Stop) -> bool:
        """Whether it may take a request, or what rewrites make of it."""
        try:
            return any(in_reach(provider.rows, stop) for provider in self.info.providers)
        except Exception:  # noqa: BLE001 - a plugin's own constraint may raise anything; who asks the backend is told
            return True

    def rank(self) -> tuple[float, str]:
        """The highest priority first."""
        return (math.inf if self.info.priority is None else -self.info.priority, self.info.name)


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """Everything selection may know.

    Attributes:
        offers: registered backends of all platforms. platforms: by name.
        broken: label -> reason of plugins that could not be used; errors: the exceptions behind them.
        vendor_broken: platform -> label, where the plugin of that device's own vendor is among them.
        narrow: the owner's say on a request its rows accepted.
    """

    offers: tuple[Offer, ...]
    platforms: Mapping[str, PlatformInfo]
    broken: Mapping[str, str] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, BaseException | None] = dataclasses.field(default_factory=dict)
    vendor_broken: Mapping[str, str] = dataclasses.field(default_factory=dict)
    narrow: Callable[[BackendInfo, AttentionRequest], Verdict | None] = lambda backend, request: None

    @functools.cached_property
    def _found(self) -> dict[tuple[str, str, str], tuple[Offer, ...]]:
        return {}

    @functools.cached_property
    def _orders(self) -> dict[tuple[Any, ...], Order]:
        return {}

    def order(self, request: AttentionRequest, what_if: bool) -> Order:
        """`Order.of` what a platform has, without who refuses a field of the request that no rewrite changes. It is
        made once for all requests that are alike in those: of hundreds of backends few are asked about each."""
        key = (what_if, *_kept_fields(request))
        if key not in self._orders:
            if len(self._orders) >= _MOST:
                self._orders.clear()
            stop = Stop(request)
            offers, policy = self.on(request.platform, request.arch, request.family), Policy(what_if=what_if)
            near = {o.info.name for o in offers if o.in_reach(stop)}
            self._orders[key] = Order.of(offers, policy, near)
        return self._orders[key]

    def on(self, platform: str, arch: str, family: str) -> tuple[Offer, ...]:
        """What a platform has, with the evidence that there is for an architecture ("" = whichever) and a family."""
        if (key := (platform, arch, family)) not in self._found:
            self._found[key] = tuple(o.at(arch, family) for o in self.offers if o.info.platform == platform)
        return self._found[key]


_kept_fields = operator.attrgetter(*KEPT)
_MOST = 256


class Order(NamedTuple):
    """Offers that may be chosen by themselves, the highest priority first, and the rules of all in order. `far`: those
    that need not be asked for their priority."""

    ranked: Sequence[Offer]
    rules: Sequence[tuple[AutoRule, Offer]]
    far: Sequence[Offer] = ()

    @classmethod
    def of(cls, offers: Iterable[Offer], policy: Policy, near: Collection[str] | None = None) -> Order:
        """near: names of those that are asked; None = all."""
        every = sorted((o for o in offers if may_be_automatic(o, policy)), key=Offer.rank)
        ranked = [o for o in every if near is None or o.info.name in near]
        rules = [(rule.rank, o.info.name, i, rule, o) for o in every for i, rule in enumerate(o.info.auto)]
        by_rank = [(rule, offer) for *_, rule, offer in sorted(rules, key=lambda r: r[:3])]
        return cls(ranked, by_rank, [] if near is None else [o for o in every if o.info.name not in near])

    def passed(self, last: Offer) -> Sequence[Offer]:
        """Those who would have been asked before another."""
        return self.far[: bisect.bisect_left(self.far, last.rank(), key=Offer.rank)]


def may_be_automatic(offer: Offer, policy: Policy) -> bool:
    """Whether a backend may be chosen by itself."""
    allowed = offer.info.priority is not None and offer.info.name not in policy.avoid
    return allowed and (policy.what_if or offer.evidence != "declared")
