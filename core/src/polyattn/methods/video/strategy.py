"""Mask strategies of sliding tile attention: a window for each step, layer and head, as files have them.

A file is one JSON object, `{"step_layer_head": [wt, wh, ww]}`, windows in tiles. A name that ends in .gz is compressed.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import re
from typing import Any

from ...errors import ConfigError
from .grids import Triple

__all__ = ["Strategy", "read_strategy"]

_KEY = re.compile(r"(0|[1-9]\d{0,8})_(0|[1-9]\d{0,8})_(0|[1-9]\d{0,8})")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The windows of a file.

    Attributes:
        path: of the file. steps, layers, heads: what it is for. windows: by (step, layer), one for each head.
    """

    path: str
    steps: int
    layers: int
    heads: int
    windows: dict[tuple[int, int], tuple[Triple, ...]]


def read_strategy(path: str) -> Strategy:
    """Read a file, once while it does not change.

    Raises:
        ConfigError: it cannot be read, is no such file, or leaves out a step, layer or head.
    """
    try:
        found = os.stat(path)
        return _read(path, found.st_mtime_ns, found.st_size)
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise ConfigError(f"mask_strategy_file_path={path!r} cannot be read: {exc}; give a JSON file") from exc


@functools.lru_cache(maxsize=8)
def _read(path: str, changed: int, size: int) -> Strategy:
    opened: Any = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        held = json.load(file)
    if not isinstance(held, dict) or not held:
        what = "nothing" if held == {} else f"a {type(held).__name__}"
        raise ConfigError(
            f'{path} holds {what}; a mask strategy is a JSON object of "step_layer_head": [wt, wh, ww] in tiles'
        )
    windows: dict[tuple[int, int, int], Triple] = {}
    for name, window in held.items():
        key = _KEY.fullmatch(name)
        if key is None:
            raise ConfigError(f'{path}: the key {name!r} is not "step_layer_head", three numbers such as "12_0_3"')
        sizes = isinstance(window, list) and len(window) == 3
        if not sizes or any(type(n) is not int or n < 1 for n in window):
            raise ConfigError(f"{path}: {name!r} has the window {window!r}; [wt, wh, ww] in tiles, each 1 or more")
        step, layer, head = map(int, key.groups())
        windows[step, layer, head] = (window[0], window[1], window[2])
    steps, layers, heads = (1 + max(key[axis] for key in windows) for axis in range(3))
    if len(windows) != steps * layers * heads:
        first = next(
            f"{t}_{layer}_{h}"
            for t in range(steps)
            for layer in range(layers)
            for h in range(heads)
            if (t, layer, h) not in windows
        )
        raise ConfigError(
            f"{path}: its keys reach to {steps} steps, {layers} layers and {heads} heads, and {first!r} is missing; a "
            "mask strategy has a window for each of them"
        )
    by_layer = {
        (t, layer): tuple(windows[t, layer, h] for h in range(heads)) for t in range(steps) for layer in range(layers)
    }
    return Strategy(path, steps, layers, heads, by_layer)
