"""What is said of backends that refused a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from ..contract import AttentionRequest, BackendInfo, Provider, Rejected, judge
from ..lowering import Planner
from ..registry.defects import refusal

__all__ = ["by_nobody", "not_there", "without_vain_advice"]


def without_vain_advice(
    reasons: Sequence[str], info: BackendInfo, request: AttentionRequest, missing: Mapping[str, str]
) -> list[str]:
    """The reasons of a backend, with its limits in the place of what it would be installed for in vain.

    Args:
        missing: provider -> why it is not here, and what to do, as `reasons` have it.
    """
    found = list(reasons)
    for provider in info.providers:
        prefix = f"{provider.name}: " if len(info.providers) > 1 else ""
        said = prefix + missing.get(provider.name, "")
        if said in found and (limits := _limits(provider, request)):
            at = found.index(said)
            found[at : at + 1] = [prefix + limit for limit in limits]
    return found


def _limits(provider: Provider, request: AttentionRequest) -> Sequence[str]:
    """Why a provider would serve a request neither as it is nor by an exact rewrite; nothing where it would."""
    try:
        verdict = judge(provider.rows, request)
        faults = provider.defects
        if (faulty := refusal(faults, request, named=True)) is not None and not isinstance(verdict, Rejected):
            verdict = faulty
        planner = Planner(provider.rows, narrow=partial(refusal, faults), helper=lambda _: "some other backend")
        served = not isinstance(verdict, Rejected) or planner.plan(request) is not None
    except Exception:  # noqa: BLE001 - a plugin's own constraint may raise anything; that it is missing is said anyway
        return ()
    return () if served or not isinstance(verdict, Rejected) else verdict.reasons


def by_nobody(
    request: AttentionRequest, platforms: Iterable[str], able: Sequence[str], rejected: Mapping[str, list[str]]
) -> str:
    """The message about a request that nobody serves by itself.

    Args:
        able: backends that do by name. rejected: the others of its platform, and why.
    """
    nobody = f" No backend is registered for {request.platform!r} (known: {', '.join(sorted(platforms))})."
    none_here = "" if able or rejected else nobody
    hint = f"By name these can: {', '.join(able)}." if able else _nearest(rejected)
    lines = "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items())
    return f"no backend can serve this call: {request.summary()}.{none_here} {hint}{lines}"


def not_there(who: str, platform: str, where: Sequence[str], families: Sequence[str], able: Sequence[str]) -> str:
    """The message about a backend that is known on other platforms, `where`, or here as an alias in other `families`;
    `able` would serve the request here."""
    known = f" (it is known on {', '.join(where)})" if where and not families else ""
    only = (
        f"is a name for calls of family {' or '.join(families)} only" if families else f"has no backend on {platform}"
    )
    return f"{who}, {only}{known}. Backends that can serve this call: {', '.join(able) or 'none'}"


def _nearest(rejected: Mapping[str, list[str]]) -> str:
    """Who is here and lacks least, in a sentence."""
    if not rejected:
        return ""
    name, reasons = min(_runnable(rejected) or rejected.items(), key=lambda item: len(item[1]))
    return f"Nearest miss: {name} ({'; '.join(reasons)})."


def _runnable(rejected: Mapping[str, list[str]]) -> list[tuple[str, list[str]]]:
    away = ("planned", "is not installed", "is installed")
    return [(n, r) for n, r in rejected.items() if not any(word in reason for reason in r for word in away)]
