"""Who is meant by the name of a backend: its own or an alias, with a platform or without.

`NAME/KIND` is a backend with the kernels of one of its libraries: "fa/fa4".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..contract.names import parts
from ..errors import BackendUnavailableError, did_you_mean
from .unknown_names import unknown_backend

if TYPE_CHECKING:
    from ..contract import AttentionRequest, BackendInfo
    from .offers import Catalogue, Offer

__all__ = ["is_of", "kind_of", "kinds_here", "names_method", "own_names", "resolve", "spared", "whole"]


def kind_of(info: BackendInfo, provider: str) -> str:
    """Whose kernels a provider of a backend has, where its aliases tell several libraries apart: "fa3" of `fa3/vllm` in
    `fa`, and the provider's own name where no alias means it. "": no alias tells any apart, so that the providers are
    packages of the same kernels."""
    bound = {alias.provider for alias in info.aliases if alias.provider}
    return max((one for one in bound if is_of(provider, one)), key=len, default=provider if bound else "")


def is_of(provider: str, kind: str) -> bool:
    """Whether a provider is of a kind: `fa3/vllm` of "fa3"; everybody is of ""."""
    return not kind or provider == kind or provider.startswith(f"{kind}/")


def kinds_here(offer: Offer, *, by_name: bool = False) -> list[str]:
    """Whose kernels a backend can have on this machine, in the order of its providers.

    Args:
        by_name: also what was only declared.
    """
    able = (p.name for p in offer.info.providers if not p.planned and p.name not in offer.missing)
    shown = (name for name in able if by_name or offer.levels.get(name, offer.evidence) != "declared")
    return list(dict.fromkeys(kind_of(offer.info, name) for name in shown))


def whole(info: BackendInfo, provider: str) -> str:
    """The name that means a backend with these kernels and no others: NAME/KIND, or NAME where there is one kind."""
    kind = kind_of(info, provider)
    return f"{info.name}/{kind}" if kind else info.name


def own_names(info: BackendInfo) -> list[str]:
    """Its name, and the names that mean it with the kernels of each of its libraries."""
    return list(dict.fromkeys((info.name, *(whole(info, provider.name) for provider in info.providers))))


def spared(offers: Sequence[Offer], avoid: Sequence[str]) -> Sequence[Offer]:
    """Offers without the kernels that must not be chosen by themselves."""
    if not avoid:
        return offers
    avoided = {parts(name)[0] for name in avoid if parts(name)[1]}
    return tuple(_without(offer, avoid) if offer.info.name in avoided else offer for offer in offers)


def _without(offer: Offer, avoid: Sequence[str]) -> Offer:
    held = [p.name for p in offer.info.providers if whole(offer.info, p.name) in avoid]
    return dataclasses.replace(offer, missing={**offer.missing, **dict.fromkeys(held, "quarantined for such requests")})


def names_method(name: str, catalogue: Catalogue) -> bool:
    """Whether a name or alias is that of a backend, on whichever platform, whose calls need a place."""
    bare = parts(name.partition("@")[0])[0]
    named = (o.info for o in catalogue.offers if bare in (o.info.name, *(a.name for a in o.info.aliases)))
    return any(provider.is_method for info in named for provider in info.providers)


def resolve(
    name: str, request: AttentionRequest, catalogue: Catalogue, source: str = ""
) -> tuple[Offer | None, str, str]:
    """(offer, provider restriction, canonical name) of a name or alias; the offer is None when it is registered
    for other platforms only. `source`: who asked for it.

    Raises:
        BackendUnavailableError: no plugin knows the name, or two mean different backends by it.
    """
    given, _, platform = name.partition("@")
    bare, kind = parts(given)
    offers = catalogue.on(request.platform, request.arch, request.family)
    by = f", asked for by {source}" if source else ""
    if platform and platform != request.platform:
        if platform not in catalogue.platforms:
            near = did_you_mean(platform, catalogue.platforms)
            raise BackendUnavailableError(f"backend {name!r}{by}: no platform {platform!r}.{near}")
        return None, "", bare
    named = next((offer for offer in offers if offer.info.name == bare), None)
    if kind and named is not None:
        _check_kind(named.info, kind, f"backend {name!r}{by}")
        return named, kind, bare
    if given != bare and (not kind or all(offer.info.name != bare for offer in catalogue.offers)):
        bare, named = given, None  # of an alias there are no kinds
    # A name cannot be taken over: only its own plugin gives it another meaning, and only in a family.
    meant = [
        (offer, alias.provider, offer.info.name)
        for offer in offers
        for alias in offer.info.aliases
        if alias.name == bare and (not alias.families or request.family in alias.families)
        if named is None or (alias.families and offer.plugin == named.plugin)
    ]
    meant = [one for one in meant if one[0].here()] or meant
    if len({offer.plugin for offer, *_ in meant}) > 1:
        several = ", ".join(f"{offer.info.id} of plugin {offer.plugin}" for offer, *_ in meant)
        raise BackendUnavailableError(
            f"backend {name!r}{by}{',' if by else ''} is an alias of several: {several}. Ask for one by its name"
        )
    if meant:
        return meant[0]
    if named is not None:
        return named, "", bare
    known = {o.info.name for o in catalogue.offers} | {a.name for o in catalogue.offers for a in o.info.aliases}
    if bare in known:
        return None, "", bare
    usable = {o.info.name: [a.name for a in o.info.aliases] for o in sorted(offers, key=lambda o: o.rank()) if o.here()}
    text = unknown_backend(bare, source, request.platform, usable, known, catalogue.broken)
    raise BackendUnavailableError(text) from next((e for e in catalogue.errors.values() if e is not None), None)


def _check_kind(info: BackendInfo, kind: str, who: str) -> None:
    kinds = dict.fromkeys(kind_of(info, provider.name) for provider in info.providers)
    if kind not in kinds:
        said = f"its kernels are those of {', '.join(kinds)}" if all(kinds) else "its kernels are of one library"
        raise BackendUnavailableError(f"{who}: {info.name} has none of {kind!r}; {said}")
