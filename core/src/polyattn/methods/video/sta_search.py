"""Search for windows of sliding tile attention: what each loses against dense attention, and the best of them.

A run of `STA_searching` leaves a file of losses for each branch of guidance once it has seen all steps and layers:
`{"L2_loss": {"3,1,10": [step][layer][head]}, "L1_loss": ..., ...}`, means over samples, tokens and channels of a head.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import Place
from ...errors import ConfigError, InvalidInputError
from .grids import Triple

__all__ = ["Point", "losses", "note", "point", "tuned"]

NAME = "sliding_tile_attn"
KINDS = ("L2_loss", "L1_loss")
NEGATIVE = "uncond"
"""The branch of negative prompts."""


class Point(NamedTuple):
    """`Point` says which of all layers and steps of a run a call is."""

    run: Any
    step: int
    steps: int
    layer: int
    layers: int


def point(place: Place) -> Point:
    """Find where in its run a call of a search is.

    Raises:
        InvalidInputError: the place is in no run, or does not say which steps and layers there are.
    """
    step, steps, layer, layers = place.step, place.steps, place.layer_number, place.layers
    if place.run is None or step is None or steps is None or layer is None or layers is None:
        raise InvalidInputError(
            f"{NAME}: a search needs to know its run, and all steps and layers of that: with Run(steps=..., "
            "layers=...) as run, run.at(step=...), and place(layer=...) in each layer"
        )
    return Point(place.run, step, steps, layer, layers)


def losses(out: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Compare with dense attention, [B, H, S, D] both: the mean squared and the mean absolute difference, [H]."""
    wide = torch.float64 if full.dtype == torch.float64 else torch.float32
    apart = out.to(wide) - full
    return apart.square().mean((0, 2, 3)), apart.abs().mean((0, 2, 3))


def note(
    at: Point, branch: str, folder: str, about: Mapping[str, Any], found: Mapping[Triple, tuple[Tensor, Tensor]]
) -> None:
    """Note the losses of a step and layer in the run; the last one of a branch writes its file.

    Args:
        folder: of the files. about: what else a file says: tile, full. found: losses by window.

    Raises:
        ConfigError: the file cannot be written.
    """
    held = at.run.kept(NAME, branch)
    held[at.step, at.layer] = found
    if len(held) < at.steps * at.layers:
        return
    tables: dict[str, Any] = {}
    for kind, name in enumerate(KINDS):
        tables[name] = {
            ",".join(map(str, window)): [
                [held[t, layer][window][kind].tolist() for layer in range(at.layers)] for t in range(at.steps)
            ]
            for window in found
        }
    held.clear()
    heads = len(next(iter(found.values()))[0])
    sizes = {"branch": branch, "steps": at.steps, "layers": at.layers, "heads": heads}
    _add(Path(folder), branch, json.dumps({**sizes, **about, **tables}))


def _add(folder: Path, branch: str, text: str) -> None:
    """Write a file beside those that are there, under a name of its own."""
    for number in itertools.count():
        try:
            with open(folder / f"losses_{branch or 'all'}_{number}.json", "x", encoding="utf-8") as file:
                file.write(text)
                return
        except FileExistsError:
            continue
        except OSError as exc:
            raise ConfigError(
                f"{NAME}: the losses of a search cannot be written to {folder}: {exc}; give "
                "sta_search_path a folder that can be written to"
            ) from exc


def tuned(folder: str, skip: int, tile: Triple, *, both: bool) -> str:
    """Choose the window of least mean squared loss for each step, layer and head, the mean over all files of a folder.

    Args:
        folder: with files of losses. skip: how many of the first steps see everything. tile: the losses must be of it.
        both: with losses of negative prompts, as many as there are; else without.

    Returns:
        The path of the strategy that it writes there, `mask_strategy_s{skip}.json`.

    Raises:
        ConfigError: there are no losses, some cannot be read, or they are of different models or searches.
    """
    found = [(path, _read(path)) for path in sorted(Path(folder).glob("losses_*.json"))]
    kept = [one for one in found if both or one[1]["branch"] != NEGATIVE]
    lacking = not kept or (both and len({one["branch"] == NEGATIVE for _, one in kept}) < 2)
    if lacking:
        what = "of cond and of uncond" if both else "of positive prompts"
        raise ConfigError(
            f"{NAME}: {folder} has no losses {what} (losses_*.json); search with sta_mode='STA_searching' and "
            "sta_search_path as this folder first"
        )
    (first, model), *others = kept
    same = ("steps", "layers", "heads", "tile", "full")
    for path, other in others:
        if any(other[name] != model[name] for name in same) or other["L2_loss"].keys() != model["L2_loss"].keys():
            raise ConfigError(f"{NAME}: {first} and {path} are of different models or searches; keep those of one")
    if tuple(model["tile"]) != tile:
        raise ConfigError(f"{NAME}: {first} is of tiles of {model['tile']} tokens, and sta_tile is {list(tile)}")
    windows = list(model["L2_loss"])
    strategy = {}
    for t, layer, h in itertools.product(*(range(model[name]) for name in same[:3])):
        lost = {window: sum(one["L2_loss"][window][t][layer][h] for _, one in kept) for window in windows}
        best = [int(n) for n in min(lost, key=lambda window: lost[window]).split(",")]
        strategy[f"{t}_{layer}_{h}"] = model["full"] if t < skip else best
    text, path = json.dumps(strategy), Path(folder, f"mask_strategy_s{skip}.json")
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)  # whoever reads it meanwhile has the one before
    return str(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        sizes: Sequence[int] = [held[name] for name in ("steps", "layers", "heads")]
        whole = all(
            [len(table), *{len(of_step) for of_step in table}, *{len(one) for of_step in table for one in of_step}]
            == sizes
            for table in held["L2_loss"].values()
        )
        numbers = [loss for table in held["L2_loss"].values() for of_step in table for one in of_step for loss in one]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a loss of it is no number")
        if not whole or not held["L2_loss"] or len(held["tile"]) != 3 or len(held["full"]) != 3 or "branch" not in held:
            raise ValueError("a table of it is not steps x layers x heads")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{NAME}: {path} holds no losses of a search ({exc!r}); remove it, or search again") from exc
    return dict(held)
