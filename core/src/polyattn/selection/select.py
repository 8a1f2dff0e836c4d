"""Selection: (request, what is installed, what people asked for) -> one backend with reasons. Pure: no I/O, no torch.

Precedence, highest first: what was asked for by name (the caller resolves its own chain into one `Choice`), the
tuned choice, the platform rules (`AutoRule`, lowest rank first), priority.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..contract import (
    Accepted,
    AttentionRequest,
    AutoRule,
    BackendInfo,
    Defect,
    Fallback,
    PlatformInfo,
    Provider,
    Rejected,
    Verdict,
    judge,
)
from ..contract.capability import holds
from ..errors import BackendUnavailableError, PluginError, UnsupportedRequestError
from ..lowering import Plan, Planner
from ..registry.defects import Narrow, mended, narrowing
from .aliases import is_of, names_method, resolve, spared
from .messages import by_nobody, not_there, without_vain_advice

__all__ = ["Catalogue", "Choice", "Offer", "Policy", "Said", "Selection", "holds", "may_be_automatic", "select"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend somebody asked for, and where: `argument`, `use_backend`, `force_backend`, `component x`, ...

    Attributes:
        like: of a measurement, the request that was measured, where it is another one: a backend that serves the two
            in different ways is not chosen for it. kind: and whose kernels were measured (`names.kind_of`): those of
            no other library are chosen for it.
    """

    name: str
    source: str
    like: AttentionRequest | None = None
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Policy:
    """How to decide.

    Attributes:
        choice: the highest-ranking explicit choice, None = automatic.
        tuned: what was measured for this request on this device: backends, the fastest first, and the figures.
        avoid: backends, or NAME/KIND, not to be chosen by themselves. notes: what measuring has to say besides.
        strict: a documented fallback is an error.
        lowering: exact rewrites may be used where a backend does not take a request as it is.
        what_if: judge planned adapters as if built, and do not ask for evidence.
        replaced: backends that documented fallbacks replaced on the way here; none is come back to.
        tuning: the mode (`polyattn.tuning`) that it was made under; "" = nobody asked.
    """

    choice: Choice | None = None
    tuned: tuple[Choice, ...] = ()
    avoid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    strict: bool = False
    lowering: bool = True
    what_if: bool = False
    replaced: tuple[str, ...] = ()
    tuning: str = ""


@dataclasses.dataclass(frozen=True)
class Offer:
    """A registered backend with what was found out about it: `missing` maps provider name -> why it is not here,
    `levels` -> its evidence where that is not the backend's, `defects` -> the known faults that its libraries have in
    these versions; `chips`: the architectures `evidence` is of, () = all."""

    info: BackendInfo
    plugin: str
    evidence: str
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    levels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chips: tuple[str, ...] = ()
    defects: Mapping[str, tuple[Defect, ...]] = dataclasses.field(default_factory=dict)

    def at(self, arch: str) -> Offer:
        """With the evidence that there is for one architecture: what ran on others shows nothing of it."""
        here = not self.chips or not arch or arch in self.chips
        return self if here else dataclasses.replace(self, evidence=self.info.evidence, chips=())

    def here(self) -> bool:
        """Whether it is built and what it needs is installed, with any of its providers."""
        return any(not p.planned and p.name not in self.missing for p in self.info.providers)

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
    def _found(self) -> dict[tuple[str, str], tuple[Offer, ...]]:
        return {}

    @functools.cached_property
    def _orders(self) -> dict[tuple[str, str, bool], _Order]:
        return {}

    def order(self, platform: str, arch: str, what_if: bool) -> _Order:
        """`_Order.of` what a platform has, made once: no request changes it."""
        key = (platform, arch, what_if)
        if key not in self._orders:
            self._orders[key] = _Order.of(self.on(platform, arch), Policy(what_if=what_if))
        return self._orders[key]

    def on(self, platform: str, arch: str) -> tuple[Offer, ...]:
        """What a platform has, with the evidence that there is for an architecture ("" = whichever)."""
        if (platform, arch) not in self._found:
            self._found[platform, arch] = tuple(o.at(arch) for o in self.offers if o.info.platform == platform)
        return self._found[platform, arch]


