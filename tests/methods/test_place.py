"""`Place`: what it may hold. It is made without torch, by hosts, so a mistake is told where it is made."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from polyattn.errors import InvalidInputError
from polyattn.video import Place, Run
from polyattn.video import place as at_run

WRONG = [
    ({"grid": (2, 3)}, r"grid=\(2, 3\) must be \(T, H, W\), whole numbers of 1 or more"),
    ({"grid": (2, 0, 3)}, r"grid=\(2, 0, 3\) must be"),
    ({"grid": (2, True, 3)}, r"grid=\(2, True, 3\) must be"),
    ({"grid": 6}, r"grid=6 must be"),
    ({"text": (1,)}, r"text=\(1,\) must be \(front, back\), whole numbers of 0 or more"),
    ({"text": (-1, 0)}, r"text=\(-1, 0\) must be"),
    ({"text": None}, r"text=None must be"),
    ({"valid_text": (0, 0.5), "text": (1, 1)}, r"valid_text=\(0, 0.5\) must be"),
    ({"valid_text": (0, 3), "text": (4, 2)}, r"valid_text=\(0, 3\) must be at most text=\(4, 2\)"),
    ({"layer": 4, "layers": 4}, r"layer=4 must be a whole number from 0, below layers=4"),
    ({"layer": -1}, r"layer=-1 must be"),
    ({"layer": "first"}, r"layer='first' must be"),
    ({"layers": 0}, r"layers=0 must be a whole number of 1 or more, or None"),
    ({"step": 50, "steps": 50}, r"step=50 must be a whole number from 0, below steps=50"),
    ({"step": 1.5}, r"step=1.5 must be"),
    ({"steps": 2.0}, r"steps=2.0 must be"),
    ({"kept": []}, r"kept=\[\] must be a dict, or None"),
    ({"tensors": [1]}, r"tensors=\[1\] must be a dict of tensors by name"),
    ({"branch": 0}, r"branch=0 must be a word such as 'cond', or ''"),
    ({"branch": None}, r"branch=None must be a word"),
    ({"role": "both"}, r"role='both' must be 'self', 'cross' or None"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_wrong_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match="place: " + message):
        Place(**given)


def test_a_tensor_of_several_layers_is_no_number() -> None:
    with pytest.raises(InvalidInputError, match="layer="):
        Place(layer=torch.tensor([1, 2]))


@pytest.mark.parametrize(("layer", "layers"), [(-1, None), (4, 4), (1.5, 4), (True, 4), (torch.nan, 4)])
def test_a_number_in_a_tensor_is_held_to_the_same(layer: Any, layers: int | None) -> None:
    """It is read when a method asks: a place of its own is not read when it is made."""
    place = Place(layer=torch.tensor(layer), layers=layers)
    with pytest.raises(InvalidInputError, match=f"place: layer=.* from 0, below layers={layers}"):
        _ = place.layer_number
    with Run(layers=layers) as run, run.at(grid=(1, 2, 3)), pytest.raises(InvalidInputError, match="place: layer="):
        at_run(layer=torch.tensor(layer))


@pytest.mark.parametrize(("heads", "of"), [((3, 4), 2), ((0, 2), 4), ((5, 4), 1)])
def test_a_call_has_no_more_heads_than_the_model(heads: tuple[int, int], of: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"place: heads=.* of a call of {of} heads, which end at"):
        Place(heads=heads).own_heads(of)
    assert Place(heads=(2, 4)).own_heads(2) == slice(2, 4)


def test_what_it_holds() -> None:
    place = Place(grid=[2, 3, 4], text=[1, 5], layer=torch.tensor(3), layers=4, step=0, steps=2, branch="cond")
    assert (place.grid, place.text, place.tokens, place.layer_number) == ((2, 3, 4), (1, 5), 30, 3)
    assert (Place().tokens, Place().layer_number) == (None, None)
    with pytest.raises(AttributeError):
        place.step = 1  # type: ignore[misc]


def test_it_needs_no_torch() -> None:
    code = "import sys, polyattn.video as v; v.Place(grid=(1, 2, 3)); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
