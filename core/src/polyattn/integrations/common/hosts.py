"""This module imports the package of a host when it is needed, and refuses one that is missing or too old."""

from __future__ import annotations

import importlib
from types import ModuleType

from ...errors import BackendUnavailableError
from .. import OLDEST, outdated

__all__ = ["host_package"]


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