class _Order(NamedTuple):
    """Offers that may be chosen by themselves, the highest priority first, and their rules in order."""

    ranked: Sequence[Offer]
    rules: Sequence[tuple[AutoRule, Offer]]

    @classmethod
    def of(cls, offers: Iterable[Offer], policy: Policy) -> _Order:
        ranked = sorted((o for o in offers if may_be_automatic(o, policy)), key=Offer.rank)
        rules = [(rule.rank, o.info.name, i, rule, o) for o in ranked for i, rule in enumerate(o.info.auto)]
        return cls(ranked, [(rule, offer) for *_, rule, offer in sorted(rules, key=lambda r: r[:3])])


_RULE = "rule of "


@dataclasses.dataclass(frozen=True)
class Selection:
    """The answer, for code and for people.

    Attributes:
        request: the request in normal form. backend, platform, provider: who serves it.
        lowerings: exact rewrites between the request and the kernel, in order. plan: what they do and what they cost
            (None where there are none, or the adapter is planned).
        source: what decided (`argument`, `use_backend`, ..., `tuned`, `platform rule`, `priority`, `lowering` where
            nothing takes the request as it is, `fallback from X`, or `rule of X` where X leaves such calls to others).
            why: the sentence behind it.
        rejected: every other backend that was asked and refused, with its reasons.
        others: backends that would serve it too. planned: the adapter is not built in this version (what-if only).
        evidence: how far the backend was shown to work here. notes: what else a reader should know.
        rewritable: backends that refused it as it is and that exact rewrites would make serve it, with the rewrites
            (complete where `select` was asked for everything).
        inner: of a method that is explained, the calls that it makes.
    """

    request: AttentionRequest
    backend: str
    platform: str
    provider: str
    lowerings: tuple[str, ...] = ()
    plan: Plan | None = None
    source: str = ""
    why: str = ""
    rejected: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()
    planned: bool = False
    evidence: str = "declared"
    notes: tuple[str, ...] = ()
    rewritable: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    inner: tuple[Selection, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.backend}@{self.platform}"

    @property
    def fallback(self) -> bool:
        return self.source.startswith("fallback")

    @property
    def rule(self) -> str:
        """The backend that was asked for and leaves the call to others by a rule of its own; "" where there is none."""
        return self.source.removeprefix(_RULE) if self.source.startswith(_RULE) else ""

    def left_by(self, backend: str, why: str) -> Selection:
        """The same, for a call that a backend leaves to others by a rule."""
        return dataclasses.replace(self, source=f"{_RULE}{backend}", why=why)

    def fingerprint(self) -> str:
        """Equal on all ranks that made the same choice for the same request."""
        text = repr((self.request, self.backend, self.platform, self.provider, self.lowerings))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def steps(self) -> list[str]:
        """The rewrites, outermost first, with what each does and costs."""
        return list(self.lowerings) if self.plan is None else self.plan.lines()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "backend": self.backend,
            "platform": self.platform,
            "provider": self.provider,
            "lowerings": list(self.lowerings),
            "steps": self.steps(),
            "source": self.source,
            "why": self.why,
            "planned": self.planned,
            "evidence": self.evidence,
            "others": list(self.others),
            "rejected": {k: list(v) for k, v in self.rejected.items()},
            "rewritable": {k: list(v) for k, v in self.rewritable.items()},
            "notes": list(self.notes),
            "inner": [one.to_dict() for one in self.inner],
            "request": {k: v for k, v in dataclasses.asdict(self.request).items() if v not in ("", (), None)},
        }

    def __str__(self) -> str:
        head = f"{self.id} ({self.provider}) by {self.source}: {self.why}"
        lines = [head + (" [planned]" if self.planned else "")]
        lines += [f"  via {step}" for step in self.steps()]
        lines += [f"  calls {one.request.family}: " + str(one).replace("\n", "\n  ") for one in self.inner]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  not {name}: {'; '.join(reasons)}" for name, reasons in self.rejected.items()]
        lines += [f"  but {name} via {'; via '.join(steps)}" for name, steps in self.rewritable.items()]
        return "\n".join(lines)


