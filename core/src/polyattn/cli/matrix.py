"""`polyattn matrix` shows every backend on every platform, with its evidence and its limits, as text, markdown or
JSON."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..contract import BackendInfo, Provider
from ..errors import ConfigError, did_you_mean
from ..registry.defects import Listed, listed
from ..registry.manager import get_manager
from ..selection.inspection import support_matrix
from .probes import Limits, Sheet, limits
from .rendering import STANDINGS, answer, grid, progress, screen, show_json, standing, title

__all__ = ["matrix"]

FORMATS = ("text", "markdown", "json")
NOTHING = "-"
MARKS = {"available": "●", "planned": "○"}
NAME_WIDTH = 18
SHORT = {"vendor code": "vendor", "interpreter": "interp."}
LEGEND = (
    ("available", "its adapter is part of this version: it runs where its device and its packages are"),
    ("planned", "its limits are declared, its adapter is not built: it is never selected"),
)
LEVELS = (
    ("hardware", "conformance passed on that device, on that date"),
    ("interpreter", "conformance passed under Triton's interpreter, on a CPU"),
    ("vendor code", "the vendor's own code was run off the device"),
    ("emulator", "checked against an emulator of the documented operation"),
    ("compiled", "compiled for the chip by Triton's own back end, and run by its interpreter alone"),
    ("declared", "read from documentation and source; nothing was run"),
    ("in part", "some of its providers were not run; `polyattn explain` has the evidence of the one that it takes"),
    ("up to", "the longest calls that passed had so many keys"),
    (
        "stale",
        "the sources, or what they declare, have changed since, or no call was longer than a kernel reads at once",
    ),
)
CELLS = (
    ("native", "the kernel does it"),
    ("lowered", "an exact rewrite of that name does it"),
    ("no", "refused, with a reason"),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell is a backend on one platform, whatever this machine is."""

    adapter: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.adapter} · {self.evidence}"


@dataclasses.dataclass(frozen=True)
class Support:
    """The matrix as data. `backends`: `polyattn.support_matrix()`; `cells`: backend name -> platform -> cell."""

    platforms: tuple[str, ...]
    backends: list[dict[str, Any]]
    cells: dict[str, dict[str, Cell]]
    sheets: tuple[Sheet, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "platforms": list(self.platforms),
            "cells": {
                name: {platform: dataclasses.asdict(cell) for platform, cell in row.items()}
                for name, row in self.cells.items()
            },
            "limits": {sheet.key: sheet.to_dict() for sheet in self.sheets},
            "defects": [one.to_dict() for one in _listed()],
            "backends": self.backends,
        }


def gather() -> Support:
    """Ask every backend. Takes some seconds."""
    manager = get_manager()
    backends = support_matrix()
    found: dict[str, dict[str, Cell]] = defaultdict(dict)
    for row in backends:
        info = manager.backends[row["name"], row["platform"]]
        row["adapter"] = "planned" if info.planned else "available"
        found[info.name][info.platform] = Cell(row["adapter"], row["evidence"])
    order = sorted(found, key=lambda name: (all(c.adapter == "planned" for c in found[name].values()), name))
    platforms = tuple(p for p in manager.platforms if any(p in row for row in found.values()))
    return Support(platforms, backends, {name: found[name] for name in order}, limits())


def matrix(
    layout: Annotated[
        str, typer.Option("--format", metavar="WORD", help="The form of the answer: text, markdown or json.")
    ] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: short for --format json.")] = False,
) -> None:
    """Show which backend exists on which platform, how far it was shown to work, and what its kernels can do.

    The answer is the same on every machine; `polyattn list` says what can be used on this one.
    """
    if layout not in FORMATS:
        raise ConfigError(
            f"--format {layout!r} is not known.{did_you_mean(layout, FORMATS)} Allowed: {', '.join(FORMATS)}"
        )
    layout = "json" if as_json else layout
    console = screen()
    with progress(console, quiet=layout != "text") as bar:
        bar.add_task("asking every backend", total=None)
        support = gather()
    if layout == "json":
        show_json(support.to_dict())
    elif layout == "markdown":
        answer(markdown(support))
    else:
        _print(console, support)


def _print(console: Console, support: Support) -> None:
    console.print(title("Backends and platforms"))
    console.print()
    table = grid("!backend", *support.platforms, tight=True)
    for name, row in support.cells.items():
        table.add_row(Text(name, style="name"), *(_mark(row.get(p)) for p in support.platforms))
    console.print(table)
    console.print()
    for where, text in _details(support):
        console.print(Text.assemble((f"{where}  ", "name"), text))
    _legend(console, [(f"{MARKS[word]} {word}", meaning) for word, meaning in LEGEND])
    _legend(console, [(SHORT.get(word, word), meaning) for word, meaning in LEVELS])
    for sheet in support.sheets:
        console.print()
        console.print(title(sheet.title, "what the kernels do, planned ones as declared"))
        console.print()
        limits_table = grid("!backend", *sheet.columns, tight=True)
        for line in sheet.rows:
            limits_table.add_row(
                _who(line, support), *(standing(_short(cell), muted=line.planned) for cell in line.cells)
            )
        console.print(limits_table)
    console.print()
    _legend(console, CELLS)


def _mark(cell: Cell | None) -> Text:
    if cell is None:
        return standing(NOTHING)
    level = cell.evidence.partition(" (")[0]
    mark = Text(f"{MARKS[cell.adapter]} ", style=STANDINGS[cell.adapter])
    return mark.append_text(standing(SHORT.get(level, level) + (" stale" if cell.evidence.endswith("stale") else "")))


