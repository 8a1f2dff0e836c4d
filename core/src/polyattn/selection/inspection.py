"""Questions about choices, answered without running anything: explain, what-if, lists and the support matrix.

Nothing here imports torch; a machine without any accelerator can ask about any other.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .. import epoch
from ..contract import FAMILIES, AttentionRequest, BackendInfo, DeviceReport
from ..contract.hookspecs import PROJECT
from ..contract.request_check import check_request
from ..errors import BackendUnavailableError, ConfigError, InvalidInputError, PluginError, PolyattnError, did_you_mean
from ..registry.defects import affecting
from ..registry.distributions import availability, normalise_distribution
from ..registry.evidence import Evidence, read_evidence
from ..registry.foreign import Run
from ..registry.manager import PluginManager, _import_target, get_manager
from ..registry.platforms import parse_platform
from ..tuning import Place, mode, shipped_devices
from .aliases import whole
from .overrides import SCOPE
from .phase_pairs import both_phases, check_drafting, select_pair
from .select import Catalogue, Choice, Offer, Policy, Selection, select
from .tuned_policy import current_policy, shipped_policy

__all__ = [
    "BackendStatus",
    "catalogue",
    "detect",
    "explain",
    "list_backends",
    "served_by",
    "support_matrix",
    "what_if",
]

BUNDLED = ("torch", "triton")
"""What-if takes these as installed: torch is a requirement of polyattn, and torch's GPU builds bring Triton."""


@functools.lru_cache(maxsize=8)
def _catalogue(manager: PluginManager, value: int) -> Catalogue:
    return _build(manager, None)


def catalogue(installed: Mapping[str, str] | None = None) -> Catalogue:
    """Everything selection may know about this machine, or about one with `installed` distributions (what-if)."""
    manager = get_manager()
    return _catalogue(manager, epoch.EPOCH.value) if installed is None else _build(manager, installed)


def served_by(selection: Selection) -> str:
    """Who serves, so that it can be asked for: backend@platform, with whose kernels where it has several libraries'."""
    info = get_manager().backends[selection.backend, selection.platform]
    return f"{whole(info, selection.provider)}@{selection.platform}"


def _build(manager: PluginManager, installed: Mapping[str, str] | None) -> Catalogue:
    offers = []
    for info in manager.backends.values():
        owner = manager.owner(info)
        missing = {}
        for provider in info.providers:
            found = availability(provider, installed)
            if not found.ok:
                missing[provider.name] = f"{found.reason}; {found.hint}"
        evidence = _evidence(manager, info)
        runs = [one for one in (evidence, *evidence.others) if one.level != "declared"]
        level = info.evidence if not runs else evidence.level + (", stale" if evidence.outdated else "")
        chips = () if "" in (archs := [one.arch for one in runs]) else tuple(dict.fromkeys(archs))
        unseen = [p for p in info.providers if p.planned or p.name in evidence.unseen]
        levels = {p.name: "declared" if p.planned else info.evidence for p in unseen}
        defects = {p.name: faults for p in info.providers if (faults := affecting(p, installed))}
        offers.append(Offer(info, owner.name, level, missing, levels, chips, defects))
    # A plugin left out on purpose is named when its backend is asked for, but it is no failure of its device.
    broken = {p.label: p.reason for p in manager.plugins.values() if p.state != "ready"}
    failed = {p.label for p in manager.broken()}
    vendors = {
        name: manager.plugins[info.plugin].label
        for name, info in manager.platforms.items()
        if info.plugin and info.plugin in manager.plugins and manager.plugins[info.plugin].label in failed
    }
    errors = {p.label: p.error for p in manager.broken()}
    return Catalogue(tuple(offers), manager.platforms, broken, errors, vendors, manager.narrow)


def _evidence(manager: PluginManager, info: BackendInfo) -> Evidence:
    """A backend's evidence; a file that is none shows nothing, and is a failure of its plugin alone."""
    try:
        return read_evidence(manager.owner(info).origin, info.name, info.platform).beside(info.providers)
    except PluginError as exc:
        manager.remember(info, exc)
        return Evidence(info.name, info.platform, "declared")


@functools.lru_cache(maxsize=32)
def detect(platform: str) -> DeviceReport:
    """Whether a platform's device is here, found without initialising it."""
    target = get_manager().platforms[platform].detect
    own = target.startswith(f"{PROJECT}.")
    with Run("" if own else f"platform {platform!r}", f"its detection, {target},", "Its plugin is to mend that") as run:
        try:
            report = _import_target(target)()
            if not isinstance(report, DeviceReport):
                raise TypeError(f"{target} returned {report!r}, a DeviceReport is needed")
        except BaseException as exc:  # a stranger's detection may raise anything; the others are still listed
            if run.ended_by_host(exc):
                raise
            return DeviceReport(False, f"its detection failed: {type(exc).__name__}: {exc}")
    return report


