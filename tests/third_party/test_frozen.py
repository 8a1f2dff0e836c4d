"""A plugin that was built when the contract was at version 1, and never again, beside the core of today.

`frozen/` holds its wheel; frozen/README.md says what it is and how it was made. A failure here means that a change of
core breaks packages that people have published: undo that change, do not rebuild the wheel.

Any third party can run the same against polyattn's main branch with a wheel of their own: the lines are in
examples/third-party/README.md, and the last test runs them as they stand there.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polyattn.contract import API_VERSION

from .conftest import ROOT, Fresh

FROZEN = Path(__file__).parent / "frozen"
(WHEEL,) = FROZEN.glob("*.whl")


@pytest.fixture(scope="module")
def installed(fresh: Callable[..., Fresh], core_wheel: Path) -> Fresh:
    made = fresh()
    made.run("python3 -m venv .venv")
    made.run(f"python -m pip install -q --no-deps --no-index '{core_wheel}' '{WHEEL}'")
    made.environ["TORCH_EXTENSIONS_DIR"] = str(made.folder / "kernels")
    return made


def test_the_wheel_is_the_one_that_was_frozen() -> None:
    text = (FROZEN / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(WHEEL.read_bytes()).hexdigest() in text
    assert WHEEL.name in text
    assert WHEEL.stat().st_size < 60_000


def test_it_speaks_version_1_and_so_does_core() -> None:
    with zipfile.ZipFile(WHEEL) as files:
        spoken = re.search(r"^POLYATTN_API_VERSION = (\d+)$", files.read("polyattn_tinyflash/plugin.py").decode(), re.M)
    assert spoken is not None
    assert 1 == int(spoken[1]) <= API_VERSION


def test_it_is_listed_and_explained(installed: Fresh) -> None:
    assert json.loads(installed.run("polyattn doctor --json"))["plugins"]
    (ours,) = [b for b in json.loads(installed.run("polyattn list --json")) if b["name"] == "tinyflash"]
    assert (ours["package"], ours["version"]) == ("polyattn-tinyflash", "1.0.0")
    assert (ours["status"], ours["reasons"], ours["evidence"]) == ("available", [], "declared")
    ask = "polyattn explain --dtype fp32 --head-dim 64 --causal --json"
    assert "tinyflash" in json.loads(installed.run(ask))["others"]
    named = json.loads(installed.run(f"{ask} --attention-backend tinyflash"))
    assert (named["backend"], named["platform"], named["provider"]) == ("tinyflash", "cpu", "tinyflash")
    assert named["lowerings"] == []


def test_its_calls_are_right(installed: Fresh) -> None:
    shutil.copy(FROZEN / "calls.py", installed.folder)  # away from this repository's own settings
    said = installed.run("python -m pytest -q -W error -p no:cacheprovider calls.py")
    assert re.search(r"^\d+ passed in", said, re.M), said


def test_the_recipe_for_third_parties_runs_as_written(fresh: Callable[..., Fresh]) -> None:
    """With this wheel; conformance is the last line of it."""
    page = (ROOT / "examples" / "third-party" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```console\n(.*?)^```", page, re.M | re.S)
    stranger = fresh()
    stranger.run("python3 -m venv .venv")
    # What an index would bring is borrowed: the tools that build core's wheel, and what it needs.
    given = {"POLYATTN": str(ROOT), "WHEEL": str(WHEEL), "BACKEND": "tinyflash", "PIP_NO_BUILD_ISOLATION": "0"}
    stranger.environ["TORCH_EXTENSIONS_DIR"] = str(stranger.folder / "kernels")
    said = [stranger.run(line.removeprefix("$ "), **given) for line in block.splitlines()]
    assert re.search(r"\btinyflash\b", said[2])
    assert re.search(r"ok, \d+ cases", said[-1]), said[-1]