def _details(support: Support) -> Iterable[tuple[str, str]]:
    """Yield evidence that says more than its level."""
    for name, row in support.cells.items():
        for platform, cell in row.items():
            if "(" in cell.evidence:
                yield f"{name}@{platform}", cell.evidence


def _who(line: Limits, support: Support) -> Text:
    """Name the backend, and its platforms where they are not all of them."""
    adapter = "planned" if line.planned else "available"
    who = Text.assemble((f"{MARKS[adapter]} ", STANDINGS[adapter]), (line.name, "name"))
    if set(line.platforms) != set(support.cells[line.name]):
        where = ", ".join(line.platforms)
        if len(who) + 1 + len(where) <= NAME_WIDTH:
            return who.append(f" {where}", style="quiet")
        # Broken here: rich would rather break the name.
        for part in textwrap.wrap(where, NAME_WIDTH - 2):
            who.append(f"\n  {part}", style="quiet")
    return who


def _short(cell: str) -> str:
    """Leave out the names of rewrites, for a terminal; `--format markdown` has them."""
    return re.sub(r"lowered: [^;(]*[^;( ]", "lowered", cell)


def _legend(console: Console, words: Iterable[tuple[str, str]]) -> None:
    for word, meaning in words:
        console.print(Text.assemble(standing(f"{word:<13}"), (meaning, "quiet")))


def markdown(support: Support) -> str:
    """Return docs/support-matrix.md, without a final newline."""
    lines = [
        "# Support matrix",
        "",
        "Generated by `polyattn matrix --format markdown` with every plugin of the repository installed; do not edit.",
        "It says the same on every machine: what can be used on one of them is what `polyattn list` prints there.",
        "",
        "## Backends and platforms",
        "",
        *_rows(
            ("backend", *support.platforms),
            (
                (f"`{name}`", *(str(row[p]) if p in row else NOTHING for p in support.platforms))
                for name, row in support.cells.items()
            ),
        ),
        "",
        *_bullets(LEGEND),
        "",
        "After the dot, the evidence:",
        "",
        *_bullets(LEVELS),
        "",
        "## Limits",
        "",
        "Found by asking the capability rows that decide about every call: one plain request, then the same with one",
        "feature more.",
        "",
        *_bullets(CELLS),
        "",
        "In brackets: the architectures, phases or page sizes a cell is limited to. Of several providers the best one",
        "speaks. Planned backends are judged as declared. Drafts (topk) are asked for as a server does, in the phase",
        "that verifies and in the one whose backend verifies, which brackets name where it is one of two.",
    ]
    for sheet in support.sheets:
        lines += ["", f"### {sheet.title}", ""]
        body = ((_cell_name(line), ", ".join(line.platforms), *line.cells) for line in sheet.rows)
        lines += _rows(("backend", "platforms", *sheet.columns), body)
    lines += [
        "",
        "## What each needs",
        "",
        "One provider is enough. What PyTorch and polyattn bring themselves is left out.",
        "",
    ]
    lines += _rows(("backend", "platforms", "summary", "provider: needs", "note"), _needs())
    lines += [
        "",
        "## Known defects of libraries",
        "",
        "Selection obeys them for the versions that are installed. `polyattn explain` says which of them a call meets,",
        "`polyattn doctor` lists those of this machine.",
        "",
    ]
    lines += _rows(("library", "what it does", "here", "backends", "source"), _defects())
    return "\n".join(lines)


def _listed() -> list[Listed]:
    infos = get_manager().backends.values()
    return listed((info, provider.defects) for info in infos for provider in info.providers)


def _defects() -> Iterable[tuple[str, ...]]:
    for one in _listed():
        yield one.library, one.what, one.done, ", ".join(f"`{name}`" for name in one.backends), one.source


def _rows(header: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    head = list(header)
    rule = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *body)]


def _bullets(words: Iterable[tuple[str, str]]) -> list[str]:
    return [f"- *{word}*: {meaning}" for word, meaning in words]


def _cell_name(line: Limits) -> str:
    return f"`{line.name}`{' (planned)' if line.planned else ''}"


def _needs() -> Iterable[tuple[str, ...]]:
    """Yield a line per backend and what it needs; platforms with one answer share a line."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (name, platform), info in sorted(get_manager().backends.items()):
        groups[_need(name, info)].append(platform)
    for (name, summary, needs, note), platforms in groups.items():
        yield name, ", ".join(platforms), summary, needs, note


def _need(name: str, info: BackendInfo) -> tuple[str, str, str, str]:
    aliases = list(dict.fromkeys(alias.name for alias in info.aliases if alias.name != name))
    shown = f"`{name}`" + (f" ({', '.join(f'`{a}`' for a in aliases)})" if aliases else "")
    providers = "; ".join(text for provider in info.providers if (text := _provider(provider))) or NOTHING
    notes = [info.note, f"approximate: {info.lossy}" if info.lossy else ""]
    return shown, info.summary, providers, "; ".join(filter(None, notes)) or NOTHING


def _provider(provider: Provider) -> str:
    needs = [f"{need.distribution}{need.versions}" for need in provider.requires if need.distribution != "torch"]
    if needs == [provider.name]:
        return provider.name
    return f"{provider.name}: {', '.join(needs)}" if needs else ""
