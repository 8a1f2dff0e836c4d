"""`polyattn list` shows the registered backends and their status on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.text import Text

from ..contract.packages import absent_packages
from ..registry.manager import get_manager
from ..selection.inspection import BackendStatus, detect, list_backends
from .rendering import grid, screen, show_json, standing, title

__all__ = ["entries", "list_command", "platforms_here"]

ORDER = ("available", "unavailable", "planned")
PLANNED = "its adapter is not part of this version"


def platforms_here() -> list[str]:
    """List the platforms whose device is on this machine."""
    return [name for name in get_manager().platforms if detect(name).present]


def entries(backends: Iterable[BackendStatus]) -> list[dict[str, Any]]:
    """Return backends as plain data. Platforms on which a backend has one package, status and evidence share an entry;
    a reason that does not hold on all of them starts with its platform."""
    groups: dict[tuple[str, ...], list[BackendStatus]] = defaultdict(list)
    for backend in backends:
        groups[backend.name, backend.package, backend.version, backend.status, backend.evidence].append(backend)
    return [_entry(group) for group in groups.values()]


def _entry(group: list[BackendStatus]) -> dict[str, Any]:
    first = group[0]
    shared = [reason for reason in first.reasons if all(reason in other.reasons for other in group)]
    own = [f"{b.platform}: {reason}" for b in group for reason in b.reasons if reason not in shared]
    return {
        "name": first.name,
        "platforms": [b.platform for b in group],
        "package": first.package,
        "version": first.version,
        "status": first.status,
        "evidence": first.evidence,
        "reasons": [*shared, *own],
        "aliases": list(dict.fromkeys(alias for b in group for alias in b.aliases)),
        "summary": first.summary,
    }


def list_command(
    platform: Annotated[str | None, typer.Option(help="Show only the backends of this platform, such as cuda.")] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Show the backends of every platform. Without it, the table has this machine's."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, of every platform unless --platform is given.")
    ] = False,
) -> None:
    """List the backends: where each comes from, whether it can be used here, and how far it was shown to work."""
    backends = list_backends(platform)
    if as_json:
        show_json(entries(backends))
        return
    here = platforms_here()
    shown = backends if everything or platform else [b for b in backends if b.platform in here]
    console = screen()
    rows = sorted(entries(shown), key=lambda entry: ORDER.index(entry["status"]))
    amiss = any(_worth_a_column(entry["reasons"]) for entry in rows)
    table = grid(
        "backend", "platforms", "!status", "evidence", "package", *(["why not, and what to do"] if amiss else [])
    )
    for entry in rows:
        name = Text(entry["name"], style="name")
        if entry["aliases"]:
            name.append(f" ({', '.join(entry['aliases'])})", style="quiet")
        table.add_row(
            name,
            ", ".join(entry["platforms"]),
            standing(entry["status"]),
            standing(entry["evidence"]),
            Text(f"{entry['package']} {entry['version']}".strip(), style="quiet"),
            *([Text("; ".join(_worth_a_column(entry["reasons"])))] if amiss else []),
        )
    where = platform or ("every platform" if everything else f"this machine: {', '.join(here)}")
    console.print(title("Backends", where))
    console.print()
    console.print(table)
    console.print()
    console.print(Text("\n".join(_footnotes(shown, narrowed=not everything and not platform)), style="quiet"))


def _worth_a_column(reasons: list[str]) -> list[str]:
    """Drop the reasons that the status or a footnote says once for all rows."""
    return [
        r for r in reasons if r != PLANNED and not r.partition(": ")[2].startswith("no ") and not r.startswith("no ")
    ]


def _footnotes(shown: list[BackendStatus], *, narrowed: bool) -> list[str]:
    notes = []
    if any(b.status == "planned" for b in shown):
        notes.append(f"planned: {PLANNED}; it is never selected.")
    for platform in dict.fromkeys(b.platform for b in shown):
        report = detect(platform)
        if not report.present:
            notes.append(f"{platform}: {report.detail}.")
    reports = get_manager().plugins.values()
    absent = absent_packages(word for report in reports for word in (report.distribution, report.module))
    notes += [f"pip install {package} would bring: {', '.join(names)}." for package, names in absent.items()]
    if narrowed:
        notes.append("`polyattn list --all` shows the other platforms, `polyattn doctor` what to do about a backend.")
    return notes
