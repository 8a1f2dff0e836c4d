"""This module finds the plugins that are announced, and decides which are loaded: decided on metadata and variables,
before anything is imported."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from .. import envvars
from ..contract.hookspecs import ENTRY_POINT_GROUP, PROJECT
from ..errors import ConfigError, InvalidInputError, did_you_mean
from .distributions import normalise_distribution

__all__ = ["CORE", "CORE_MODULE", "Door", "Source", "announced", "grouped", "incompatible", "short_name"]

CORE = "core"
CORE_MODULE = "polyattn.backends.plugin"
LISTS = ("POLYATTN_DISABLE", "POLYATTN_PLUGINS")


@dataclasses.dataclass(frozen=True)
class Source:
    """A plugin as its package announces it: the name and module of its entry point, and the distribution's metadata.
    A module that is given by its path has no distribution."""

    name: str
    module: str
    distribution: str = ""
    version: str = ""
    requires: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: ModuleType | str, name: str | None = None) -> Source:
        """A module, or its dotted path, that is registered by hand.

        Raises:
            InvalidInputError: it is neither, or the name is none.
        """
        dotted = module if isinstance(module, str) else getattr(module, "__name__", None)
        if not (isinstance(dotted, str) and dotted.strip()):
            raise InvalidInputError(
                f"{module!r} is no plugin: give a module, or its dotted path such as 'polyattn_acme.plugin'"
            )
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise InvalidInputError(f"name={name!r} is no name of a plugin: give a word, or None to derive it")
        return cls(name or short_name(dotted), dotted)

    def words(self) -> set[str]:
        """Return what `POLYATTN_DISABLE` and `POLYATTN_PLUGINS` may call it, in normal form: its name, with `polyattn-`
        or without, its distribution, its module and the package of that."""
        package = self.module.partition(".")[0]
        found = map(normalise_distribution, (self.name, self.distribution, self.module, package))
        return {word.removeprefix(f"{PROJECT}-") for word in found if word}


def meant(word: str) -> str:
    """The normal form of a word of those lists: case, -, _ and . make no difference, nor does `polyattn-` before it."""
    return normalise_distribution(word).removeprefix(f"{PROJECT}-")


_CORE = Source(CORE, CORE_MODULE, PROJECT)


class Door:
    """Decides which plugins are loaded: POLYATTN_DISABLE keeps plugins out, POLYATTN_PLUGINS, where it is set, all but
    those it names.

    Raises:
        ConfigError: core is to be left out.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.given = {name: envvars.names(name, environ) for name in LISTS}
        left_out = self.given[LISTS[0]] or ()
        if any(meant(word) in _CORE.words() for word in left_out):
            raise ConfigError(
                f"POLYATTN_DISABLE={','.join(left_out)!r}: core cannot be left out, the platforms that other plugins "
                f"name are its own. Take it out of the list; POLYATTN_ATTENTION_BACKEND names who serves instead of "
                f"core's backends"
            )
        self._seen: list[Source] = []

    def closed(self, source: Source) -> str:
        """The variable that keeps a plugin out; "" lets it in."""
        self._seen.append(source)
        deny, allow = (self.given[name] for name in LISTS)
        words = source.words()
        if any(meant(word) in words for word in deny or ()):
            return LISTS[0]
        outside = allow is not None and source.name != CORE and not any(meant(word) in words for word in allow)
        return LISTS[1] if outside else ""

    def unknown(self) -> list[tuple[str, str]]:
        """(variable, sentence) for each word that names no plugin of those that came to the door."""
        known = {word for source in self._seen for word in source.words()}
        names = [source.name for source in self._seen]
        return [
            (
                variable,
                f"{variable}: no plugin is named {word!r}.{did_you_mean(meant(word), names)} Known: {', '.join(names)}",
            )
            for variable, words in self.given.items()
            for word in words or ()
            if meant(word) not in known
        ]


def announced(host_version: str, environ: Mapping[str, str] | None = None) -> Iterator[Source]:
    """Core, the entry points and POLYATTN_EXTRA_PLUGINS, sorted, each plugin once: file-system order decides nothing,
    neither does a distribution that is on the path twice, or a path to the module of an entry point."""
    yield dataclasses.replace(_CORE, version=host_version)
    found = [
        Source(
            ep.name,
            ep.value.partition(":")[0],
            ep.dist.name if ep.dist else "",
            ep.dist.version if ep.dist else "",
            tuple(ep.dist.requires or ()) if ep.dist else (),
        )
        for ep in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    ]
    modules = {CORE_MODULE, *(source.module for source in found)}
    extra = envvars.names("POLYATTN_EXTRA_PLUGINS", environ) or ()
    found += [Source(short_name(module), module) for module in extra if module not in modules]
    seen = {(CORE, CORE_MODULE, PROJECT)}
    for source in sorted(found, key=lambda s: (s.name, not s.distribution, s.distribution, s.module)):
        identity = (source.name, source.module, normalise_distribution(source.distribution))
        if identity not in seen:
            seen.add(identity)
            yield source


def grouped(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """Group the plugins by their name."""
    groups: dict[str, list[Source]] = {}
    for source in sources:
        groups.setdefault(source.name, []).append(source)
    yield from groups.values()


def short_name(module: str) -> str:
    """The name of a plugin that is given by the path of its module."""
    return module.split(".")[0].removeprefix(f"{PROJECT}_")


def _admits(specifier: Any, version: str) -> bool:
    """Return whether a version is allowed. A pre-release counts as the release that it leads to, and as what is before
    that: a candidate of 0.2 takes plugins made for 0.1 (<0.2) and those made for 0.2 (>=0.2)."""
    from packaging.version import Version

    if specifier.contains(version, prereleases=True):
        return True
    parsed = Version(version)
    if not parsed.is_prerelease:
        return False
    before = (
        s.contains(version, prereleases=True) or (s.operator == "<" and parsed < Version(s.version)) for s in specifier
    )
    return specifier.contains(parsed.base_version) or all(before)


def incompatible(requires: Iterable[str], host_version: str) -> str:
    """'needs polyattn<0.4, found 0.5', or '' when the metadata agree (nothing is imported to find out)."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        known = normalise_distribution(requirement.name) == PROJECT and host_version
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if known and applies and not _admits(requirement.specifier, host_version):
            return f"needs {PROJECT}{requirement.specifier}, found {host_version}; install matching versions"
    return ""
