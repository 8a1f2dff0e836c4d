"""Lists of backends: what each is on this machine, and what each declares."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..contract import FAMILIES, AttentionRequest
from ..registry.manager import get_manager
from .machine import catalogue, check_platform, detect, evidence_of
from .offers import Catalogue, Offer

__all__ = ["BackendStatus", "list_backends", "ordered_offers", "support_matrix"]


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


def list_backends(platform: str | None = None) -> list[BackendStatus]:
    """Every registered backend with its status on this machine, by platform, priority and name. No torch needed.

    Args:
        platform: only this one.

    Raises:
        BackendUnavailableError: no such platform.
    """
    manager = get_manager()
    if platform is not None:
        check_platform(platform)
    found = []
    for offer in ordered_offers(catalogue()):
        info, owner = offer.info, manager.owner(offer.info)
        if platform is not None and info.platform != platform:
            continue
        status, reasons = _status(offer)
        evidence = evidence_of(manager, info)
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
