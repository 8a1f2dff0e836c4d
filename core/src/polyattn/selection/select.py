"""Selection: (request, what is installed, what people asked for) -> one backend with reasons. Pure: no I/O, no torch.

Precedence, highest first: what was asked for by name (the caller resolves its own chain into one `Choice`), the
tuned choice, the predicted one, the platform rules (`AutoRule`, lowest rank first), priority.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..contract import AttentionRequest, Fallback
from ..contract.capability import holds
from ..errors import BackendUnavailableError, PluginError, UnsupportedRequestError
from ..registry.defects import mended
from .aliases import names_method, resolve
from .answer import RULE, Selection
from .judging import Judge, Judgement, Said
from .messages import by_nobody, not_there
from .offers import Catalogue, Offer, Order, may_be_automatic
from .policy import Choice, Policy

__all__ = ["Catalogue", "Choice", "Offer", "Policy", "Said", "Selection", "holds", "may_be_automatic", "select"]


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
    asked = Judge(request, catalogue, policy, partial(_help, catalogue), said)
    if full:
        asked.ask_all()
    selection = _decide(asked)
    return dataclasses.replace(selection, rewritable=asked.rewritable(selection.backend)) if full else selection


def _decide(asked: Judge) -> Selection:
    request, catalogue, policy = asked.request, asked.catalogue, asked.policy
    if policy.choice is not None:
        return _explicit(asked, policy.choice)
    if label := catalogue.vendor_broken.get(request.platform):
        raise BackendUnavailableError(
            f"the plugin of this device, {label}, is broken: {catalogue.broken.get(label, 'see polyattn doctor')}. "
            f"Repair it (`polyattn doctor`), or choose a backend by name"
        ) from catalogue.errors.get(label)
    return _automatic(asked)


def _help(catalogue: Catalogue, request: AttentionRequest) -> Selection | None:
    """Who serves a small part of a rewritten call as it is; nobody is a failure of nothing."""
    request = dataclasses.replace(request, place=False) if request.place else request
    policy = Policy(lowering=False)
    return (
        None if request.platform in catalogue.vendor_broken else _by_itself(Judge(request, catalogue, policy, _nobody))
    )


def _nobody(request: AttentionRequest) -> None:
    """Rewrites are not looked for where nobody helps with them."""


def _automatic(asked: Judge) -> Selection:
    found = _by_itself(asked)
    if found is not None:
        return found
    asked.ask_all()
    rejected, platforms = dict(asked.rejected("")), asked.catalogue.platforms
    raise UnsupportedRequestError(by_nobody(asked.request, platforms, asked.others(""), rejected), rejected)


def _by_itself(asked: Judge) -> Selection | None:
    """Who serves a request that nobody named a backend for."""
    request, policy = asked.request, asked.policy
    if policy.avoid:
        order = Order.of(asked.offers, policy)
    else:
        order = asked.catalogue.order(request, policy.what_if)
    named = {o.info.name: o for o in order.ranked} if policy.tuned else {}
    for choice in policy.tuned:
        said = asked.take(named[choice.name], choice.kind) if choice.name in named else None
        if said is not None and said.provider is not None and asked.same_way(said, choice):
            return _selection(asked, said, choice.how, choice.source)
    for rule, offer in order.rules:
        try:
            claimed = holds(rule.when, request)
        except Exception as exc:  # noqa: BLE001 - a plugin's own constraint may raise anything; others still serve
            asked.failed(offer, rule, exc)
            continue
        if claimed and (said := asked.ask(offer)).provider is not None:
            return _selection(asked, said, "platform rule", rule.why)
    # A negative priority is a last resort: an exact rewrite for another backend comes before it.
    usual = [o for o in order.ranked if (o.info.priority or 0) >= 0]
    for group in (usual, order.ranked[len(usual) :]):
        for offer in group:
            if (said := asked.ask(offer)).provider is not None:
                ties = [o.info.name for o in order.ranked if o.info.priority == offer.info.priority and o is not offer]
                notes = (f"same priority as {', '.join(ties)}; the first name in order wins",) if ties else ()
                why = f"priority {offer.info.priority}: {offer.info.summary}"
                return _selection(asked, said, "priority", why, notes, order.passed(offer))
        if (best := asked.cheapest(group)) is not None:
            why = "nothing takes it as it is; this is the cheapest exact rewrite"
            return _selection(asked, best, "lowering", why, (), order.passed(group[-1]))
    return None


def _explicit(asked: Judge, choice: Choice) -> Selection:
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
    if not asked.policy.strict:
        for step in offer.info.fallbacks:
            if step.first and holds(step.when, request) and (found := _before(asked, choice, name, step)):
                return found
    said = asked.take(offer, only)
    if said.provider is not None:
        return _selection(asked, said, choice.source, f"{choice.name} was asked for by {choice.source}")
    said = asked.refused(offer, only)
    for step in (step for step in offer.info.fallbacks if not step.first):
        # Whoever is not here leaves nothing to others.
        if step.to not in asked.policy.replaced and holds(step.when, request) and not (step.rule and said.missing):
            return _fall_back(asked, choice, name, step, said.reasons)
    raise _refusal(asked, choice, said)


def _before(asked: Judge, choice: Choice, name: str, step: Fallback) -> Selection | None:
    """Who serves before the backend that was named, None = nobody does."""
    source = f"{choice.source}, before {name}"
    try:
        policy = dataclasses.replace(asked.policy, choice=Choice(step.to, source), strict=True)
        found = select(asked.request, asked.catalogue, policy)
    except (UnsupportedRequestError, BackendUnavailableError):
        return None
    note = (
        f"{choice.name} was asked for by {choice.source}, and {step.to} is the quicker: {step.why}. In strict mode "
        f"{name} serves"
    )
    return dataclasses.replace(found, source=source, why=step.why, notes=(note, *found.notes))


def _fall_back(asked: Judge, choice: Choice, name: str, step: Fallback, reasons: list[str]) -> Selection:
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
        source=f"{RULE}{name}" if step.rule else f"fallback from {name}",
        why=step.why,
        rejected={**asked.rejected(inner.backend), **inner.rejected, name: list(reasons)},
        others=tuple(dict.fromkeys((*asked.others(inner.backend), *inner.others))),
        notes=(note, *inner.notes),
    )


def _ruled(request: AttentionRequest, asked: Judge, policy: Policy) -> Selection:
    """Who serves what a rule leaves to others. No failure: what it names may be absent, and nobody asked for that."""
    try:
        if policy.choice and policy.choice.name:
            return select(request, asked.catalogue, dataclasses.replace(policy, strict=True))
    except (UnsupportedRequestError, BackendUnavailableError):
        pass
    return select(request, asked.catalogue, dataclasses.replace(policy, choice=None))


def _not_here(asked: Judge, choice: Choice, name: str) -> BackendUnavailableError:
    infos, here = [o.info for o in asked.catalogue.offers], asked.request.platform
    aliases = [(info, alias) for info in infos for alias in info.aliases if alias.name == name]
    where = {info.platform for info in infos if info.name == name} | {info.platform for info, _ in aliases}
    families = {family for info, alias in aliases if info.platform == here for family in alias.families}
    asked.ask_all()
    who = f"{choice.name}, asked for by {choice.source}"
    return BackendUnavailableError(not_there(who, here, sorted(where - {here}), sorted(families), asked.others("")))


def _refusal(asked: Judge, choice: Choice, said: Judgement) -> Exception:
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


def _selection(
    asked: Judge, said: Judgement, source: str, why: str, notes: tuple[str, ...] = (), passed: Iterable[Offer] = ()
) -> Selection:
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
        rejected=asked.rejected(info.name, passed),
        others=asked.others(info.name),
        planned=provider.planned,
        evidence=said.offer.levels.get(provider.name, said.offer.evidence),
        notes=(*notes, *asked.policy.notes),
    )