@dataclasses.dataclass
class _Judgement:
    offer: Offer
    provider: Provider | None = None
    lowerings: tuple[str, ...] = ()
    plan: Plan | None = None
    reasons: list[str] = dataclasses.field(default_factory=list)
    missing: bool = False
    error: BaseException | None = None
    tried: bool = False
    lowered: _Judgement | None = None


Said = dict[AttentionRequest, dict[tuple[str, str], _Judgement]]
"""What backends said of requests, whatever their lengths."""


class _Judge:
    """Asks each backend once about one request and remembers what it said."""

    def __init__(
        self, request: AttentionRequest, catalogue: Catalogue, policy: Policy, said: Said | None = None
    ) -> None:
        self.request, self.catalogue, self.policy = request, catalogue, policy
        self.active = request.active()
        offers = catalogue.on(request.platform, request.arch)
        self.offers = spared(offers, policy.avoid) if policy.avoid else offers
        self._all = said
        self._said: dict[tuple[str, str], _Judgement] = {}
        if said is not None:
            bare = dataclasses.replace(request, q_bucket=0, k_bucket=0, batch_bucket=0) if request.k_bucket else request
            self._said = said.setdefault(bare, {})

    def ask(self, offer: Offer, only: str = "") -> _Judgement:
        key = (offer.info.name, only)
        if key not in self._said:
            self._said[key] = self._ask(offer, only)
        return self._said[key]

    def _ask(self, offer: Offer, only: str) -> _Judgement:
        said = _Judgement(offer)
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
                verdict = judge(provider.rows, self.request, self.active)
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
            if isinstance(verdict, Accepted):
                said.provider, said.lowerings = provider, verdict.lowerings
                return said
            said.reasons += [prefix + reason for reason in verdict.reasons]
        if not said.reasons:
            said.reasons.append("its plugin refused without a reason" if here else f"it has no provider {only!r}")
        # One provider that is here and refuses is a limit of the backend, not a missing installation.
        said.missing = not here
        return said

    def failed(self, offer: Offer, rule: AutoRule, exc: Exception) -> None:
        """Note that a rule could not be judged: its backend refuses."""
        why = f"its rule {rule.why!r} failed: {type(exc).__name__}: {exc}"
        self._said[offer.info.name, ""] = _Judgement(offer, reasons=[why], error=exc)

    def take(self, offer: Offer, only: str = "") -> _Judgement:
        """The judgement of a backend: as the request is, else by an exact rewrite."""
        said = self.ask(offer, only)
        return said if said.provider is not None or said.error is not None else self.lower(offer, only) or said

    def same_way(self, said: _Judgement, choice: Choice) -> bool:
        """Whether a backend would serve the request that was measured by the same provider and rewrites as this one."""
        if choice.like is None:
            return True
        other = _Judge(choice.like, self.catalogue, self.policy, self._all).take(said.offer, choice.kind)
        return (other.provider, other.lowerings) == (said.provider, said.lowerings)

    def lower(self, offer: Offer, only: str = "") -> _Judgement | None:
        """The judgement of a backend that refused, when an exact rewrite leads to what it takes."""
        refused = self.ask(offer, only)
        if self.policy.lowering and refused.error is None and not refused.tried:
            refused.tried, refused.lowered = True, self._lowered(offer, only, refused)
        return refused.lowered

    def _lowered(self, offer: Offer, only: str, refused: _Judgement) -> _Judgement | None:
        missing = offer.missing
        usable = [p for p in offer.info.providers if not p.planned and p.name not in missing and is_of(p.name, only)]
        # Rewrites are exact for exact attention; a method would choose other keys of what they make.
        usable = [p for p in usable if not p.is_method]
        try:
            plans = [(self.plan(offer, provider), provider) for provider in usable]
        except Exception as exc:  # noqa: BLE001 - its rows may raise on a request that only a rewrite makes
            refused.error = exc
            refused.reasons.append(f"its capability rows failed on a rewritten request: {type(exc).__name__}: {exc}")
            return None
        found = [_Judgement(offer, provider, plan.names, plan) for plan, provider in plans if plan is not None]
        return min(found, key=_cost, default=None)

    def plan(self, offer: Offer, provider: Provider, only: tuple[str, ...] | None = None) -> Plan | None:
        narrow = self.narrow(offer, provider, named=self.policy.choice is not None)
        return Planner(provider.rows, narrow=narrow, helper=self._help, only=only).plan(self.request)

    def narrow(self, offer: Offer, provider: Provider, named: bool = False) -> Narrow:
        return narrowing(self.catalogue.narrow, offer.info, offer.defects.get(provider.name, ()), named)

    def _help(self, request: AttentionRequest) -> Selection | None:
        try:
            return select(request, self.catalogue, Policy(lowering=False))
        except (UnsupportedRequestError, BackendUnavailableError):
            return None

    def rejected(self, but: str) -> dict[str, list[str]]:
        """Everyone who was asked and refused."""
        return {
            name: list(said.reasons)
            for (name, only), said in self._said.items()
            if said.provider is None and name != but and not only
        }

    def others(self, but: str) -> tuple[str, ...]:
        return tuple(n for (n, only), said in self._said.items() if said.provider is not None and n != but and not only)

    def rewritable(self, but: str) -> dict[str, list[str]]:
        """Those who refused and would serve it through exact rewrites: what each would do."""
        refused = [o for o in self.offers if o.info.name != but and self.ask(o).provider is None]
        return {o.info.name: said.plan.lines() for o in refused if (said := self.lower(o)) is not None and said.plan}

    def refused(self, offer: Offer, only: str = "") -> _Judgement:
        """What a backend said; where it refused, without advice to install what would refuse as well."""
        if (said := self.ask(offer, only)).provider is None:
            said.reasons[:] = without_vain_advice(said.reasons, offer.info, self.request, offer.missing)
        return said

    def ask_all(self) -> None:
        for offer in self.offers:
            self.refused(offer)


