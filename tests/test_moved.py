"""Former names of modules can be imported for one minor version, and say what they are called now."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path

import pytest

import polyattn.moved

FOLDER = Path(polyattn.moved.__file__).parent
TABLE = re.findall(r"^\| (`.*`) \| `(.*)` \|$", polyattn.moved.__doc__ or "", re.MULTILINE)
LISTED = {old: new for olds, new in TABLE for old in re.findall(r"`(.*?)`", olds)}
PROMISED = {"polyattn.records", "polyattn.hookspecs"}
"""Packages of contract 1 import these: they warn of nothing."""


def test_every_shim_is_listed() -> None:
    assert {f"polyattn.{path.stem}" for path in FOLDER.glob("*.py")} - {"polyattn.__init__"} == set(LISTED)


@pytest.mark.parametrize("old", LISTED)
def test_a_former_name_is_the_same_module_by_another_name(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    said = [one for one in caught if one.category is DeprecationWarning]
    assert [str(one.message) for one in said] == [f"{old} is {LISTED[old]} now; the old name goes with version 0.3"] * (
        old not in PROMISED
    )
    assert all(Path(one.filename).parent != FOLDER for one in said), "the warning names who imports it"
    now = importlib.import_module(LISTED[old])
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is getattr(now, name)
