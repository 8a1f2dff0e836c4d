"""What the benchmarks of this folder share: their arguments, what a result file says of its run, and its table."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from polyattn.testing.machine import device_name, versions

__all__ = ["arguments", "asked", "caption", "finish", "parser", "save", "stamp"]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--json` and `--render`; a benchmark adds its own sizes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path)
    made.add_argument("--render", type=Path)
    return made


def arguments(made: argparse.ArgumentParser, markdown: Callable[[dict[str, Any]], str]) -> argparse.Namespace | None:
    """The arguments of a run, or None where a result file was shown instead."""
    args = made.parse_args()
    if args.render:
        print(markdown(json.loads(args.render.read_text())))
        return None
    return args


def stamp(name: str, device: torch.device | None = None, **more: str) -> dict[str, Any]:
    """The head of a result file. device: what ran it, None = the CPU. more: versions of other packages."""
    device = device or torch.device("cpu")
    return {
        "benchmark": name,
        "command": f"python {shlex.join(['benchmarks/' + Path(sys.argv[0]).name, *asked(sys.argv[1:])])}",
        "date": datetime.date.today().isoformat(),
        "machine": device_name(device),
        "versions": {**versions(device), **more},
    }


def asked(words: Sequence[str]) -> list[str]:
    """What a command line asks to be measured: not where its result goes, nor whether one was begun before."""
    asked, words = [], iter(words)
    for word in words:
        if word in ("--json", "--trace"):
            next(words, None)
        elif word != "--resume" and not word.startswith("--json="):
            asked.append(word)
    return asked


def caption(result: dict[str, Any]) -> str:
    """The run in one line, without a full stop."""
    named = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['date']}, {result['machine']}; {named}"


def save(result: dict[str, Any], path: Path | None) -> None:
    """Write the result file, where one is asked for; a process that is killed here leaves the one before."""
    if path:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def finish(result: dict[str, Any], markdown: Callable[[dict[str, Any]], str], path: Path | None) -> None:
    """Show the table, and write the result file where one is asked for."""
    print(markdown(result))
    save(result, path)
