"""docs/lowerings.md has every lowering, in order, in its own words."""

from __future__ import annotations

import re
from pathlib import Path

from polyattn.contract import AttentionRequest
from polyattn.lowering import MAX_STEPS, lowerings
from polyattn.lowering.base import CALL

PAGE = (Path(__file__).parents[2] / "docs" / "lowerings.md").read_text(encoding="utf-8")


def test_the_table_is_the_list_of_lowerings() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.M)
    assert [row[:2] for row in rows] == [(x.name, x.summary) for x in lowerings()]
    for name, _, families, gradients in rows:
        assert (gradients == "yes") == bool(
            {"dense", "varlen", "block_sparse", "all"} & set(re.split(r", | and | at ", families))
        ), name


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    assert f"at most {['', 'one', 'two', 'three', 'four', 'five', 'six'][MAX_STEPS]} rewrites" in PAGE
    assert f"A further kernel call counts {['', '', '', '', 'four'][int(CALL)]}" in PAGE


def test_every_lowering_relieves_of_fields_that_exist() -> None:
    names = {
        *(f for f in vars(AttentionRequest()) if not f.startswith("_")),
        "group",
        "dims",
        "same_dims",
        "kv_storage",
    }
    for lowering in lowerings():
        assert lowering.fields, lowering.name
        assert lowering.fields <= names, lowering.name