def select(
    request: AttentionRequest, catalogue: Catalogue, policy: Policy, *, full: bool = False, said: Said | None = None
) -> Selection:
    """Choose a backend.

    Args:
        request: what is asked for; put into normal form here.
        catalogue: what there is. policy: how to decide.
        full: ask every backend, so that `rejected` and `others` are complete (`explain`); otherwise only those
            needed to decide.
        said: what backends said before, kept for further selections from this catalogue, whose policies differ in what
            was tuned only.

    Raises:
        BackendUnavailableError: the named backend is unknown, or its plugin is broken, or the vendor plugin of
            this very device is broken and nothing was named.
        UnsupportedRequestError: nothing serves it, or the named one does not and has no documented fallback.
    """
    request = request.normalised()
    if request.place and not (policy.choice and names_method(policy.choice.name, catalogue)):
        request = dataclasses.replace(request, place=False)  # it says nothing to exact attention
    asked = _Judge(request, catalogue, policy, said)
    if full:
        asked.ask_all()
    selection = _decide(asked)
    return dataclasses.replace(selection, rewritable=asked.rewritable(selection.backend)) if full else selection


def _decide(asked: _Judge) -> Selection:
    request, catalogue, policy = asked.request, asked.catalogue, asked.policy
    if policy.choice is not None:
        return _explicit(asked, policy.choice)
    if label := catalogue.vendor_broken.get(request.platform):
        raise BackendUnavailableError(
            f"the plugin of this device, {label}, is broken: {catalogue.broken.get(label, 'see polyattn doctor')}. "
            f"Repair it (`polyattn doctor`), or choose a backend by name"
        ) from catalogue.errors.get(label)
    return _automatic(asked)


