"""Searching for windows of `sliding_tile_attn`: losses against masks, the choice by hand, and the file that is read."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import ConfigError, InvalidInputError
from polyattn.methods.video.sta import sta_mask
from polyattn.methods.video.strategy import read_strategy
from polyattn.video import Place, Run, place

from .video_inputs import tensors

NAME = "sliding_tile_attn"
TILE = (2, 2, 4)
STEPS, LAYERS, HEADS = 3, 2, 2
GRID, TEXT = (5, 6, 12), (1, 3)
FULL = (3, 3, 3)
TRIED = ((1, 1, 3), (3, 3, 1), (1, 3, 1))


def configure(folder: Path | str, mode: str, **options: Any) -> None:
    candidates = [n for window in TRIED for n in window]
    options = {"sta_tile": list(TILE), "skip_time_steps": 1, "sta_candidates": candidates, **options}
    path = "mask_strategy_file_path" if mode == "STA_inference" else "sta_search_path"
    given = {path: str(folder), "sta_mode": mode, **options}
    polyattn.configure(attention_backend_config={NAME: given})


def inputs(step: int, layer: int, prompt: int) -> list[Tensor]:
    some = tensors(5 * 6 * 12 + 4, heads=HEADS, kv_heads=HEADS, batch=1)
    draw = torch.Generator().manual_seed(100 * prompt + 10 * step + layer)
    return [t + torch.randn(t.shape, generator=draw, dtype=torch.float64) for t in some]


def search(prompt: int, branches: tuple[str, ...] = ("cond",)) -> Run:
    with Run(steps=STEPS, layers=LAYERS) as run:
        for step, branch in itertools.product(range(STEPS), branches):
            with run.at(grid=GRID, text=TEXT, step=step, branch=branch):
                for layer in range(LAYERS):
                    q, k, v = inputs(step, layer, prompt + 50 * (branch == "uncond"))
                    out = polyattn.attention(q, k, v, backend=NAME, place=place(layer=layer))
                    torch.testing.assert_close(out, polyattn.attention(q, k, v))  # a search attends densely
    return run


def by_hand(step: int, layer: int, prompt: int) -> dict[str, list[list[float]]]:
    """Losses by window and head, of results under the masks of the windows."""
    q, k, v = inputs(step, layer, prompt)
    full = polyattn.attention(q, k, v, backend="reference")
    found: dict[str, list[list[float]]] = {"L2_loss": [], "L1_loss": []}
    for window in TRIED:
        mask = sta_mask(Place(grid=GRID, text=TEXT), TILE, [window] * HEADS)
        apart = polyattn.attention(q, k, v, attn_mask=mask, backend="reference") - full
        found["L2_loss"].append(apart.square().mean((0, 1, 3)).tolist())
        found["L1_loss"].append(apart.abs().mean((0, 1, 3)).tolist())
    return found


def test_a_search_leaves_the_losses_of_each_branch(tmp_path: Path) -> None:
    configure(tmp_path, "STA_searching")
    run = search(0, ("cond", "uncond"))
    search(1)
    names = ["losses_cond_0.json", "losses_cond_1.json", "losses_uncond_0.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name, prompt in zip(names, (0, 1, 50), strict=True):
        held = json.loads((tmp_path / name).read_text())
        assert (held["steps"], held["layers"], held["heads"]) == (STEPS, LAYERS, HEADS)
        assert (held["tile"], held["full"]) == (list(TILE), list(FULL))
        for step, layer in itertools.product(range(STEPS), range(LAYERS)):
            right = by_hand(step, layer, prompt)
            for kind, (number, window) in itertools.product(right, enumerate(TRIED)):
                found = held[kind][",".join(map(str, window))][step][layer]
                assert found == pytest.approx(right[kind][number], rel=1e-9), (name, step, layer, window)
    assert "block_sparse" in str(run.explain())
    assert "density 1;" in str(run.explain())


def test_runs_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    configure(tmp_path, "STA_searching")
    runs = [Run(steps=STEPS, layers=LAYERS) for _ in range(2)]
    for step, layer, (prompt, run) in itertools.product(range(STEPS), range(LAYERS), enumerate(runs)):
        assert not list(tmp_path.iterdir()), "the runs are not through"
        with run.at(grid=GRID, text=TEXT, step=step):
            q, k, v = inputs(step, layer, prompt)
            polyattn.attention(q, k, v, backend=NAME, place=place(layer=layer))
            polyattn.explain(polyattn.attention, q, k, v, backend=NAME, place=place(layer=layer))
        if (step, layer, prompt) == (STEPS - 1, LAYERS - 1, 0):
            assert [path.name for path in tmp_path.iterdir()] == ["losses_all_0.json"]
            break
    held = json.loads((tmp_path / "losses_all_0.json").read_text())
    assert held["L2_loss"]["1,1,3"][1][1] == pytest.approx(by_hand(1, 1, 0)["L2_loss"][0], rel=1e-9)


def made(folder: Path, name: str, branch: str, table: dict[str, Any], **other: Any) -> None:
    """A file of losses by hand. table: of each window, [step][layer][head]."""
    sizes = {"branch": branch, "steps": 2, "layers": 1, "heads": 2, "tile": list(TILE), "full": list(FULL)}
    (folder / name).write_text(json.dumps({**sizes, "L2_loss": table, "L1_loss": table, **other}))


POSITIVE = ({"1,1,3": [[[1, 1]], [[2.0, 5.0]]], "3,3,1": [[[0, 0]], [[3.0, 1.0]]]}, "cond")
SECOND = ({"1,1,3": [[[1, 1]], [[2.0, 1.0]]], "3,3,1": [[[0, 0]], [[2.5, 4.0]]]}, "cond")
OTHER = ({"1,1,3": [[[1, 1]], [[9.0, 1.0]]], "3,3,1": [[[0, 0]], [[0.0, 8.0]]]}, "uncond")


@pytest.mark.parametrize(
    ("mode", "files", "windows"),
    [
        ("STA_tuning", [POSITIVE], ((1, 1, 3), (3, 3, 1))),
        ("STA_tuning", [POSITIVE, SECOND], ((1, 1, 3), (3, 3, 1))),
        ("STA_tuning", [POSITIVE, OTHER], ((1, 1, 3), (3, 3, 1))),
        ("STA_tuning", [SECOND], ((1, 1, 3), (1, 1, 3))),
        ("STA_tuning_cfg", [POSITIVE, OTHER], ((3, 3, 1), (1, 1, 3))),
    ],
)
def test_the_least_loss_is_chosen(mode: str, files: list[Any], windows: Any, tmp_path: Path) -> None:
    for number, (table, branch) in enumerate(files):
        made(tmp_path, f"losses_{branch}_{number}.json", branch, table)
    configure(tmp_path, mode)
    q, k, v = tensors(5 * 6 * 12, heads=2, kv_heads=2, batch=1)
    at = Place(grid=GRID, step=1, steps=2, layer=0, layers=1)
    out = polyattn.attention(q, k, v, backend=NAME, place=at)
    mask = sta_mask(at, TILE, windows)
    torch.testing.assert_close(out, polyattn.attention(q, k, v, attn_mask=mask, backend="reference"))
    path = tmp_path / "mask_strategy_s1.json"
    assert read_strategy(str(path)).windows == {(0, 0): (FULL, FULL), (1, 0): windows}
    early = Place(grid=GRID, step=0, steps=2, layer=0, layers=1)
    said = polyattn.explain(polyattn.attention, q, k, v, backend=NAME, place=early)
    assert "the first 1 steps run dense (skip_time_steps)" in str(said)
    configure(path, "STA_inference")
    assert torch.equal(polyattn.attention(q, k, v, backend=NAME, place=at), out)


def test_from_a_search_to_inference(tmp_path: Path) -> None:
    configure(tmp_path, "STA_searching")
    search(0)
    search(1)
    configure(tmp_path, "STA_tuning")
    q, k, v = inputs(2, 1, 0)
    at = Place(grid=GRID, text=TEXT, step=2, layer=1)
    out = polyattn.attention(q, k, v, backend=NAME, place=at)
    losses = [by_hand(2, 1, prompt)["L2_loss"] for prompt in (0, 1)]
    means = [[a + b for a, b in zip(*two, strict=True)] for two in zip(*losses, strict=True)]
    windows = [min(zip(means, TRIED, strict=True), key=lambda one: one[0][head])[1] for head in range(HEADS)]
    mask = sta_mask(at, TILE, windows)
    torch.testing.assert_close(out, polyattn.attention(q, k, v, attn_mask=mask, backend="reference"))


TABLE = POSITIVE[0]
Fault = tuple[str, dict[str, Any], str]
FAULTS: dict[str, Fault] = {
    "nothing was searched": ("STA_tuning", {}, "has no losses of positive prompts"),
    "one branch": ("STA_tuning_cfg", {"losses_cond_0.json": ("cond", {})}, "has no losses of cond and of uncond"),
    "negative prompts alone": ("STA_tuning", {"losses_uncond_0.json": ("uncond", {})}, "has no losses of positive"),
    "other models": (
        "STA_tuning",
        {"losses_a_0.json": ("", {}), "losses_b_0.json": ("", {"full": [3, 3, 5]})},
        r"losses_a_0.json and .*losses_b_0.json are of different models or searches; keep those of one",
    ),
    "another tile": (
        "STA_tuning",
        {"losses_a_0.json": ("", {"tile": [6, 8, 8]})},
        r"tiles of \[6, 8, 8\] tokens, and sta",
    ),
    "a table too short": (
        "STA_tuning",
        {"losses_a_0.json": ("", {"L2_loss": {"1,1,3": [[[1, 1]]]}})},
        "holds no losses of a search .*not steps x layers x heads",
    ),
    "no file of losses": ("STA_tuning", {"losses_a_0.json": ("", {"L2_loss": 3})}, "holds no losses of a search"),
    "no triples": ("STA_searching", {}, "sta_candidates has 4 numbers; give three for each window"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_wrong_with_a_folder(case: str, tmp_path: Path) -> None:
    mode, files, message = FAULTS[case]
    for name, (branch, other) in files.items():
        made(tmp_path, name, branch, TABLE, **other)
    configure(tmp_path, mode, **({"sta_candidates": [1, 1, 3, 3]} if case == "no triples" else {}))
    q, k, v = tensors(5 * 6 * 12, heads=2, kv_heads=2, batch=1)
    with pytest.raises(ConfigError, match=f"{NAME}.*{message}"):
        polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, step=1, layer=0))


@pytest.mark.parametrize("mode", ["STA_searching", "STA_tuning", "STA_tuning_cfg"])
def test_other_modes_need_a_folder(mode: str, tmp_path: Path) -> None:
    configure(tmp_path / "nowhere", mode)
    q, k, v = tensors(5 * 6 * 12, heads=2, kv_heads=2, batch=1)
    with pytest.raises(ConfigError, match=f"sta_mode='{mode}' works in the folder of a search.*give a folder that exi"):
        polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, step=1, layer=0))


def test_what_is_wrong_with_a_search(tmp_path: Path) -> None:
    q, k, v = tensors(5 * 6 * 12, heads=2, kv_heads=2, batch=1)
    configure(tmp_path, "STA_searching")
    for some in (Place(grid=GRID, step=0, steps=3, layer=0, layers=2), Place(grid=GRID, run=Run(steps=3, layers=1))):
        with pytest.raises(
            InvalidInputError, match=r"a search needs to know its run, and all steps and layers of that: w"
        ):
            polyattn.attention(q, k, v, backend=NAME, place=some)
    for window, message in (
        (
            [1, 1, 5],
            r"sta_candidates has the window \[1, 1, 5\], and the grid has \[3, 3, 3\] tiles.*give windows of this",
        ),
        ([2, 1, 1], r"sta_candidates has the window \[2, 1, 1\], even along time"),
    ):
        configure(tmp_path, "STA_searching", sta_candidates=window)
        with Run(steps=1, layers=1) as run, run.at(grid=GRID, step=0), pytest.raises(InvalidInputError, match=message):
            polyattn.attention(q, k, v, backend=NAME, place=place(layer=0))
    folder = tmp_path / "gone"
    folder.mkdir()
    configure(folder, "STA_searching")
    with Run(steps=2, layers=1) as run:
        with run.at(grid=GRID, step=0):
            polyattn.attention(q, k, v, backend=NAME, place=place(layer=0))
        shutil.rmtree(folder)
        with (
            run.at(grid=GRID, step=1),
            pytest.raises(ConfigError, match=r"cannot be written to .*gone.* can be written to"),
        ):
            polyattn.attention(q, k, v, backend=NAME, place=place(layer=0))
