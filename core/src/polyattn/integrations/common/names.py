"""A host can be given a name for one backend, `NAME|BACKEND`; NAME alone leaves the choice to polyattn."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import ConfigError, did_you_mean
from ...registry.manager import get_manager

__all__ = ["PIN", "backend_words", "pinned", "split_pin", "unknown_pin"]

PIN = "|"
"""The sign between the name and the backend that it pins."""


def backend_words() -> list[str]:
    """List every name and alias of every backend, sorted.

    Backends of other machines, planned ones and those without dense attention are in it too: a call that asks for one
    says what is missing, or is rewritten for it, where a host would only say that it has no such name.
    """
    infos = get_manager().backends.values()
    return sorted({word for info in infos for word in (info.name, *(alias.name for alias in info.aliases))})


def pinned(name: str, words: Iterable[str]) -> dict[str, str]:
    """Map `name|backend` to the backend, for each of these words."""
    return {f"{name}{PIN}{word}": word for word in words}


def split_pin(name: str) -> tuple[str, str | None]:
    """Split a name into what was installed and the backend that it pins, None = none."""
    group, pin, backend = name.partition(PIN)
    return group, backend if pin else None


def unknown_pin(option: str, name: str, installed: Iterable[str]) -> ConfigError:
    """Make the error of a pin that is not installed.

    Args:
        option: where the host was given the name, such as attn_implementation. name: what it was given, such as
            "polyattn|fa33". installed: the names that are registered.
    """
    backend = split_pin(name)[1] or ""
    known = [word for name in installed if (word := split_pin(name)[1]) is not None]
    return ConfigError(
        f"{option}={name!r} is not installed: no backend {backend!r} can be pinned by name."
        f"{did_you_mean(backend, known)} Known: {', '.join(known) or 'none'}; polyattn.use_backend(...) reaches all"
    )
