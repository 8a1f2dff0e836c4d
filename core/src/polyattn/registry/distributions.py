"""This module checks that a provider's packages are installed, in the right version and from the right source. Nothing
is imported to find out."""

from __future__ import annotations

import base64
import csv
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from .. import envvars
from ..contract import Provider, Requirement
from .foreign import Run

__all__ = [
    "Availability",
    "availability",
    "changed_files",
    "distribution_version",
    "is_specifier",
    "is_version",
    "left_out",
    "matches",
    "normalise_distribution",
    "remedy",
]


@dataclasses.dataclass(frozen=True)
class Availability:
    """Tells whether a provider's distributions are here: `reason` says all that is amiss, `hint` what to do about it.
    `version` has those that are as they should be."""

    ok: bool
    version: str = ""
    reason: str = ""
    hint: str = ""


def normalise_distribution(name: str) -> str:
    """PEP 503 form: lower case, runs of -_. as one dash."""
    return "-".join(part for part in name.lower().replace("_", "-").replace(".", "-").split("-") if part)


@functools.cache
def distribution_version(name: str) -> str | None:
    """Installed version of a distribution, read from metadata, or None. One that `left_out` names counts as absent."""
    if left_out(name):
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def changed_files(name: str) -> tuple[str, ...]:
    """Python files of an installed distribution that are gone, or not what it installed: packages that share a folder
    replace and remove each other's. Reads them all, once."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return ()
    # From Python 3.12 on `importlib.metadata.files` leaves out what is gone.
    rows = [row for row in csv.reader((found.read_text("RECORD") or "").splitlines()) if len(row) > 1]
    ours = [(file, hashed) for file, hashed, *_ in rows if file.endswith(".py") and hashed]
    return tuple(sorted(file for file, hashed in ours if not _is_intact(Path(str(found.locate_file(file))), hashed)))


def _is_intact(file: Path, hashed: str) -> bool:
    mode, _, value = hashed.partition("=")
    try:
        digest = hashlib.new(mode, file.read_bytes()).digest()
    except OSError:
        return False
    return base64.urlsafe_b64encode(digest).decode().rstrip("=") == value


def left_out(name: str) -> bool:
    """Return whether POLYATTN_WITHOUT names a distribution."""
    return normalise_distribution(name) in map(normalise_distribution, envvars.names("POLYATTN_WITHOUT") or ())


def _module_findable(dotted: str) -> bool:
    """Return whether a module's file exists, without importing it or any parent (vendor packages may compile at
    import)."""
    top, *rest = dotted.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    for parent in spec.submodule_search_locations or ():
        base = Path(parent).joinpath(*rest)
        if not rest or base.is_dir() or any(base.parent.glob(f"{base.name}.*")):
            return True
    return not rest


def availability(provider: Provider, installed: Mapping[str, str] | None = None) -> Availability:
    """Are the provider's distributions installed, in the right version, the right packages, and of use to this process?

    Args:
        provider: the provider.
        installed: what-if: normalised distribution name -> version ("" = any version); None = ask the machine.
    """
    found, reasons, hints = [], [], []
    for need in provider.requires:
        version = _lookup(need, installed)
        reason, todo = _amiss(need, version, installed is None), ""
        if not reason and need.check and installed is None:
            reason, todo = _of_no_use(need, version)
        if reason:
            reasons.append(reason)
            left = _left_out_as(need) if installed is None else ""
            hints.append(f"take {left} out of it" if left else todo or remedy(need))
        else:
            found.append(f"{need.distribution} {version}".strip())
    return Availability(not reasons, ", ".join(found), "; ".join(reasons), "; and ".join(dict.fromkeys(hints)))


def remedy(need: Requirement) -> str:
    """How to get what is needed."""
    return need.hint or f"pip install {need.distribution}{need.versions}"


def _amiss(need: Requirement, version: str | None, here: bool) -> str:
    """Say why an installed `version` of a distribution (None: not installed) is not what is needed; empty when it
    is."""
    if here and (left := _left_out_as(need)):
        return f"{left} is left out by POLYATTN_WITHOUT"
    if version is None:
        impostor = f"; the registry has {need.impostor}" if need.impostor else ""
        return f"{need.distribution}{need.versions} is not installed{impostor}"
    if need.versions and version and not matches(version, need.versions):
        return f"{need.distribution} {version} is installed, {need.versions} is needed"
    if here and need.module and not _module_findable(need.module):
        what = need.impostor or f"{need.distribution} without {need.module}"
        return f"the installed {need.distribution} {version} is {what}"
    return ""


def _of_no_use(need: Requirement, version: str | None) -> tuple[str, str]:
    """Say why this process cannot use a distribution that is installed, and what to do; empty where it can."""
    label = f"{need.distribution} {version} is installed"
    with Run() as run:
        try:
            said = pkgutil.resolve_name(need.check)()
            why, todo = said or ("", "")
            sentences = isinstance(why, str) and isinstance(todo, str)
        except BaseException as exc:  # a stranger's check may raise anything; others still serve
            if run.ended_by_host(exc):
                raise
            failed = f"failed: {type(exc).__name__}: {exc}"
            return f"{label}, but {need.check}, which knows if it can be used, {failed}", _MEND
    if not sentences:
        return f"{label}, but {need.check} returned {said!r}, not None or (why, what to do)", _MEND
    return (f"{label}, but {why}", todo) if why else ("", "")


_MEND = "mend its plugin, or leave it out (POLYATTN_DISABLE)"


def _left_out_as(need: Requirement) -> str:
    """The name under which POLYATTN_WITHOUT has what is needed; empty where it has not. Either name is all of it."""
    return next(filter(left_out, (need.distribution, *need.also)), "")


def _lookup(need: Requirement, installed: Mapping[str, str] | None) -> str | None:
    for name in (need.distribution, *need.also):
        version = distribution_version(name) if installed is None else installed.get(normalise_distribution(name))
        if version is not None:
            return version
    return None


def matches(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def is_specifier(text: str) -> bool:
    """Return whether a text says which versions are meant; an empty one means all."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return True


def is_version(text: str) -> bool:
    """Return whether a text is a version that can be compared with others."""
    from packaging.version import InvalidVersion, Version

    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
