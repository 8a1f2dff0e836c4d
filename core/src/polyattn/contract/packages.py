"""Which distributions of this repository bring which names: for advice to who lacks one. Data, in packages.json."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterable, Mapping

__all__ = ["absent_packages", "bringing"]


@functools.cache
def _table() -> Mapping[str, tuple[str, ...]]:
    text = importlib.resources.files(__package__).joinpath("packages.json").read_text(encoding="utf-8")
    return {package: tuple(names) for package, names in json.loads(text).items()}


def bringing(name: str) -> list[str]:
    """Distributions with a backend, or an alias, of a name."""
    return [package for package, names in _table().items() if name in names]


def absent_packages(here: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Distribution -> the names that it would bring, of those that are not here.

    Args:
        here: plugins that were found, as distributions or as modules.
    """
    found = {word.partition(".")[0].replace("_", "-").lower() for word in here}
    return {package: names for package, names in _table().items() if package not in found}
