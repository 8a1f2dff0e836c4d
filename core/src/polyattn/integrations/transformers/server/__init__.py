"""This room answers OpenAI's protocol with an engine of polyattn: transformers' own handlers, which know chat
templates, tools and the form of answers, over `polyattn.serving.engine`.

- `fields.py`: what of a request is served; the rest is refused by its name. `manager.py`: requests into the engine and
  its tokens into text, in the place of transformers' generation. `app.py`: routes, errors, the end of a client.
- `metrics.py`: what Prometheus reads.

It needs `pip install 'polyattn[serve]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..registry import interfaces

if TYPE_CHECKING:
    from .app import build_app as build_app
    from .running import run_app as run_app

__all__ = ["build_app", "check", "run_app"]

_WHERE = {"build_app": "app", "run_app": "running"}


def check() -> None:
    """Import what the server stands on.

    Raises:
        BackendUnavailableError: transformers is missing or too old. ImportError: another package is missing, or this
            transformers has no server.
    """
    interfaces()
    for name in ("transformers.cli.serving.chat_completion", f"{__name__}.app", f"{__name__}.running"):
        import_module(name)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
