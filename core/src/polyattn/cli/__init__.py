"""The command line is `polyattn`, with one file per command.

It needs the extra `cli`. torch is imported by the commands that run something.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence

__all__ = ["main"]

LIBRARIES = ("typer", "rich")
WIDTH = 100
"""Columns of an answer when the output is no terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (docs/cli.md lists them).

    Args:
        arguments: the words after `polyattn`; None = the process's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        text = f"the command line needs {' and '.join(missing)}, not installed here: pip install 'polyattn[cli]'"
        if "--json" in words:
            print(json.dumps({"error": {"type": "ModuleNotFoundError", "message": text}}, indent=2))
        else:
            print(f"polyattn: {text}", file=sys.stderr)
        return 4
    from .app import run

    return run(words)
