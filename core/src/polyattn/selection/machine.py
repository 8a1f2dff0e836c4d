"""What is known of this machine, or of one that is assumed: its backends with what they lack, and its devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

from ..contract import BackendInfo, DeviceReport
from ..contract.hookspecs import PROJECT
from ..errors import BackendUnavailableError, PluginError, did_you_mean
from ..registry.defects import affecting
from ..registry.distributions import availability
from ..registry.evidence import Evidence, read_evidence
from ..registry.foreign import Run
from ..registry.manager import PluginManager, _import_target, get_manager
from .aliases import whole
from .answer import Selection
from .offers import Catalogue, Offer

__all__ = ["catalogue", "check_platform", "detect", "evidence_of", "served_by"]


@functools.lru_cache(maxsize=8)
def _catalogue(manager: PluginManager, changes: int) -> Catalogue:
    return _build(manager, None)


def catalogue(installed: Mapping[str, str] | None = None) -> Catalogue:
    """Everything selection may know about this machine, or about one with `installed` distributions (what-if)."""
    manager = get_manager()
    return _catalogue(manager, manager.changes) if installed is None else _build(manager, installed)


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
        evidence = evidence_of(manager, info)
        runs = [one for one in (evidence, *evidence.others) if one.level != "declared"]
        level = info.evidence if not runs else evidence.level + (", stale" if evidence.outdated else "")
        chips = () if "" in (archs := [one.arch for one in runs]) else tuple(dict.fromkeys(archs))
        families = () if () in (tried := [one.families for one in runs]) else tuple(itertools.chain(*tried))
        unseen = [p for p in info.providers if p.planned or p.name in evidence.unseen]
        levels = {p.name: "declared" if p.planned else info.evidence for p in unseen}
        defects = {p.name: faults for p in info.providers if (faults := affecting(p, installed))}
        offers.append(Offer(info, owner.name, level, missing, levels, chips, defects, families))
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


def evidence_of(manager: PluginManager, info: BackendInfo) -> Evidence:
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


def check_platform(name: str) -> None:
    platforms = get_manager().platforms
    if name not in platforms:
        known = ", ".join(sorted(platforms))
        raise BackendUnavailableError(f"no platform {name!r}.{did_you_mean(name, platforms)} Known: {known}")