def _automatic(asked: _Judge) -> Selection:
    request, policy = asked.request, asked.policy
    if policy.avoid:
        ranked, rules = _Order.of(asked.offers, policy)
    else:
        ranked, rules = asked.catalogue.order(request.platform, request.arch, policy.what_if)
    named = {o.info.name: o for o in ranked} if policy.tuned else {}
    for choice in policy.tuned:
        said = asked.take(named[choice.name], choice.kind) if choice.name in named else None
        if said is not None and said.provider is not None and asked.same_way(said, choice):
            return _selection(asked, said, "tuned", choice.source)
    for rule, offer in rules:
        try:
            claimed = holds(rule.when, request)
        except Exception as exc:  # noqa: BLE001 - a plugin's own constraint may raise anything; others still serve
            asked.failed(offer, rule, exc)
            continue
        if claimed and (said := asked.ask(offer)).provider is not None:
            return _selection(asked, said, "platform rule", rule.why)
    # A negative priority is a last resort: an exact rewrite for another backend comes before it.
    usual = [o for o in ranked if (o.info.priority or 0) >= 0]
    for group in (usual, ranked[len(usual) :]):
        for offer in group:
            if (said := asked.ask(offer)).provider is not None:
                ties = [o.info.name for o in ranked if o.info.priority == offer.info.priority and o is not offer]
                notes = (f"same priority as {', '.join(ties)}; the first name in order wins",) if ties else ()
                return _selection(
                    asked, said, "priority", f"priority {offer.info.priority}: {offer.info.summary}", notes
                )
        lowered = [found for o in group if (found := asked.lower(o)) is not None]
        if lowered:
            best = min(lowered, key=_cost)
            return _selection(asked, best, "lowering", "nothing takes it as it is; this is the cheapest exact rewrite")
    asked.ask_all()
    rejected = asked.rejected("")
    raise UnsupportedRequestError(by_nobody(request, asked.catalogue.platforms, asked.others(""), rejected), rejected)


def _cost(said: _Judgement) -> float:
    return said.plan.cost if said.plan is not None else 0.0


def may_be_automatic(offer: Offer, policy: Policy) -> bool:
    """Whether a backend may be chosen by itself."""
    allowed = offer.info.priority is not None and offer.info.name not in policy.avoid
    return allowed and (policy.what_if or offer.evidence != "declared")


def _explicit(asked: _Judge, choice: Choice) -> Selection:
    request = asked.request
    offer, only, name = resolve(choice.name, request, asked.catalogue, choice.source)
    platform = asked.catalogue.platforms.get(request.platform)
    if platform and platform.fallback not in ("", name):
        home = resolve(platform.fallback, request, asked.catalogue, choice.source)[0]
        if not offer or (home and offer.plugin == home.plugin and offer.info.priority is not None):
            step = Fallback(platform.fallback, platform.fallback_why)
            return _fall_back(asked, choice, name, step, [platform.fallback_why])
    if offer is None:
        raise _not_here(asked, choice, name)
    said = asked.take(offer, only)
    if said.provider is not None:
        return _selection(asked, said, choice.source, f"{choice.name} was asked for by {choice.source}")
    said = asked.refused(offer, only)
    for step in offer.info.fallbacks:
        # Whoever is not here leaves nothing to others.
        if step.to not in asked.policy.replaced and holds(step.when, request) and not (step.rule and said.missing):
            return _fall_back(asked, choice, name, step, said.reasons)
    raise _refusal(asked, choice, said)


