"""What backends say of one request: each is asked once, and says why not only where somebody reads it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..contract import Accepted, AttentionRequest, AutoRule, Provider, Rejected, judge
from ..contract.capability import taken
from ..lowering import Plan, Planner, Stop, Ways
from ..registry.defects import Narrow, narrowing
from .aliases import is_of, spared
from .messages import without_vain_advice
from .offers import Catalogue, Offer
from .policy import Choice, Policy

__all__ = ["Judge", "Judgement", "Said"]


@dataclasses.dataclass
class Judgement:
    """What a backend said. `brief`: its rows refused, and the sentences are not made yet."""

    offer: Offer
    provider: Provider | None = None
    lowerings: tuple[str, ...] = ()
    plan: Plan | None = None
    reasons: list[str] = dataclasses.field(default_factory=list)
    brief: bool = False
    missing: bool = False
    error: BaseException | None = None
    tried: bool = False
    lowered: Judgement | None = None

    @property
    def cost(self) -> float:
        return self.plan.cost if self.plan is not None else 0.0


Said = dict[AttentionRequest, dict[tuple[str, str], Judgement]]
"""What backends said of requests, whatever their lengths."""


class Judge:
    """Asks each backend once about one request and remembers what it said.

    Args:
        helper: what serves a small part of a rewritten call, None where nothing does.
        said: see `select`.
    """

    def __init__(
        self,
        request: AttentionRequest,
        catalogue: Catalogue,
        policy: Policy,
        helper: Callable[[AttentionRequest], Any],
        said: Said | None = None,
    ) -> None:
        self.request, self.catalogue, self.policy, self._helper = request, catalogue, policy, helper
        self.active = request.active()
        self._names = [name for name, _ in self.active]
        offers = catalogue.on(request.platform, request.arch, request.family)
        self.offers = spared(offers, policy.avoid) if policy.avoid else offers
        self._all = said
        self._said: dict[tuple[str, str], Judgement] = {}
        if said is not None:
            bare = dataclasses.replace(request, q_bucket=0, k_bucket=0, batch_bucket=0) if request.k_bucket else request
            self._said = said.setdefault(bare, {})

    def ask(self, offer: Offer, only: str = "") -> Judgement:
        """What a backend says of the request as it is."""
        key = (offer.info.name, only)
        if key not in self._said:
            self._said[key] = self._ask(offer, only, brief=True)
        return self._said[key]

    def _ask(self, offer: Offer, only: str, *, brief: bool) -> Judgement:
        said = Judgement(offer)
        here = False
        several = len(offer.info.providers) > 1
        for provider in offer.info.providers:
            if only and not is_of(provider.name, only):
                continue
            prefix, planned = f"{provider.name}: " if several else "", provider.planned
            if planned and not self.policy.what_if:
                said.reasons.append(f"{prefix}planned: its adapter is not part of this version")
                continue
            if reason := offer.missing.get(provider.name):
                said.reasons.append(prefix + reason)
                continue
            here = True
            try:
                verdict = taken(provider.rows, self.request, self._names) or self._refusal(provider, brief)
                if isinstance(verdict, Accepted) and verdict.lowerings and not planned:
                    said.plan = self.plan(offer, provider, verdict.lowerings)
                    if said.plan is None:
                        names = ", ".join(verdict.lowerings)
                        verdict = Rejected(f"its row is lowered by {names}, which leads to nothing that it takes")
                if isinstance(verdict, Accepted) and not planned and said.plan is None:
                    if offer.defects:
                        narrowed = self.narrow(offer, provider, named=self.policy.choice is not None)(self.request)
                    else:
                        narrowed = self.catalogue.narrow(offer.info, self.request)
                    if isinstance(narrowed, Rejected):
                        said.error = getattr(narrowed, "error", None)
                        verdict = narrowed
            except Exception as exc:  # noqa: BLE001 - a plugin's own constraint may raise anything; others still serve
                said.error = exc
                verdict = Rejected(f"its capability rows failed: {type(exc).__name__}: {exc}")
            if verdict is None:
                said.brief = True
                continue
            if isinstance(verdict, Accepted):
                said.provider, said.lowerings, said.brief = provider, verdict.lowerings, False
                return said
            said.reasons += [prefix + reason for reason in verdict.reasons]
        if not said.reasons and not said.brief:
            said.reasons.append("its plugin refused without a reason" if here else f"it has no provider {only!r}")
        # One provider that is here and refuses is a limit of the backend, not a missing installation.
        said.missing = not here
        return said

    def _refusal(self, provider: Provider, brief: bool) -> Accepted | Rejected | None:
        return None if brief else judge(provider.rows, self.request, self.active)

    def told(self, offer: Offer, only: str = "") -> Judgement:
        """What a backend says of the request as it is, with every reason."""
        said = self.ask(offer, only)
        if said.brief:
            said.brief, said.reasons = False, self._ask(offer, only, brief=False).reasons
        return said

    def failed(self, offer: Offer, rule: AutoRule, exc: Exception) -> None:
        """Note that a rule could not be judged: its backend refuses."""
        why = f"its rule {rule.why!r} failed: {type(exc).__name__}: {exc}"
        self._said[offer.info.name, ""] = Judgement(offer, reasons=[why], error=exc)

    def take(self, offer: Offer, only: str = "") -> Judgement:
        """The judgement of a backend: as the request is, else by an exact rewrite."""
        said = self.ask(offer, only)
        return said if said.provider is not None or said.error is not None else self.lower(offer, only) or said

    def same_way(self, said: Judgement, choice: Choice) -> bool:
        """Whether a backend would serve the request that was measured by the same provider and rewrites as this one."""
        if choice.like is None:
            return True
        other = Judge(choice.like, self.catalogue, self.policy, self._helper, self._all).take(said.offer, choice.kind)
        return (other.provider, other.lowerings) == (said.provider, said.lowerings)

    def lower(self, offer: Offer, only: str = "") -> Judgement | None:
        """The judgement of a backend that refused, when an exact rewrite leads to what it takes."""
        refused = self.ask(offer, only)
        if self.policy.lowering and refused.error is None and not refused.tried:
            refused.lowered = self._lowered(offer, only)
            refused.tried = True
        return refused.lowered

    def cheapest(self, offers: Iterable[Offer]) -> Judgement | None:
        """The first of the backends that serve by the cheapest exact rewrites. Nobody looks for dearer ones than those
        that were found."""
        best: Judgement | None = None
        for offer in offers if self.policy.lowering else ():
            refused, below = self.ask(offer), math.inf if best is None else best.cost
            if refused.error is None:
                found = refused.lowered if refused.tried else self._lowered(offer, "", below)
                best = found if found is not None and found.cost < below else best
        return best

    def _lowered(self, offer: Offer, only: str, below: float = math.inf) -> Judgement | None:
        best: Judgement | None = None
        try:
            for provider in offer.rewritten:
                if is_of(provider.name, only) and (plan := self.plan(offer, provider, None, below)) is not None:
                    best, below = Judgement(offer, provider, plan.names, plan), plan.cost
        except Exception as exc:  # noqa: BLE001 - its rows may raise on a request that only a rewrite makes
            refused = self.told(offer, only)
            refused.error = exc
            refused.reasons.append(f"its capability rows failed on a rewritten request: {type(exc).__name__}: {exc}")
            return None
        return best

    @functools.cached_property
    def _stop(self) -> tuple[Ways, Stop]:
        ways = Ways(self._helper)
        return ways, ways.at(self.request)

    def plan(
        self, offer: Offer, provider: Provider, only: tuple[str, ...] | None = None, below: float = math.inf
    ) -> Plan | None:
        """The cheapest rewrites to what a provider takes, `only` some of them, of those that cost less than `below`."""
        ways, stop = self._stop
        narrow = self.narrow(offer, provider, named=self.policy.choice is not None)
        return Planner(provider.rows, narrow=narrow, only=only, ways=ways).plan_at(stop, below=below)

    def narrow(self, offer: Offer, provider: Provider, named: bool = False) -> Narrow:
        """What is said of a request that a provider's rows accept."""
        return narrowing(self.catalogue.narrow, offer.info, offer.defects.get(provider.name, ()), named)

    def rejected(self, but: str, passed: Iterable[Offer] = ()) -> Mapping[str, list[str]]:
        """Everyone who was asked and refused, and those who were `passed` over without being asked."""
        asked = [(name, said) for (name, only), said in self._said.items() if not only and name != but]
        refused = {name: said for name, said in asked if said.provider is None}
        told = {name: list(said.reasons) for name, said in refused.items() if not said.brief}
        others = (*(said.offer for said in refused.values() if said.brief), *passed)
        return _Refusals(told, others, self.request, self.catalogue, self.policy) if others else told

    def others(self, but: str) -> tuple[str, ...]:
        """Everyone else who was asked and would serve it."""
        return tuple(n for (n, only), said in self._said.items() if said.provider is not None and n != but and not only)

    def rewritable(self, but: str) -> dict[str, list[str]]:
        """Those who refused and would serve it through exact rewrites: what each would do."""
        refused = [o for o in self.offers if o.info.name != but and self.ask(o).provider is None]
        return {o.info.name: said.plan.lines() for o in refused if (said := self.lower(o)) is not None and said.plan}

    def refused(self, offer: Offer, only: str = "") -> Judgement:
        """What a backend said; where it refused, without advice to install what would refuse as well."""
        if (said := self.told(offer, only)).provider is None:
            said.reasons[:] = without_vain_advice(said.reasons, offer.info, self.request, offer.missing)
        return said

    def ask_all(self) -> None:
        """Ask every backend, for all reasons."""
        for offer in self.offers:
            self.refused(offer)


class _Refusals(Mapping[str, list[str]]):
    """Who refused, and why. The sentences are made when one is read: of hundreds of backends they cost more than the
    choice, and most are read by nobody."""

    def __init__(
        self,
        told: Mapping[str, list[str]],
        others: tuple[Offer, ...],
        request: AttentionRequest,
        catalogue: Catalogue,
        policy: Policy,
    ) -> None:
        self._told, self._asked = told, (others, request, catalogue, policy)

    @functools.cached_property
    def _all(self) -> dict[str, list[str]]:
        others, request, catalogue, policy = self._asked
        judge = Judge(request, catalogue, policy, lambda _: None)
        said = {offer.info.name: judge.told(offer) for offer in others}
        return {**self._told, **{name: one.reasons for name, one in said.items() if one.provider is None}}

    def __getitem__(self, name: str) -> list[str]:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return repr(self._all)

    def __reduce__(self) -> tuple[type[dict[str, list[str]]], tuple[dict[str, list[str]]]]:
        return dict, (self._all,)
