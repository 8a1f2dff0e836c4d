"""Selection: (request, what is installed, what people asked for) -> one backend with reasons. Pure: no I/O, no torch.

Precedence, highest first: what was asked for by name (the caller resolves its own chain into one `Choice`), the
tuned choice, the platform rules (`AutoRule`, lowest rank first), priority.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from .errors import BackendUnavailableError, PluginError, UnsupportedRequestError, did_you_mean
from .records import (
    Accepted,
    AttentionRequest,
    BackendInfo,
    Constraint,
    Fallback,
    PlatformInfo,
    Provider,
    Rejected,
    Verdict,
    judge,
)

__all__ = ["Catalogue", "Choice", "Offer", "Policy", "Selection", "holds", "select", "select_pair"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend somebody asked for, and where: `argument`, `use_backend`, `force_backend`, `component x`, ..."""

    name: str
    source: str


@dataclasses.dataclass(frozen=True)
class Policy:
    """How to decide.

    Attributes:
        choice: the highest-ranking explicit choice, None = automatic.
        tuned: the tuned choice for this request on this device, if any.
        strict: a documented fallback is an error.
        what_if: judge planned adapters as if built, and do not ask for evidence.
        replaced: backends that documented fallbacks replaced on the way here; none is come back to.
    """

    choice: Choice | None = None
    tuned: str | None = None
    strict: bool = False
    what_if: bool = False
    replaced: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Offer:
    """A registered backend with what was found out about it: `missing` maps provider name -> why it is not here."""

    info: BackendInfo
    plugin: str
    evidence: str
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)


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

    def on(self, platform: str) -> tuple[Offer, ...]:
        return tuple(o for o in self.offers if o.info.platform == platform)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The answer, for code and for people.

    Attributes:
        request: the request in normal form. backend, platform, provider: who serves it.
        lowerings: exact rewrites between the request and the kernel, in order.
        source: what decided (`argument`, `use_backend`, ..., `tuned`, `platform rule`, `priority`, or
            `fallback from X`). why: the sentence behind it.
        rejected: every other backend that was asked and refused, with its reasons.
        others: backends that would serve it too. planned: the adapter is not built in this version (what-if only).
        evidence: how far the backend was shown to work here. notes: what else a reader should know.
    """

    request: AttentionRequest
    backend: str
    platform: str
    provider: str
    lowerings: tuple[str, ...] = ()
    source: str = ""
    why: str = ""
    rejected: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()
    planned: bool = False
    evidence: str = "declared"
    notes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.backend}@{self.platform}"

    @property
    def fallback(self) -> bool:
        return self.source.startswith("fallback")

    def fingerprint(self) -> str:
        """Equal on all ranks that made the same choice for the same request."""
        text = repr((self.request, self.backend, self.platform, self.provider, self.lowerings))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "backend": self.backend,
            "platform": self.platform,
            "provider": self.provider,
            "lowerings": list(self.lowerings),
            "source": self.source,
            "why": self.why,
            "planned": self.planned,
            "evidence": self.evidence,
            "others": list(self.others),
            "rejected": {k: list(v) for k, v in self.rejected.items()},
            "notes": list(self.notes),
            "request": {k: v for k, v in dataclasses.asdict(self.request).items() if v not in ("", (), None)},
        }

    def __str__(self) -> str:
        head = f"{self.id} ({self.provider}) by {self.source}: {self.why}"
        lines = [head + (" [planned]" if self.planned else "")]
        lines += [f"  via {name}" for name in self.lowerings]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  not {name}: {'; '.join(reasons)}" for name, reasons in self.rejected.items()]
        return "\n".join(lines)


@dataclasses.dataclass
class _Judgement:
    offer: Offer
    provider: Provider | None = None
    lowerings: tuple[str, ...] = ()
    reasons: list[str] = dataclasses.field(default_factory=list)
    missing: bool = False
    error: BaseException | None = None


def holds(conditions: Mapping[str, Constraint], request: AttentionRequest) -> bool:
    """Whether every condition of a rule holds for a request."""
    return all(c.reason(getattr(request, name)) is None for name, c in conditions.items())


class _Judge:
    """Asks each backend once about one request and remembers what it said."""

    def __init__(self, request: AttentionRequest, catalogue: Catalogue, policy: Policy) -> None:
        self.request, self.catalogue, self.policy = request, catalogue, policy
        self.active = request.active()
        self.offers = catalogue.on(request.platform)
        self._said: dict[tuple[str, str], _Judgement] = {}

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
            if only and provider.name != only and not provider.name.startswith(f"{only}/"):
                continue
            prefix = f"{provider.name}: " if several else ""
            if provider.planned and not self.policy.what_if:
                said.reasons.append(f"{prefix}planned: its adapter is not part of this version")
                continue
            if reason := offer.missing.get(provider.name):
                said.reasons.append(prefix + reason)
                continue
            here = True
            try:
                verdict = judge(provider.rows, self.request, self.active)
            except Exception as exc:  # noqa: BLE001 - a plugin's own constraint may raise anything; others still serve
                said.error = exc
                verdict = Rejected(f"its capability rows failed: {type(exc).__name__}: {exc}")
            if isinstance(verdict, Accepted) and not provider.planned:
                narrowed = self.catalogue.narrow(offer.info, self.request)
                if isinstance(narrowed, Rejected):
                    said.error = getattr(narrowed, "error", None)
                    verdict = narrowed
            if isinstance(verdict, Accepted):
                said.provider, said.lowerings = provider, verdict.lowerings
                return said
            said.reasons += [prefix + reason for reason in verdict.reasons]
        if not said.reasons:
            said.reasons.append(f"it has no provider {only!r}")
        # One provider that is here and refuses is a limit of the backend, not a missing installation.
        said.missing = not here
        return said

    def rejected(self, but: str) -> dict[str, list[str]]:
        """Everyone who was asked and refused."""
        return {
            name: list(said.reasons)
            for (name, only), said in self._said.items()
            if said.provider is None and name != but and not only
        }

    def others(self, but: str) -> tuple[str, ...]:
        return tuple(n for (n, only), said in self._said.items() if said.provider is not None and n != but and not only)

    def ask_all(self) -> None:
        for offer in self.offers:
            self.ask(offer)


def select(request: AttentionRequest, catalogue: Catalogue, policy: Policy, *, full: bool = False) -> Selection:
    """Choose a backend.

    Args:
        request: what is asked for; put into normal form here.
        catalogue: what there is. policy: how to decide.
        full: ask every backend, so that `rejected` and `others` are complete (`explain`); otherwise only those
            needed to decide.

    Raises:
        BackendUnavailableError: the named backend is unknown, or its plugin is broken, or the vendor plugin of
            this very device is broken and nothing was named.
        UnsupportedRequestError: nothing serves it, or the named one does not and has no documented fallback.
    """
    request = request.normalised()
    asked = _Judge(request, catalogue, policy)
    if full:
        asked.ask_all()
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
    if policy.tuned is not None:
        for offer in asked.offers:
            if offer.info.name != policy.tuned or not _may_be_automatic(offer, policy):
                continue
            if (said := asked.ask(offer)).provider is not None:
                return _selection(asked, said, "tuned", "fastest measured for this request on this device")
    rules = sorted(
        (
            (rule.rank, o.info.name, rule.why, o)
            for o in asked.offers
            for rule in o.info.auto
            if holds(rule.when, request)
        ),
        key=lambda r: (r[0], r[1]),
    )
    for _, _, why, offer in rules:
        if _may_be_automatic(offer, policy) and (said := asked.ask(offer)).provider is not None:
            return _selection(asked, said, "platform rule", why)
    ranked = sorted(
        (o for o in asked.offers if o.info.priority is not None),
        key=lambda o: (-(o.info.priority or 0), o.info.name),
    )
    for offer in ranked:
        if _may_be_automatic(offer, policy) and (said := asked.ask(offer)).provider is not None:
            ties = [o.info.name for o in ranked if o.info.priority == offer.info.priority and o is not offer]
            notes = (f"same priority as {', '.join(ties)}; the first name in order wins",) if ties else ()
            return _selection(asked, said, "priority", f"priority {offer.info.priority}: {offer.info.summary}", notes)
    asked.ask_all()
    rejected = asked.rejected("")
    able = asked.others("")
    hint = f"By name these can: {', '.join(able)}." if able else _nearest(rejected)
    known = ", ".join(sorted(asked.catalogue.platforms))
    none_here = "" if asked.offers else f" No backend is registered for {request.platform!r} (known: {known})."
    raise UnsupportedRequestError(
        f"no backend can serve this call: {request.summary()}.{none_here} {hint}{_listing(rejected)}", rejected
    )


def _may_be_automatic(offer: Offer, policy: Policy) -> bool:
    return offer.info.priority is not None and (policy.what_if or offer.evidence != "declared")


def _explicit(asked: _Judge, choice: Choice) -> Selection:
    request = asked.request
    offer, only, name = resolve(choice.name, request, asked.catalogue)
    platform = asked.catalogue.platforms.get(request.platform)
    if platform is not None and platform.fallback and name != platform.fallback:
        step = Fallback(platform.fallback, platform.fallback_why)
        return _fall_back(asked, choice, name, step, [platform.fallback_why])
    if offer is None:
        raise _not_here(asked, choice, name)
    said = asked.ask(offer, only)
    if said.provider is not None:
        return _selection(asked, said, choice.source, f"{choice.name} was asked for by {choice.source}")
    for step in offer.info.fallbacks:
        if step.to not in asked.policy.replaced and holds(step.when, request):
            return _fall_back(asked, choice, name, step, said.reasons)
    raise _refusal(asked, choice, said)


def _fall_back(asked: _Judge, choice: Choice, name: str, step: Fallback, reasons: list[str]) -> Selection:
    because = "; ".join(reasons)
    if asked.policy.strict:
        raise UnsupportedRequestError(
            f"{name}, asked for by {choice.source}, cannot serve {asked.request.summary()}: {because}. Its documented "
            f"fallback {step.to} is not taken in strict mode; ask for {step.to}, or unset POLYATTN_STRICT",
            {name: reasons},
        )
    request = asked.request
    if step.family:
        # The replacement is dense attention: what only the method knew is left behind.
        request = dataclasses.replace(
            request,
            family=step.family,  # type: ignore[arg-type]
            method="",
            block_map=False,
            block_sizes=False,
        )
    next_choice = Choice(step.to, f"{choice.source}, as the fallback of {name}")
    policy = dataclasses.replace(asked.policy, choice=next_choice, replaced=(*asked.policy.replaced, name))
    inner = select(request, asked.catalogue, policy)
    note = f"{name} was asked for by {choice.source} and replaced by {step.to} ({step.why}): {because}"
    return dataclasses.replace(
        inner,
        source=f"fallback from {name}",
        why=step.why,
        rejected={**asked.rejected(inner.backend), **inner.rejected, name: list(reasons)},
        others=tuple(dict.fromkeys((*asked.others(inner.backend), *inner.others))),
        notes=(note, *inner.notes),
    )


def resolve(name: str, request: AttentionRequest, catalogue: Catalogue) -> tuple[Offer | None, str, str]:
    """(offer, provider restriction, canonical name) of a name or alias; the offer is None when it is registered
    for other platforms only.

    Raises:
        BackendUnavailableError: no plugin knows the name.
    """
    bare, _, platform = name.partition("@")
    offers = catalogue.on(request.platform)
    if platform and platform != request.platform:
        if platform not in catalogue.platforms:
            raise BackendUnavailableError(
                f"backend {name!r}: no platform {platform!r}.{did_you_mean(platform, catalogue.platforms)}"
            )
        return None, "", bare
    named = next((offer for offer in offers if offer.info.name == bare), None)
    for offer in offers:
        for alias in offer.info.aliases:
            if alias.name != bare or (alias.families and request.family not in alias.families):
                continue
            # A name cannot be taken over: only its own plugin gives it another meaning, and only in a family.
            if named is None or (alias.families and offer.plugin == named.plugin):
                return offer, alias.provider, offer.info.name
    if named is not None:
        return named, "", bare
    everywhere = _names(catalogue)
    if bare in everywhere:
        return None, "", bare
    broken = [f"{label}: {reason}" for label, reason in catalogue.broken.items()]
    blame = f" These plugins could not be used and may be what you want: {'; '.join(broken)}." if broken else ""
    error = BackendUnavailableError(
        f"no backend is named {bare!r}.{did_you_mean(bare, everywhere)}{blame} "
        f"Backends on {request.platform}: {', '.join(sorted(o.info.name for o in offers)) or 'none'}"
    )
    causes = [e for e in catalogue.errors.values() if e is not None]
    raise error from (causes[0] if causes else None)


def _names(catalogue: Catalogue) -> set[str]:
    return {o.info.name for o in catalogue.offers} | {a.name for o in catalogue.offers for a in o.info.aliases}


def _not_here(asked: _Judge, choice: Choice, name: str) -> BackendUnavailableError:
    where = sorted({o.info.platform for o in asked.catalogue.offers if o.info.name == name})
    asked.ask_all()
    able = ", ".join(asked.others("")) or "none"
    return BackendUnavailableError(
        f"{choice.name}, asked for by {choice.source}, has no backend on {asked.request.platform}"
        f"{' (it is known on ' + ', '.join(where) + ')' if where else ''}. Backends that can serve this call: {able}"
    )


def _refusal(asked: _Judge, choice: Choice, said: _Judgement) -> Exception:
    asked.ask_all()
    name = said.offer.info.name
    able = ", ".join(n for n in asked.others(name)) or "none"
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
    return Selection(
        request=asked.request,
        backend=info.name,
        platform=info.platform,
        provider=provider.name,
        lowerings=said.lowerings,
        source=source,
        why=why,
        rejected=asked.rejected(info.name),
        others=asked.others(info.name),
        planned=provider.planned,
        evidence=said.offer.evidence,
        notes=notes,
    )


def select_pair(
    prefill: AttentionRequest, decode: AttentionRequest, catalogue: Catalogue, policies: Mapping[str, Policy]
) -> dict[str, Selection]:
    """Choose for both phases of a server and check the rules between them (`PairRule`).

    Args:
        prefill, decode: the two phases' requests. policies: by phase, `prefill` and `decode`.

    Raises:
        UnsupportedRequestError: the two do not work together, or one phase has no backend.
    """
    requests = {"prefill": prefill, "decode": decode}
    chosen = {phase: select(request, catalogue, policies[phase]) for phase, request in requests.items()}
    by_id = {o.info.id: o.info for o in catalogue.offers}
    for phase, selection in chosen.items():
        for rule in by_id[selection.id].pairs:
            other = chosen.get(rule.other_phase)
            if rule.phase != phase or other is None or other.backend not in rule.others:
                continue
            if holds(rule.when, requests[phase]):
                raise UnsupportedRequestError(
                    f"{selection.backend} for {phase} does not work with {other.backend} for {rule.other_phase}: "
                    f"{rule.why}. Choose another backend for one of the two phases",
                    {selection.backend: [rule.why]},
                )
    return chosen


def _nearest(rejected: Mapping[str, list[str]]) -> str:
    if not rejected:
        return ""
    name, reasons = min(_runnable(rejected) or rejected.items(), key=lambda item: len(item[1]))
    return f"Nearest miss: {name} ({'; '.join(reasons)})."


def _runnable(rejected: Mapping[str, list[str]]) -> list[tuple[str, list[str]]]:
    away = ("planned", "is not installed", "is installed")
    return [(n, r) for n, r in rejected.items() if not any(word in reason for reason in r for word in away)]


def _listing(rejected: Mapping[str, list[str]]) -> str:
    return "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items())
