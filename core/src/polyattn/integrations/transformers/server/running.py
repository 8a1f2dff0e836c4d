"""This module runs the server's app until it is told to end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import uvicorn

from ....errors import ConfigError, did_you_mean

__all__ = ["run_app"]

_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


class _Server(uvicorn.Server):
    """A server that says when it can be asked."""

    ready: Callable[[str], None]

    async def startup(self, sockets: Any = None) -> None:
        """Start, and say where."""
        await super().startup(sockets)
        if self.started:
            name, port = self.servers[0].sockets[0].getsockname()[:2]
            self.ready(f"http://{f'[{name}]' if ':' in name else name}:{port}")


def run_app(app: Any, host: str, port: int, *, log_level: str, drain: int, ready: Callable[[str], None]) -> None:
    """Answer until SIGTERM or SIGINT, then let the requests that are there end.

    Args:
        port: 0 = any that is free. drain: seconds that they have. ready: called with the address once it answers.

    Raises:
        ConfigError: an unknown log level, or the address cannot be listened at.
    """
    if log_level not in _LEVELS:
        near = did_you_mean(log_level, _LEVELS)
        raise ConfigError(f"--log-level {log_level!r}: allowed are {', '.join(_LEVELS)}.{near}")
    config = uvicorn.Config(
        app, host, port, log_level=log_level, timeout_graceful_shutdown=drain, lifespan="on", log_config=None
    )
    server = _Server(config)
    server.ready = ready
    # After a shutdown uvicorn raises the signal anew: requests have ended, and so does the process, without an error.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run()
    except SystemExit as exc:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened at: another program may have it, or the host is no "
            f"address of this machine; name another port (0: any that is free), or the host 127.0.0.1 or 0.0.0.0"
        ) from exc
    finally:
        signal.signal(signal.SIGTERM, before)
