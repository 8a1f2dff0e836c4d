"""A result file as pictures: a figure for each sheet, rows down, share of the ceiling across, a mark for each entry."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError
from .entries import OWN
from .pages import caption

__all__ = ["digest", "draw", "library"]

_MARKS = "osv^D<>PX*hd"
_LINE = 0.27
"""Inches of a row."""


def library() -> Any:
    """matplotlib, with what figures need of it. No window system is asked for.

    Raises:
        BackendUnavailableError: it is not installed.
    """
    try:
        for part in ("figure", "backends.backend_agg", "backends.backend_svg"):
            importlib.import_module(f"matplotlib.{part}")
    except ModuleNotFoundError as exc:
        raise BackendUnavailableError("plots need matplotlib: pip install 'polyattn[plots]'") from exc
    return importlib.import_module("matplotlib")


def digest(result: Mapping[str, Any]) -> str:
    """Return the digest of what is drawn; an SVG has it as its identifier."""
    drawn = {name: result[name] for name in ("rows", "titles", "versions", "device")}
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:16]


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `SHEET.png` and `SHEET.svg` for each sheet with a row that has times.

    Args:
        result: as a result file has it.

    Returns:
        The files.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    matplotlib = library()
    folder.mkdir(parents=True, exist_ok=True)
    styles = _styles(result["rows"])
    written = []
    for sheet in dict.fromkeys(row["sheet"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["sheet"] == sheet and _timed(row)]
        if not rows:
            continue
        figure = matplotlib.figure.Figure(
            figsize=(11, 1.6 + _LINE * (len(rows) + len({row["family"] for row in rows})))
        )
        _sheet(figure, rows, styles)
        figure.suptitle(result["titles"].get(sheet, sheet), x=0.01, ha="left", weight="bold")
        figure.text(0.01, -0.01, caption(result), fontsize=6, color="0.4", va="top")
        for suffix in ("png", "svg"):
            path = folder / f"{sheet}.{suffix}"
            # Without a date and without random ids: the same result gives the same bytes.
            about = {"Date": None, "Identifier": digest(result)}
            more = {"metadata": about} if suffix == "svg" else {"dpi": 150}
            with matplotlib.rc_context({"svg.hashsalt": sheet}):
                figure.savefig(path, bbox_inches="tight", **more)
            written.append(path)
    return written


def _timed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in row["entries"].items() if "us" in entry}


def _styles(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str, bool]]:
    """Entry -> (colour, mark, filled): the same in every figure; polyattn's candidates are filled."""
    names = sorted({name for row in rows for name in _timed(row)}, key=lambda name: (not name.startswith(OWN), name))
    return {
        name: (f"C{place % 10}", _MARKS[place % len(_MARKS)], name.startswith(OWN)) for place, name in enumerate(names)
    }


def _sheet(figure: Any, rows: Sequence[Mapping[str, Any]], styles: Mapping[str, tuple[str, str, bool]]) -> None:
    axes = figure.add_subplot()
    labels: list[tuple[float, str]] = []
    heads: list[tuple[float, str]] = []
    place, family = 0.0, None
    for row in rows:
        if row["family"] != family:
            family, place = row["family"], place + 1
            heads.append((place - 0.5, row["model"] or row["family"]))
        labels.append((place, row["name"] + ("" if row["accepted"] else " (rejected)")))
        entries = _timed(row)
        axes.axhline(place, color="0.92", linewidth=1, zorder=0)
        for name, entry in entries.items():
            colour, mark, filled = styles[name]
            face = colour if filled else "none"
            axes.plot([entry["percent"]], [place], mark, color=colour, markerfacecolor=face, alpha=0.85, label=name)
        chosen = entries.get(row["choice"].get("tuned", ""))
        if chosen:
            axes.plot(
                [chosen["percent"]], [place], "o", color="black", markerfacecolor="none", markersize=12,
                label="polyattn's choice",
            )  # fmt: skip
        place += 1
    axes.set_yticks([at for at, _ in labels], [text for _, text in labels], fontsize=7)
    for at, text in heads:
        axes.text(0.0, at - 0.1, text, fontsize=7, weight="bold", transform=axes.get_yaxis_transform(), va="center")
    axes.set_ylim(place, -0.2)
    axes.set_xlim(left=0)
    axes.set_xlabel("% of what the device did in the same run: matrix product, or streaming read where that bounds it")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
