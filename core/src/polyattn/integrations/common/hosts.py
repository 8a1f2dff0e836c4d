"""This module imports the package of a host when it is needed, and refuses one that is missing or too old."""

from __future__ import annotations

import importlib
from types import ModuleType

from packaging.version import Version

from ...errors import BackendUnavailableError
from ...registry.distributions import distribution_version

__all__ = ["OLDEST", "host_package", "outdated"]

OLDEST = {"torch": "2.11", "transformers": "5.4", "diffusers": "0.42", "vllm": "0.33", "sglang": "0.5.23"}
"""Host -> the oldest version that is served. transformers makes masks from lengths since 5.4, from positions before.
diffusers hands `attention_kwargs` on since 0.42, and drops them before."""


def outdated(host: str, version: str | None = None) -> str:
    """Say why a host that is installed cannot be served, and what to do; empty where it can be, or is not installed.

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


def host_package(host: str) -> ModuleType:
    """Import the package of a host.

    Args:
        host: one of `polyattn.integrations.HOSTS`.

    Raises:
        BackendUnavailableError: it is missing or too old.
    """
    try:
        package = importlib.import_module(host)
    except ModuleNotFoundError as exc:
        if exc.name != host:
            raise
        raise BackendUnavailableError(
            f"{host} is not installed; pip install 'polyattn[{host}]', or {host} {OLDEST[host]} or newer"
        ) from exc
    if why := outdated(host, package.__version__):
        raise BackendUnavailableError(why)
    return package