def what_if(
    request: AttentionRequest,
    *,
    platform: str,
    installed: Iterable[str] = (),
    backend: str | None = None,
    prefill_backend: str | None = None,
    decode_backend: str | None = None,
    speculative_attention_mode: str = "prefill",
    strict: bool = False,
) -> Selection:
    """What would be chosen on another machine. Planned adapters are judged as if built and marked; a note says where a
    backend has no evidence there, which no machine chooses by itself.

    Args:
        request: what is asked for; its platform fields are replaced.
        platform: `cuda:sm90`, `cuda:sm90@12.3` (toolkit), `rocm:gfx942`, `npu`, `xpu`, `musa`, `mps`, `cpu:amx`.
        installed: distribution names, normalised, common names accepted, `name==version` for a version.
        backend, prefill_backend, decode_backend: explicit choices; a phase's own wins, one alone leaves the other
            phase with `backend` (or automatic). Who is named to verify drafts has to extend or decode with them too.
        speculative_attention_mode: which phase's backend verifies: prefill or decode.
        strict: a documented fallback is an error.

    Raises:
        ConfigError: unknown platform, distribution or mode. BackendUnavailableError, UnsupportedRequestError: as
            `polyattn.selection.select`. InvalidInputError: `request` is none, or has a value of another type.
    """
    if speculative_attention_mode not in ("prefill", "decode"):
        raise ConfigError(f"speculative_attention_mode={speculative_attention_mode!r} must be 'prefill' or 'decode'")
    check_request(request)
    known = tuple(get_manager().platforms)
    name, arch, toolkit, features = parse_platform(platform, known)
    here = dataclasses.replace(request, platform=name, arch=arch, toolkit=toolkit, features=features)
    there = catalogue(_assumed(installed))
    per_phase = {"prefill": prefill_backend, "decode": decode_backend}
    policies = {}
    for phase, own in per_phase.items():
        chosen = own or backend
        source = f"{phase} argument" if own else "argument"
        policies[phase] = Policy(Choice(chosen, source) if chosen else None, strict=strict, what_if=True)
    phase = {"decode": "decode", "verify": speculative_attention_mode}.get(here.phase, "prefill")
    if prefill_backend or decode_backend:
        if here.family not in ("paged", "mla"):
            raise ConfigError(
                f"prefill and decode backends are for the serving families paged and mla, not {here.family}; "
                f"use `backend` (--attention-backend)"
            )
        chosen_pair = select_pair(*both_phases(here), there, policies)
        if here.phase != "verify":
            return _with_notes(select(here, there, policies[phase], full=True), there, policies[phase])
        choice = Choice(chosen_pair[phase].backend, f"speculative_attention_mode={phase}")
        return select(here, there, dataclasses.replace(policies[phase], choice=choice), full=True)
    check_drafting(here, there, policies[phase])
    return _with_notes(select(here, there, policies[phase], full=True), there, policies[phase])


def _with_notes(selection: Selection, there: Catalogue, policy: Policy) -> Selection:
    """What nobody chose by name, with a note where it is only declared, and one for each device of its architecture
    that measurements choose for."""
    request, notes = selection.request, []
    if policy.choice is None and selection.evidence == "declared" and not selection.planned:
        try:
            instead = select(request, there, dataclasses.replace(policy, what_if=False)).id
        except PolyattnError:
            instead = "none"
        notes.append(
            f"declared: it was not shown to work on such a chip, so {instead} is chosen there until `polyattn conform "
            f"{selection.backend}` has passed; by name ({selection.backend}) it can be had"
        )
    asked = policy.choice is not None or mode() == "off" or not request.arch
    for device in () if asked else shipped_devices(request.arch):
        measured = shipped_policy(policy, request, place=Place(device, request.arch))
        tuned = select(request, there, measured)
        if tuned.source == "tuned":
            notes.append(f"on {device}: {tuned.backend}, {tuned.why}")
    return dataclasses.replace(selection, notes=(*selection.notes, *notes))


def _assumed(installed: Iterable[str]) -> dict[str, str]:
    manager = get_manager()
    names: dict[str, str] = {}
    for backend in manager.backends.values():
        for provider in backend.providers:
            for need in provider.requires:
                for alias in (need.distribution, *need.also):
                    names[normalise_distribution(alias)] = normalise_distribution(need.distribution)
    assumed = dict.fromkeys((*BUNDLED, "polyattn"), "")
    assumed.update({normalise_distribution(p.distribution): p.version for p in manager.plugins.values()})
    assumed.update({f"polyattn-{p.name}": p.version for p in manager.plugins.values()})
    for text in installed:
        name, _, version = text.partition("==")
        normal = normalise_distribution(name)
        if normal not in names and normal not in assumed:
            raise ConfigError(
                f"--assume-installed {name!r} is a distribution no backend asks for.{did_you_mean(normal, names)} "
                f"Known: {', '.join(sorted(names))}"
            )
        assumed[normal] = version
    return assumed


