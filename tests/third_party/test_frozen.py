"""Plugins that were built when the contract was at version 1, and never again, beside the core of today.

`frozen/` holds their wheels; frozen/README.md says what they are and how they were made. A failure here means that a
change of core breaks packages that people have published: undo that change, do not rebuild the wheel.

Any third party can run the same against polyattn's main branch with a wheel of their own: the lines are in
examples/third-party/README.md, and the last test runs them as they stand there.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polyattn.contract import API_VERSION

from .conftest import ROOT, Fresh

FROZEN = Path(__file__).parent / "frozen"
(WHEEL,) = FROZEN.glob("polyattn_tinyflash-*.whl")
(PAGED,) = FROZEN.glob("polyattn_tinypages-*.whl")
WHEELS = {"tinyflash": WHEEL, "tinypages": PAGED}
wheels = pytest.mark.parametrize("name", WHEELS)
STRICT = "-W error"
"""The names that packages of contract 1 import warn of nothing."""


@pytest.fixture(scope="module")
def installed(fresh: Callable[..., Fresh], core_wheel: Path) -> Fresh:
    made = fresh()
    made.run("python3 -m venv .venv")
    made.run(f"python -m pip install -q --no-deps --no-index '{core_wheel}' '{WHEEL}' '{PAGED}'")
    made.environ["TORCH_EXTENSIONS_DIR"] = str(made.folder / "kernels")
    return made


@wheels
def test_the_wheel_is_the_one_that_was_frozen(name: str) -> None:
    text, wheel = (FROZEN / "README.md").read_text(encoding="utf-8"), WHEELS[name]
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in text
    assert wheel.name in text
    assert wheel.stat().st_size < 60_000


@wheels
def test_it_speaks_version_1_and_so_does_core(name: str) -> None:
    with zipfile.ZipFile(WHEELS[name]) as files:
        plugin = files.read(f"polyattn_{name}/plugin.py").decode()
    spoken = re.search(r"^POLYATTN_API_VERSION = (\d+)$", plugin, re.M)
    assert spoken is not None
    assert 1 == int(spoken[1]) <= API_VERSION


def test_it_is_listed_and_explained(installed: Fresh) -> None:
    assert installed.data("polyattn doctor --json")["plugins"]
    (ours,) = [b for b in installed.data("polyattn list --json") if b["name"] == "tinyflash"]
    assert (ours["package"], ours["version"]) == ("polyattn-tinyflash", "1.0.0")
    assert (ours["status"], ours["reasons"], ours["evidence"]) == ("available", [], "declared")
    ask = "polyattn explain --dtype fp32 --head-dim 64 --causal --json"
    assert "tinyflash" in installed.data(ask)["others"]
    named = installed.data(f"{ask} --attention-backend tinyflash")
    assert (named["backend"], named["platform"], named["provider"]) == ("tinyflash", "cpu", "tinyflash")
    assert named["lowerings"] == []


@pytest.mark.parametrize("calls", ["calls.py", "paged_calls.py"])
def test_its_calls_are_right(calls: str, installed: Fresh) -> None:
    """Those over a cache by version 1's keywords for the tables, steps of an engine too."""
    shutil.copy(FROZEN / calls, installed.folder)  # away from this repository's own settings
    said = installed.run(f"python -m pytest -q {STRICT} -p no:cacheprovider {calls}")
    assert re.search(r"^\d+ passed in", said, re.M), said


@wheels
def test_the_recipe_for_third_parties_runs_as_written(name: str, fresh: Callable[..., Fresh]) -> None:
    """With this wheel; conformance is the last line of it."""
    page = (ROOT / "examples" / "third-party" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```console\n(.*?)^```", page, re.M | re.S)
    stranger = fresh()
    stranger.run("python3 -m venv .venv")
    # What an index would bring is borrowed: the tools that build core's wheel, and what it needs.
    given = {"POLYATTN": str(ROOT), "WHEEL": str(WHEELS[name]), "BACKEND": name, "PIP_NO_BUILD_ISOLATION": "0"}
    stranger.environ["TORCH_EXTENSIONS_DIR"] = str(stranger.folder / "kernels")
    said = [stranger.run(line.removeprefix("$ "), **given) for line in block.splitlines()]
    assert re.search(rf"\b{name}\b", said[2])
    assert re.search(r"ok, \d+ cases", said[-1]), said[-1]