def _fall_back(asked: _Judge, choice: Choice, name: str, step: Fallback, reasons: list[str]) -> Selection:
    because = "; ".join(reasons)
    if asked.policy.strict and not step.rule:
        raise UnsupportedRequestError(
            f"{choice.name}, asked for by {choice.source}, cannot serve {asked.request.summary()}: {because}. Its "
            f"documented fallback {step.to} is not taken in strict mode; ask for {step.to}, or leave strict mode "
            f"(--strict, POLYATTN_STRICT, `strict` in the configuration)",
            {name: reasons},
        )
    request = asked.request
    if step.family:
        # The replacement is dense attention: what only the method knew is left behind.
        blocks = {"block_map": False, "block_sizes": False, "block_starts": False, "block_shape": (0, 0)}
        left: dict[str, Any] = {"method": "", **blocks}
        request = dataclasses.replace(request, family=step.family, **left)  # type: ignore[arg-type]
    word = "rule" if step.rule else "fallback"
    next_choice = Choice(step.to, f"{choice.source}, as the {word} of {name}")
    policy = dataclasses.replace(asked.policy, choice=next_choice, replaced=(*asked.policy.replaced, name))
    try:
        inner = _ruled(request, asked, policy) if step.rule else select(request, asked.catalogue, policy)
    except UnsupportedRequestError as exc:
        text = f"{choice.name}, asked for by {choice.source}, cannot serve it: {because}. Nor can its fallback: {exc}"
        raise UnsupportedRequestError(text, {**exc.rejected, name: reasons}) from exc
    more = "" if because == step.why else f": {because}"
    note = f"{choice.name} was asked for by {choice.source} and replaced by {step.to} ({step.why}){more}"
    if step.rule:
        note = f"{choice.name} was asked for by {choice.source} and leaves this call to {inner.backend}: {step.why}"
    return dataclasses.replace(
        inner,
        source=f"{_RULE}{name}" if step.rule else f"fallback from {name}",
        why=step.why,
        rejected={**asked.rejected(inner.backend), **inner.rejected, name: list(reasons)},
        others=tuple(dict.fromkeys((*asked.others(inner.backend), *inner.others))),
        notes=(note, *inner.notes),
    )


def _ruled(request: AttentionRequest, asked: _Judge, policy: Policy) -> Selection:
    """Who serves what a rule leaves to others. No failure: what it names may be absent, and nobody asked for that."""
    try:
        if policy.choice and policy.choice.name:
            return select(request, asked.catalogue, dataclasses.replace(policy, strict=True))
    except (UnsupportedRequestError, BackendUnavailableError):
        pass
    return select(request, asked.catalogue, dataclasses.replace(policy, choice=None))


def _not_here(asked: _Judge, choice: Choice, name: str) -> BackendUnavailableError:
    where = sorted({o.info.platform for o in asked.catalogue.offers if o.info.name == name})
    asked.ask_all()
    who = f"{choice.name}, asked for by {choice.source}"
    return BackendUnavailableError(not_there(who, asked.request.platform, where, asked.others("")))


def _refusal(asked: _Judge, choice: Choice, said: _Judgement) -> Exception:
    asked.ask_all()
    name = said.offer.info.name
    able = ", ".join((*asked.others(name), *asked.rewritable(name))) or "none"
    text = (
        f"{choice.name}, asked for by {choice.source}, cannot serve {asked.request.summary()}: "
        f"{'; '.join(said.reasons)}. Backends that can: {able}"
    )
    if said.error is not None:
        error: Exception = PluginError(f"{text}. The plugin failed: see `polyattn doctor`")
        error.__cause__ = said.error
        return error
    if said.missing:
        return BackendUnavailableError(text)
    return UnsupportedRequestError(text, {**asked.rejected(""), name: said.reasons})


def _selection(asked: _Judge, said: _Judgement, source: str, why: str, notes: tuple[str, ...] = ()) -> Selection:
    info, provider = said.offer.info, said.provider
    if provider is None:
        raise ValueError(f"{info.id} refused the request")
    if info.note:
        notes = (*notes, info.note)
    if info.lossy:
        notes = (*notes, f"approximate: {info.lossy}")
    if defects := said.offer.defects.get(provider.name):
        notes = (*notes, *mended(defects, asked.request))
    return Selection(
        request=asked.request,
        backend=info.name,
        platform=info.platform,
        provider=provider.name,
        lowerings=said.lowerings if said.plan is None else said.plan.names,
        plan=said.plan,
        source=source,
        why=why,
        rejected=asked.rejected(info.name),
        others=asked.others(info.name),
        planned=provider.planned,
        evidence=said.offer.levels.get(provider.name, said.offer.evidence),
        notes=(*notes, *asked.policy.notes),
    )
