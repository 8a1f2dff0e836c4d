"""Every command prints with this module: one set of colours, one table style, JSON on request."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from . import WIDTH

__all__ = [
    "STANDINGS",
    "answer",
    "answers_alone",
    "facts",
    "grid",
    "panel",
    "progress",
    "screen",
    "show_json",
    "standing",
    "title",
]

THEME = Theme(
    {
        "name": "bold cyan",
        "good": "green",
        "warn": "yellow",
        "bad": "bold red",
        "later": "blue",
        "quiet": "dim",
        "figure": "bold",
    }
)

STANDINGS = {
    "available": "good",
    "ready": "good",
    "pass": "good",
    "●": "good",
    "○": "later",
    "hardware": "good",
    "vendor": "good",
    "interp": "good",
    "emulator": "good",
    "compiled": "good",
    "native": "good",
    "any": "good",
    "found": "good",
    "unavailable": "warn",
    "lowered": "warn",
    "not run": "warn",
    "not allowed": "warn",
    "stale": "warn",
    "planned": "later",
    "declared": "quiet",
    "no": "quiet",
    "not found": "quiet",
    "-": "quiet",
    "fail": "bad",
    "broken": "bad",
    "duplicate": "bad",
    "incompatible": "bad",
}
"""Words that mean the same on every screen -> their style."""


def screen(*, errors: bool = False) -> Console:
    """Make a console on standard output (or standard error). Each command makes its own: tests and pipes replace the
    streams."""
    made = Console(theme=THEME, stderr=errors, highlight=False)
    if not made.is_terminal and "COLUMNS" not in made._environ:
        made.width = WIDTH
    return made


_answers: TextIO | None = None
"""Standard output, while something else is in its place."""


@contextlib.contextmanager
def answers_alone() -> Iterator[None]:
    """Keep standard output for what `answer` prints while it lasts. What plugins and libraries print, when they are
    imported or later, goes to standard error."""
    global _answers
    before, _answers = _answers, sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _answers = before


def answer(text: str) -> None:
    """Print text on standard output, also while `answers_alone` keeps everything else away from it."""
    print(text, file=_answers or sys.stdout)


def show_json(data: Any) -> None:
    """Print plain data as JSON on standard output."""
    answer(json.dumps(data, indent=2, default=str))


def standing(text: str, *, muted: bool = False) -> Text:
    """Make a cell in the colour of its leading word: `available`, `native (sm90)`, `hardware (...), stale`."""
    key = next((word for word in sorted(STANDINGS, key=len, reverse=True) if text.startswith(word)), "")
    style = "warn" if text.endswith("stale") else STANDINGS.get(key, "")
    return Text(text, style=f"{style} dim".strip() if muted else style)


def grid(*columns: str, ratios: Iterable[int] | None = None, tight: bool = False) -> Table:
    """Make an empty table in the house style.

    Args:
        columns: headers; `!` before one keeps that column on one line.
        ratios: shares of the full width. tight: one space between columns, for wide tables.
    """
    gap = 0 if tight else 1
    made = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    widths = list(ratios or ())
    for place, column in enumerate(columns):
        ratio = widths[place] if widths else None
        made.add_column(column.removeprefix("!"), no_wrap=column.startswith("!"), overflow="fold", ratio=ratio)
    made.expand = bool(widths)
    return made


def facts(pairs: Iterable[tuple[str, RenderableType]]) -> Table:
    """Make a table of labels and values, one per line."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="quiet", no_wrap=True)
    made.add_column(overflow="fold")
    for label, value in pairs:
        made.add_row(label, Text(value) if isinstance(value, str) else value)
    return made


def panel(heading: str | Text, *parts: RenderableType, style: str = "cyan") -> Panel:
    """Make a box with a heading."""
    return Panel(Group(*parts), title=heading, title_align="left", border_style=style, padding=(0, 1))


def title(text: str, note: str = "") -> Text:
    """Make a section heading, with a quiet remark behind it."""
    return Text.assemble((text, "bold"), (f"  {note}" if note else "", "quiet"))


EVERY = 10.0
"""Seconds between two lines of a progress that is shown as lines."""


class _Progress(Progress):
    """A progress bar. Where it is disabled it prints a line on standard error now and then, so that logs show that
    something goes on.

    Attributes:
        lines: whether there are any. said: when the last was printed.
    """

    lines: bool
    said: float

    def update(self, task_id: TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        now = self.get_time()
        if not (self.lines and self.disable) or now - self.said < EVERY:
            return
        self.said = now
        (task,) = (task for task in self.tasks if task.id == task_id)
        count = f"{task.completed:.0f} of {task.total:.0f}: " if task.total else ""
        print(f"polyattn: {count}{task.description}", file=sys.stderr, flush=True)


def progress(
    console: Console, *, quiet: bool, lines: bool = False, clock: Callable[[], float] = time.monotonic
) -> Progress:
    """Make a progress bar that leaves nothing behind; it shows nothing when `quiet` or when the output is no terminal.

    Args:
        lines: of work that takes minutes: where there is no bar, a line on standard error in `EVERY` seconds.
    """
    made = _Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
        get_time=clock,
    )
    made.lines, made.said = lines, clock()
    return made
