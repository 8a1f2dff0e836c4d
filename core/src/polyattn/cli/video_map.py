"""`polyattn video-map` draws which keys a sparse video method lets a query see, on a small grid."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BackendUnavailableError, ConfigError
from ..methods.video.records import PORTABLE
from .options import Json
from .questions import VIDEO
from .rendering import answer, show_json
from .request_flags import one_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..video import RunReport

__all__ = ["METHODS", "video_map"]

METHODS = (*PORTABLE, "window_video_attn")
MOST = 4096
"""Tokens of the largest grid: a weight is computed for each pair of them."""
_WIDTH = 32
"""Numbers of a query and a key."""
_ACROSS, _SHADES = 64, " ░▒▓█"
_CELL, _GAP = 8, 6
"""Pixels of a token, and between frames."""
_INK = {"none": (232, 232, 232), "seen": (38, 110, 170), "query": (240, 120, 20), "paper": (255, 255, 255)}


def video_map(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help=f"One of {', '.join(METHODS)}; or {', '.join(VIDEO)}.")
    ],
    grid: Annotated[
        str, typer.Option(metavar="T,H,W", help=f"Tokens along time, height and width, {MOST:,} in all at most.")
    ] = "8,12,16",
    text: Annotated[str, typer.Option(metavar="FRONT,BACK", help="Tokens of text before and after the grid.")] = "0,0",
    layer: Annotated[int, typer.Option(min=0, metavar="N", help="The number of the layer.")] = 0,
    layers: Annotated[int | None, typer.Option(min=1, metavar="N", help="How many layers there are.")] = None,
    step: Annotated[int, typer.Option(min=0, metavar="N", help="The number of the denoising step.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="How many steps there are.")] = None,
    query: Annotated[
        str | None,
        typer.Option(metavar="T,H,W", help="The query whose keys are drawn over the frames. Without it: the middle."),
    ] = None,
    head: Annotated[
        int, typer.Option(min=0, metavar="N", help="The head; there is one, or as many as a strategy file has.")
    ] = 0,
    options: Annotated[
        str,
        typer.Option(metavar="JSON", help="Options of the method; the others are such that a small grid shows a map."),
    ] = "{}",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, metavar="N", help="The seed of the inputs.")] = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it: .png, which needs Pillow (the extra plots), or .txt.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw the map of a sparse video method: the keys that one query sees, frame by frame, and those of all queries.

    The method runs on this machine's CPU, on inputs in which neighbours are alike, and every weight that it gives is
    looked at. A coarse or a linear branch is left out: the map is of what is attended to exactly.
    """
    method = VIDEO.get(method, method)
    one_of("METHOD", method, METHODS)
    sizes = _numbers("--grid", grid, 3, least=1)
    front, back = _numbers("--text", text, 2)
    T, H, W = sizes
    cell = _numbers("--query", query, 3) if query is not None else (T // 2, H // 2, W // 2)
    if any(n >= size for n, size in zip(cell, sizes, strict=True)):
        raise ConfigError(f"--query {query} is outside of --grid {grid}; its numbers count from 0")
    total = T * H * W + front + back
    if total > MOST:
        raise ConfigError(
            f"--grid {grid} and --text {text} are {total:,} tokens, of {MOST:,} at most: give a small grid"
        )
    if output is not None and output.suffix not in (".png", ".txt"):
        raise ConfigError(f"--output {output}: give a file that ends in .png or .txt")
    pillow = _pillow() if output is not None and output.suffix == ".png" else None
    given = _options(options)
    place = {"grid": sizes, "text": (front, back), "layer": layer, "layers": layers, "step": step, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        seen, told = _seen(method, given, place, head, seed, Path(folder))
    number = (cell[0] * H + cell[1]) * W + cell[2] + front
    frames = seen[number, front : front + T * H * W].view(sizes)
    density = float(seen.double().mean())
    count, told_text = int(seen[number].sum()), str(told)
    said = f"{method}, head {head}: the query at {cell} sees {count:,} of {total:,} keys; {density:.1%} of all pairs"
    written = "\n".join([said, "", *_in_words(frames, cell), "", *_all_in_words(seen), "", told_text])
    try:
        if pillow is not None:
            _picture(pillow, frames, cell, seen).save(output, optimize=True)
        elif output is not None:
            output.write_text(written + "\n", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--output {output}: cannot be written ({exc}); name another file") from exc
    if as_json:
        rows = ["".join("x" if one else "." for one in row) for frame in frames.tolist() for row in frame]
        by_frame = [rows[n : n + H] for n in range(0, T * H, H)]
        facts = {
            "method": method,
            **place,
            "query": cell,
            "head": head,
            "density": density,
            "keys": int(seen[number].sum()),
        }
        show_json(
            {**facts, "frames": by_frame, "run": told.to_dict(), "output": None if output is None else str(output)}
        )
    else:
        answer(written)


def _numbers(flag: str, words: str, count: int, least: int = 0) -> tuple[int, ...]:
    """Read whole numbers.

    Raises:
        ConfigError: others, or another number of them.
    """
    found = words.split(",")
    if len(found) != count or not all(re.fullmatch(r"\s*\d{1,6}\s*", one) and int(one) >= least for one in found):
        raise ConfigError(f"{flag} {words!r} is not {count} whole numbers of {least} or more, with commas between them")
    return tuple(map(int, found))


def _options(words: str) -> dict[str, Any]:
    try:
        found = json.loads(words)
    except json.JSONDecodeError as exc:
        raise ConfigError(
            f"--options {words!r} is no JSON ({exc}); give an object such as '{{\"sparsity\": 0.9}}'"
        ) from exc
    if not isinstance(found, dict):
        raise ConfigError(f"--options {words!r} is no JSON object; give one such as '{{\"sparsity\": 0.9}}'")
    return found


def _usual(method: str, place: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Options with which a small grid shows a map, and no step or layer is dense."""
    T, H, W = place["grid"]
    t, h, w = (max(n for n in range(1, max(1, size // 3) + 1) if size % n == 0) for size in (T, H, W))
    tile = [max(1, size // 4) for size in (T, H, W)]
    if method == "sliding_tile_attn":
        path, counts = folder / "strategy.json", [-(-size // part) for size, part in zip((T, H, W), tile, strict=True)]
        window = [min(size, count) for size, count in zip((1, 3, 3), counts, strict=True)]
        keys = itertools.product(
            range(place["steps"] or place["step"] + 1), range(place["layers"] or place["layer"] + 1)
        )
        path.write_text(json.dumps({f"{a}_{b}_0": window for a, b in keys}))
        return {"mask_strategy_file_path": str(path), "skip_time_steps": 0, "sta_tile": tile}
    usual: dict[str, dict[str, Any]] = {
        "video_sparse_attn": {"sparsity": 0.8, "coarse": "off"},
        "sla_attn": {"topk_ratio": 0.2, "BLKQ": 64},
        "sage_sla_attn": {"topk_ratio": 0.2, "BLKQ": 64},
        "vmoba_attn": {
            "temporal_chunk_size": t,
            "temporal_topk": 2,
            "spatial_chunk_size": [h, w],
            "spatial_topk": 3,
            "st_chunk_size": [t, h, w],
            "st_topk": 8,
            "moba_select_mode": "topk",
            "first_full_step": 0,
        },
        "sparse_video_gen_2_attn": {
            "svg2_num_q_centroids": 12,
            "svg2_num_k_centroids": 24,
            "svg2_top_p_kmeans": 0.8,
            "svg2_first_layers_fp": 0.0,
            "svg2_first_times_fp": 0.0,
        },
        "window_video_attn": {"window_tile": tile},
    }
    return usual[method]


def _seen(
    method: str, given: dict[str, Any], place: dict[str, Any], head: int, seed: int, folder: Path
) -> tuple[Tensor, RunReport]:
    """Which keys each query sees: bool [S, S], and what the run says of the call."""
    import torch

    import polyattn

    from ..methods.video.strategy import read_strategy
    from ..selection.overrides import current_settings
    from ..video import Run

    before = dict(current_settings().attention_backend_config)
    used = {**_usual(method, place, folder), **before.get(method, {}), **given}
    heads = 1
    if method == "sliding_tile_attn":
        heads = read_strategy(str(used["mask_strategy_file_path"])).heads
    if head >= heads:
        raise ConfigError(f"--head {head}: there are {heads} heads, numbers from 0")
    q, k = _alike(place, heads, seed)
    S = q.shape[1]
    # With these values the result is the weights themselves.
    value = torch.eye(S, dtype=q.dtype)[None, :, None].expand(1, S, heads, S)
    polyattn.configure(attention_backend_config={**before, method: used})
    with Run(steps=place["steps"], layers=place["layers"]) as run, torch.no_grad():
        point = {name: place[name] for name in ("grid", "text", "step")}
        with run.at(**point):
            tensors = {"proj_l.weight": torch.zeros(S, S)}
            here = polyattn.video.place(layer=place["layer"], tensors=tensors)
            weights = polyattn.attention(q, k, value.contiguous(), backend=method, place=here)
        told = run.explain()
    return weights[0, :, head] > 0, told


def _alike(place: dict[str, Any], heads: int, seed: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [1, S, heads, D]: slow waves over the grid with some noise, and noise for text."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    axes = [torch.linspace(0, 1, size) for size in place["grid"]]
    cells = torch.cartesian_prod(*axes)
    waves = 4 * torch.randn(3, heads * _WIDTH, generator=draw)
    field = (cells @ waves + 6.3 * torch.rand(heads * _WIDTH, generator=draw)).cos()
    field = torch.nn.functional.pad(field, (0, 0, *place["text"])).view(-1, heads, _WIDTH)
    made = [2 * field + 0.3 * torch.randn(field.shape, generator=draw) for _ in range(2)]
    return made[0][None], made[1][None]


def _in_words(frames: Tensor, cell: tuple[int, ...]) -> list[str]:
    """The frames beside one another, as many as a screen is wide."""
    T, H, W = frames.shape
    rows = [["".join("█" if one else "·" for one in row) for row in frame] for frame in frames.tolist()]
    line = rows[cell[0]][cell[1]]
    rows[cell[0]][cell[1]] = f"{line[: cell[2]]}Q{line[cell[2] + 1 :]}"
    across = max(1, 100 // (W + 2))
    lines = []
    for first in range(0, T, across):
        some = range(first, min(first + across, T))
        lines += ["  ".join(f"t={t}".ljust(W) for t in some).rstrip()]
        lines += ["  ".join(rows[t][h] for t in some) for h in range(H)]
    return lines


def _all_in_words(seen: Tensor) -> list[str]:
    """All pairs, queries down and keys across, in shades."""
    import torch

    size = min(_ACROSS, len(seen))
    shares = torch.nn.functional.adaptive_avg_pool2d(seen.float()[None], (max(1, size // 2), size))[0]
    shades = (shares * (len(_SHADES) - 1)).ceil().long().tolist()
    return ["all queries (down) and keys (across):", *("".join(_SHADES[one] for one in row) for row in shades)]


def _pillow() -> Any:
    """
    Raises:
        BackendUnavailableError: it is not installed.
    """
    try:
        return importlib.import_module("PIL.Image")
    except ModuleNotFoundError as exc:
        raise BackendUnavailableError(
            "a picture needs Pillow: pip install 'polyattn[plots]', or --output map.txt"
        ) from exc


def _picture(pillow: Any, frames: Tensor, cell: tuple[int, ...], seen: Tensor) -> Any:
    """The frames, four beside one another, and the map of all pairs to their right."""
    T, H, W = frames.shape
    across = min(4, T)
    down = -(-T // across)
    width, height = (n * (size * _CELL + _GAP) - _GAP for n, size in ((across, W), (down, H)))
    side = max(height, 256)
    image = pillow.new("RGB", (width + 4 * _GAP + side, side), _INK["paper"])
    for t, frame in enumerate(frames.tolist()):
        small = pillow.new("RGB", (W, H))
        small.putdata([_INK["seen" if one else "none"] for row in frame for one in row])
        if t == cell[0]:
            small.putpixel((cell[2], cell[1]), _INK["query"])
        where = ((t % across) * (W * _CELL + _GAP), (t // across) * (H * _CELL + _GAP))
        image.paste(small.resize((W * _CELL, H * _CELL), pillow.Resampling.NEAREST), where)
    whole = pillow.new("RGB", tuple(reversed(seen.shape)))
    whole.putdata([_INK["seen" if one else "none"] for row in seen.tolist() for one in row])
    image.paste(whole.resize((side, side), pillow.Resampling.BOX), (width + 4 * _GAP, 0))
    return image
