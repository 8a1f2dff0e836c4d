"""This module runs the steps of the demo in order, shows each, and says at the end what passed."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from ... import __version__
from ...selection.inspection import list_backends
from ..listing import platforms_here
from ..rendering import facts, grid, panel, progress, screen, show_json, standing, title
from .step import Step

__all__ = ["run"]


def run(*, as_json: bool = False) -> bool:
    """Run the demo and print it. True when nothing failed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are in a package: nothing is looked up or downloaded
    console = screen()
    begin = time.perf_counter()
    with progress(console, quiet=as_json) as bar:
        bar.add_task("starting PyTorch", total=None)
        import torch

        from . import agreement, cost, sentences, workloads
    torch.manual_seed(0)
    if not as_json:
        console.print(_opening(torch.__version__))
    done: list[Step] = []
    # What the demo shows in tables (the reference serving, a fallback taken) need not be warned about as well.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in (workloads, sentences, agreement, cost):
            with progress(console, quiet=as_json) as bar:
                step = _contained(module, bar)
            done.append(step)
            if not as_json:
                _show(console, len(done), step)
    seconds = time.perf_counter() - begin
    good = all(step.verdict != "fail" for step in done)
    if as_json:
        show_json(
            {
                "polyattn": __version__,
                "torch": torch.__version__,
                "steps": [step.to_dict() for step in done],
                "verdict": "pass" if good else "fail",
                "seconds": round(seconds, 1),
            }
        )
    else:
        console.print()
        console.print(_verdict(done, good, seconds))
    return good


def _contained(module: Any, bar: Progress) -> Step:
    """Run a step. An exception is a failed step with its traceback, and the other steps still run."""
    try:
        step: Step = module.run(bar)
    except Exception as error:  # noqa: BLE001 - whatever a backend or a host raises is this step's verdict
        trace = traceback.format_exc()
        figure = f"{type(error).__name__}: {error}"
        return Step(module.TITLE, "", "fail", figure, (Text(trace, style="quiet"),), {"traceback": trace})
    return step


def _opening(torch_version: str) -> Any:
    backends = list_backends()
    here = platforms_here()
    usable = [b.name for b in backends if b.status == "available"]
    planned = sum(1 for b in backends if b.status == "planned")
    platforms = {b.platform for b in backends}
    pairs: list[tuple[str, Any]] = [
        ("this machine", f"{', '.join(here)}; torch {torch_version}"),
        ("can be used here", Text(", ".join(usable), style="good")),
        ("known in all", f"{len(backends)} backends on {len(platforms)} platforms, {planned} planned"),
    ]
    return panel(Text.assemble("polyattn ", (__version__, "name")), facts(pairs))


def _show(console: Console, number: int, step: Step) -> None:
    console.print()
    console.print(title(f"{number}. {step.title}", step.note))
    for part in step.parts:
        console.print()
        console.print(part)


def _verdict(done: list[Step], good: bool, seconds: float) -> Any:
    table = grid("!step", "!verdict", "figure")
    for step in done:
        table.add_row(step.title, standing(step.verdict), step.figure)
    end = Text(f"{'Nothing failed' if good else 'Something failed'}, {seconds:.0f} s.", style="good" if good else "bad")
    return panel("Verdict", table, Text(), end, style="green" if good else "red")
