"""Hosts that can be taught to call polyattn: `polyattn.integrations.transformers.install()`.

One room per host, imported when it is first named; importing a room imports nothing of its host.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ..registry.distributions import distribution_version

__all__ = ["HOSTS", "OLDEST", "outdated"]

HOSTS = ("transformers",)

OLDEST = {"transformers": "5.4"}
"""Host -> the oldest version that is served. transformers makes masks from lengths since 5.4, from positions before."""


def outdated(host: str, version: str | None = None) -> str:
    """Why a host that is installed cannot be served, and what to do; empty where it can be, or is not installed.

    Args:
        version: of the host, None = what is installed; nothing is imported.
    """
    version, oldest = version or distribution_version(host), OLDEST[host]
    if not version or Version(version) >= Version(oldest):
        return ""
    return (
        f"{host} {version} is installed, {oldest} or newer is needed (older ones call attention differently); "
        f"pip install -U {host}"
    )


if TYPE_CHECKING:
    from . import transformers as transformers


if not TYPE_CHECKING:  # a checker would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name in HOSTS:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; hosts: {', '.join(HOSTS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *HOSTS])
