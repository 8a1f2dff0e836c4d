"""`negotiate_layout`: one layout of the KV cache for all phases, found before the pool is allocated (S9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...contract import AttentionRequest
from ...contract.capability import ANY
from ...errors import BackendUnavailableError, InvalidInputError, UnsupportedRequestError
from ...selection import overrides
from ...selection.inspection import catalogue
from ...selection.select import Catalogue, Choice, Policy, Selection, select
from .storage import LAYOUTS, OTHER_LAYOUTS

__all__ = ["negotiate_layout"]

_REFUSALS = (UnsupportedRequestError, BackendUnavailableError)


@dataclasses.dataclass(frozen=True)
class _Phase:
    """A phase's backend, and what the caches it takes cost it: layout -> passes of exact rewrites, 0 = none."""

    request: AttentionRequest
    selection: Selection
    taken: dict[str, float]

    def __str__(self) -> str:
        layouts = ", ".join(f"{name} (by exact rewrites)" if cost else name for name, cost in self.taken.items())
        return f"{self.request.phase}: {self.selection.backend} by {self.selection.source} takes {layouts or 'none'}"


def negotiate_layout(
    requests: Sequence[AttentionRequest], *, backends: Sequence[str | None] = (), there: Catalogue | None = None
) -> tuple[str, tuple[str, ...]]:
    """The layout that the backends of all phases take, NHD if several do.

    Every phase's backend is chosen as if the layout were free, under the overrides in force; its capability rows then
    say which layouts it takes. A layout that needs fewer exact rewrites is preferred. Where automatic choices share no
    layout, the next best backends are taken that do.

    Args:
        requests: of the phases (extend, decode, verify) and of all kinds of layers; their kv_layout is not read. Latent
            rows have no layout.
        backends: a backend for each request, as an argument on the call; None or missing = as configured.
        there: what is installed, None = here.

    Returns:
        (NHD or HND, a sentence for each request).

    Raises:
        UnsupportedRequestError: the phases share no layout; it names what each backend takes. BackendUnavailableError,
            UnsupportedRequestError: a phase has no backend, see `polyattn.selection.select`.
    """
    if len(backends) > len(requests):
        raise InvalidInputError(f"backends has {len(backends)} names for {len(requests)} requests; one each, or None")
    known = there or catalogue()
    names = [*backends, *[None] * (len(requests) - len(backends))]
    asked = [
        (request, Policy(_choice(name, request), strict=overrides.current_settings().strict))
        for request, name in zip(requests, names, strict=True)
        if request.family == "paged"
    ]
    phases = [_phase(request, known, policy) for request, policy in asked]
    shared = [layout for layout in LAYOUTS if all(layout in phase.taken for phase in phases)]
    if shared:
        layout = min(shared, key=lambda name: sum(phase.taken[name] for phase in phases))
        return layout, tuple(map(str, phases)) or ("latent rows have no layout",)
    for layout in LAYOUTS:
        if found := _all(asked, layout, known):
            passed = [p for p, s in zip(phases, found, strict=True) if p.selection.backend != s.backend]
            return layout, (
                *(f"{s.request.phase}: {s.backend} by {s.source} takes {layout}" for s in found),
                *(f"passed over, as the phases share no layout with it: {phase}" for phase in passed),
            )
    raise _refusal(phases)


def _choice(name: str | None, request: AttentionRequest) -> Choice | None:
    return overrides.current_choice(name, overrides.SCOPE.get(), request)


def _in(request: AttentionRequest, layout: str) -> AttentionRequest:
    return dataclasses.replace(request, kv_layout=layout)


def _all(asked: Sequence[tuple[AttentionRequest, Policy]], layout: str, known: Catalogue) -> list[Selection]:
    """Return what every phase chooses for caches in one layout; none where a phase refuses."""
    try:
        return [select(_in(request, layout), known, policy) for request, policy in asked]
    except _REFUSALS:
        return []


def _phase(request: AttentionRequest, known: Catalogue, policy: Policy) -> _Phase:
    chosen = select(_in(request, LAYOUTS[0]), _layout_free(known), policy)
    # By name, and strictly: only what this very backend takes counts. An alias keeps its restriction to a provider.
    replaced = policy.choice is None or chosen.fallback or chosen.rule
    choice = Choice(chosen.backend, chosen.source) if replaced else policy.choice
    named = dataclasses.replace(policy, choice=choice, strict=True)
    taken = {}
    for layout in (*LAYOUTS, *OTHER_LAYOUTS):
        try:
            found = select(_in(request, layout), known, named)
        except _REFUSALS:
            continue
        taken[layout] = found.plan.cost if found.plan is not None else 0.0
    return _Phase(request, chosen, taken)


def _layout_free(known: Catalogue) -> Catalogue:
    """The same backends, as if each took every layout."""
    offers = []
    for offer in known.offers:
        providers = tuple(
            dataclasses.replace(
                provider,
                rows=tuple(dataclasses.replace(r, allows={**r.allows, "kv_layout": ANY}) for r in provider.rows),
            )
            for provider in offer.info.providers
        )
        offers.append(dataclasses.replace(offer, info=dataclasses.replace(offer.info, providers=providers)))
    return dataclasses.replace(known, offers=tuple(offers), narrow=lambda backend, request: None)


def _refusal(phases: Sequence[_Phase]) -> UnsupportedRequestError:
    names = {name for phase in phases for name in phase.taken if name in OTHER_LAYOUTS}
    why = "".join(f" Pools make no {name} caches: {OTHER_LAYOUTS[name]}." for name in sorted(names))
    return UnsupportedRequestError(
        f"the phases share no layout of the KV cache that a pool can have ({', '.join(LAYOUTS)}): "
        f"{'; '.join(map(str, phases))}.{why} Choose another backend for one of the phases",
        {p.selection.backend: [f"kv_layout: takes {', '.join(p.taken) or 'none'}"] for p in phases},
    )
