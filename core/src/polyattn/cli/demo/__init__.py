"""`polyattn demo` shows what is chosen, a real model, every backend against the reference, and the cost, in under a
minute.

One file per step; only they import torch, when the command runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["FAILED", "demo"]

FAILED = 3


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, and nothing else.")] = False,
) -> None:
    """See it work on this machine's CPU, with real weights; offline, about half a minute.

    Exit code 3 when a step of the verdict failed.
    """
    from .steps import run

    if not run(as_json=as_json):
        raise typer.Exit(FAILED)
