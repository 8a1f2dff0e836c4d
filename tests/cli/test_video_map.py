"""`polyattn video-map`: the picture is the mask that a method computes under, for every method."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from polyattn.cli.video_map import METHODS
from polyattn.methods.video.window import window_mask
from polyattn.video import Place

from .conftest import Run


def frames_of(data: dict[str, list[list[str]]]) -> torch.Tensor:
    return torch.tensor([[[one == "x" for one in row] for row in frame] for frame in data["frames"]])


def test_the_picture_is_the_mask(run: Run) -> None:
    options = json.dumps({"window_tile": [2, 3, 4], "window_reach": [0, 1, 1]})
    words = ("--grid", "4,6,9", "--text", "2,3", "--query", "1,2,8", "--options", options, "--json")
    data = run("video-map", "window_video_attn", *words).data
    mask = window_mask(Place(grid=(4, 6, 9), text=(2, 3)), (2, 3, 4), (0, 1, 1))[0, 0]
    number = 2 + (1 * 6 + 2) * 9 + 8
    assert torch.equal(frames_of(data), mask[number, 2:-3].view(4, 6, 9))
    assert data["keys"] == int(mask[number].sum())
    assert data["density"] == pytest.approx(float(mask.double().mean()))
    assert data["run"]["rows"][0]["kernels"] == ["block_sparse: torch_sdpa@cpu"]
    other = run("video-map", "window_video_attn", *words[:4], "--query", "1,2,0", *words[6:]).data
    assert not torch.equal(frames_of(other), frames_of(data))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_shows_a_map(run: Run, method: str) -> None:
    found = run("video-map", method, "--grid", "4,8,12")
    assert found.code == 0, found.err
    head, _, *rest = found.out.splitlines()
    assert head.startswith(f"{method}, head 0: the query at (2, 4, 6) sees "), head
    share = float(head.rpartition("; ")[2].partition("%")[0])
    assert 2 < share < 70, head
    frames = [line.replace("  ", "") for line in rest[1:9]]
    assert sum(line.count("Q") for line in frames) == 1
    assert sum(line.count("·") for line in frames) > sum(line.count("█") for line in frames) > 0
    assert f"layer 0: 1 call, {method}" in found.out


def test_a_method_has_a_short_name(run: Run) -> None:
    words = ("--grid", "4,8,8", "--json")
    assert run("video-map", "vsa", *words).data == run("video-map", "video_sparse_attn", *words).data


def test_layers_take_turns_and_steps_are_dense(run: Run) -> None:
    words = ("video-map", "vmoba_attn", "--grid", "4,8,12", "--json")
    temporal, spatial = (run(*words, "--layer", layer).data for layer in ("0", "1"))
    assert temporal["frames"] != spatial["frames"]
    told = run(*words, "--options", '{"first_full_step": 3}', "--step", "2").data
    assert (told["density"], told["keys"]) == (1.0, 384)
    assert told["run"]["rows"][0]["why"] == "the first 3 steps run dense (first_full_step)"


def test_windows_of_a_file_by_head(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps({f"0_0_{head}": window for head, window in enumerate(([1, 1, 1], [1, 1, 3]))}))
    given = {"mask_strategy_file_path": str(path), "sta_tile": [4, 8, 4], "skip_time_steps": 0}
    words = ("video-map", "sliding_tile_attn", "--grid", "4,8,12", "--options", json.dumps(given), "--json")
    assert [run(*words, "--head", head).data["keys"] for head in "01"] == [128, 384]
    assert "--head 2: there are 2 heads, numbers from 0" in run(*words, "--head", "2").out


def test_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip(
        "PIL.Image", reason="pictures need Pillow, which comes with matplotlib (the extra plots)"
    )
    words = ("video-map", "window_video_attn", "--grid", "3,4,8")
    for name in ("map.png", "map.txt"):
        assert run(*words, "--output", str(tmp_path / name)).code == 0
    text = run(*words).out
    assert (tmp_path / "map.txt").read_text(encoding="utf-8").strip() == text.strip()
    picture = image.open(tmp_path / "map.png").convert("RGB")
    colours = {picture.getpixel((8 * x + 4, 8 * y + 4)) for x in range(8) for y in range(4)}
    assert colours == {(232, 232, 232), (38, 110, 170)}
    assert picture.getpixel((8 + 8 * 8 + 6 + 4 * 8 - 4, 2 * 8 + 4)) == (240, 120, 20), "the query, in the second frame"
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    refused = run(*words, "--output", str(tmp_path / "other.png"))
    assert (refused.code, (tmp_path / "other.png").exists()) == (4, False)
    assert "a picture needs Pillow: pip install 'polyattn[plots]', or --output map.txt" in refused.err


PAGE = Path(__file__).parents[2] / "docs" / "video.md"
PICTURES = re.findall(
    r"`polyattn (video-map [^`]+)`\n\n!\[\w+\]\((video-map/\w+\.png)\)", PAGE.read_text(encoding="utf-8")
)


@pytest.mark.parametrize(("words", "file"), PICTURES)
def test_the_pictures_of_the_page(run: Run, words: str, file: str, tmp_path: Path) -> None:
    image = pytest.importorskip(
        "PIL.Image", reason="pictures need Pillow, which comes with matplotlib (the extra plots)"
    )
    chops = pytest.importorskip("PIL.ImageChops")
    made = tmp_path / "map.png"
    assert run(*words.split(), "--output", str(made)).code == 0
    found, kept = (image.open(path).convert("RGB") for path in (made, PAGE.parent / file))
    assert found.size == kept.size
    # Another torch may put a token at the edge of a cluster elsewhere.
    apart = chops.difference(found, kept).convert("L").point(lambda value: 255 * (value > 40))
    assert apart.histogram()[255] < 0.02 * found.size[0] * found.size[1], (
        f"polyattn {words} --output docs/{file} draws it"
    )


def test_every_method_has_a_picture() -> None:
    assert {words.split()[1] for words, _ in PICTURES} == set(METHODS) - {"sage_sla_attn"}
    assert all(Path(file).stem == words.split()[1] for words, file in PICTURES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("window_video",), "METHOD 'window_video' is not known. Did you mean 'window_video_attn'?"),
        (("window_video_attn", "--grid", "8,12"), "--grid '8,12' is not 3 whole numbers of 1 or more, with commas"),
        (("window_video_attn", "--grid", "0,12,16"), "--grid '0,12,16' is not 3 whole numbers of 1 or more"),
        (("window_video_attn", "--text", "-1,0"), "--text '-1,0' is not 2 whole numbers of 0 or more"),
        (("window_video_attn", "--query", "8,0,0"), "--query 8,0,0 is outside of --grid 8,12,16; its numbers count"),
        (("window_video_attn", "--grid", "21,45,80"), "are 75,600 tokens, of 4,096 at most: give a small grid"),
        (("window_video_attn", "--grid", "2,2,2", "--output", "/nonexistent/map.txt"), "cannot be written"),
        (("window_video_attn", "--output", "map.gif"), "--output map.gif: give a file that ends in .png or .txt"),
        (("window_video_attn", "--options", "{"), "--options '{' is no JSON ("),
        (("window_video_attn", "--options", "3"), "--options '3' is no JSON object; give one such as"),
        (("video_sparse_attn", "--options", '{"sparsity": 1}'), "sparsity=1 keeps no tile; give a share below 1"),
        (("vmoba_attn", "--text", "0,4"), "text is in no chunk of a grid"),
    ],
)
def test_what_is_wrong(run: Run, words: tuple[str, ...], message: str) -> None:
    found = run("video-map", *words)
    assert found.code == 2
    assert message in found.err.replace("\n", " ")