def explain(request_or_call: AttentionRequest | Callable[..., Any], *args: Any, **kwargs: Any) -> Selection:
    """Which backend serves a request or a call here, and why not the others. Nothing is run.

    Args:
        request_or_call: an `AttentionRequest`, or one of polyattn's calls followed by its arguments:
            `polyattn.explain(polyattn.attention, q, k, v, causal=True)`. A layer or `bind(...)` object works too.

    Raises:
        BackendUnavailableError, UnsupportedRequestError, InvalidInputError: what the call itself would raise.
    """
    if isinstance(request_or_call, AttentionRequest):
        _check_platform(check_request(request_or_call).platform)
        policy = current_policy(kwargs.pop("backend", None), SCOPE.get(), request_or_call)
        return select(request_or_call, catalogue(), policy, full=True)
    asker = getattr(request_or_call, "__polyattn_explain__", None)
    if asker is None:
        raise InvalidInputError(
            f"explain() takes an AttentionRequest or one of polyattn's calls, not a {type(request_or_call).__name__}; "
            f"for example explain(polyattn.attention, q, k, v)"
        )
    _check_arguments(request_or_call, args, kwargs)
    selection: Selection = asker(*args, **kwargs)
    return selection


_OF_TORCH = {
    "is_causal": "torch's is_causal=True is causal='top_left' here (S3)",
    "enable_gqa": "enable_gqa is not needed: query may have more heads than key and value (S1)",
    "mask": "the mask is attn_mask (S8)",
}


def _check_arguments(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    signature = inspect.signature(getattr(call, "forward", call))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        name = getattr(call, "__name__", type(call).__name__)
        unknown = [word for word in kwargs if word not in signature.parameters]
        hints = [_OF_TORCH[word] for word in unknown if word in _OF_TORCH]
        near = " " + "; ".join(hints) if hints else "".join(did_you_mean(w, signature.parameters) for w in unknown[:1])
        takes = f"{name} takes {', '.join(signature.parameters)}"
        raise InvalidInputError(f"explain({name}, ...): {exc}; {takes}.{near}") from exc


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """One line of `polyattn list`: a backend name on one platform.

    Attributes:
        status: available, unavailable or planned. reasons: why it is not available, and the one thing to do.
    """

    name: str
    platform: str
    package: str
    version: str
    status: str
    evidence: str
    summary: str
    reasons: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _check_platform(name: str) -> None:
    platforms = get_manager().platforms
    if name not in platforms:
        known = ", ".join(sorted(platforms))
        raise BackendUnavailableError(f"no platform {name!r}.{did_you_mean(name, platforms)} Known: {known}")


def list_backends(platform: str | None = None) -> list[BackendStatus]:
    """Every registered backend with its status on this machine, by platform, priority and name. No torch needed.

    Args:
        platform: only this one.

    Raises:
        BackendUnavailableError: no such platform.
    """
    manager = get_manager()
    if platform is not None:
        _check_platform(platform)
    found = []
    for offer in ordered_offers(catalogue()):
        info, owner = offer.info, manager.owner(offer.info)
        if platform is not None and info.platform != platform:
            continue
        status, reasons = _status(offer)
        evidence = _evidence(manager, info)
        found.append(
            BackendStatus(
                name=info.name,
                platform=info.platform,
                package=owner.distribution or owner.module,
                version=owner.version,
                status=status,
                evidence=str(evidence) if evidence.level != "declared" else info.evidence,
                summary=info.summary,
                reasons=reasons,
                aliases=tuple(dict.fromkeys(a.name for a in info.aliases)),
            )
        )
    return found


def ordered_offers(found: Catalogue) -> list[Offer]:
    """Offers as people read them: by platform, priority and name."""
    return sorted(found.offers, key=lambda o: (o.info.platform, -(o.info.priority or -1000), o.info.name))


def _status(offer: Offer) -> tuple[str, tuple[str, ...]]:
    info = offer.info
    device = detect(info.platform)
    reasons = [] if device.present else [f"no {info.platform} device: {device.detail}"]
    built = [p for p in info.providers if not p.planned]
    if not built:
        return "planned", ("its adapter is not part of this version", *reasons)
    lacking = [offer.missing[p.name] for p in built if p.name in offer.missing]
    if len(lacking) == len(built):
        reasons += lacking
    return ("unavailable" if reasons else "available"), tuple(dict.fromkeys(reasons))  # providers may lack the same


def support_matrix() -> list[dict[str, Any]]:
    """The support matrix as data: per backend its status and evidence, and per family what its rows declare."""
    rows = []
    by_id = {f"{s.name}@{s.platform}": s for s in list_backends()}
    for offer in ordered_offers(catalogue()):
        info = offer.info
        status = by_id[info.id]
        families = {}
        for family in FAMILIES:
            probe = AttentionRequest(family=family)  # type: ignore[arg-type]
            cells = []
            for provider in info.providers:
                for r in provider.rows:
                    names = r.allows.get("family") or r.when.get("family")
                    if names is not None and names.reason(probe.family) is None:
                        limits = {k: c.describe() for k, c in {**r.when, **r.allows}.items() if k != "family"}
                        for field, how in r.lowered.items():
                            limits[field] = f"{limits.get(field, 'any')}; else lowered by {how}"
                        cells.append({"provider": provider.name, "planned": provider.planned, "limits": limits})
            if cells:
                families[family] = cells
        rows.append({**status.to_dict(), "families": families, "lossy": info.lossy, "note": info.note})
    return rows
