"""Former names of modules can be imported for one minor version, and say what they are called now."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

import polyattn.moved

FOLDER = Path(polyattn.moved.__file__).parent
TABLE = re.findall(r"^\| (`.*`) \| `(.*)` \|$", polyattn.moved.__doc__ or "", re.MULTILINE)
LISTED = {old: new for olds, new in TABLE for old in re.findall(r"`(.*?)`", olds)}


def test_every_shim_is_listed() -> None:
    assert {f"polyattn.{path.stem}" for path in FOLDER.glob("*.py")} - {"polyattn.__init__"} == set(LISTED)


@pytest.mark.parametrize("old", LISTED)
def test_a_former_name_is_the_same_module_by_another_name(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"^{re.escape(old)} is {re.escape(LISTED[old])} now") as caught:
        module = importlib.import_module(old)
    assert Path(caught[0].filename).name != f"{old.rpartition('.')[2]}.py", "the warning names who imports it"
    now = importlib.import_module(LISTED[old])
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is getattr(now, name)
