"""What the built distributions hold: all that git has of a package, and nothing else that lies in its folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "plugins" / "_template"
EXAMPLES = sorted(p.parent for p in ROOT.glob("examples/third-party/*/pyproject.toml"))
PACKAGES = [ROOT / "core", *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml")), *EXAMPLES]
STRAYS = {
    "secret.env",
    ".env",
    "secret",
    "notes.txt",
    "secret.json",
    "x.py.orig",
    "x.py~",
    ".x.py.swp",
    "._x.py",
    "x.so",
}
OF_DATA = {"evidence", "measurements"}
"""Folders that commands write JSON to, under names of their own."""


def tracked(folder: Path) -> set[str]:
    """Paths from `folder` of the files that git has there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=folder, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"git does not list this checkout: {listed.stderr.strip()}")
    return set(filter(None, listed.stdout.split("\0")))


@pytest.fixture(scope="module", params=PACKAGES, ids=lambda p: p.name)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A package's folder, and the one with what was built of a copy that is full of strays."""
    folder: Path = request.param
    copy = tmp_path_factory.mktemp("checkout")
    for part in {folder, TEMPLATE}:
        for name in tracked(part):
            target = copy / part.relative_to(ROOT) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(part / name, target)
        for inner in [p for p in (copy / part.relative_to(ROOT)).rglob("*") if p.is_dir()]:
            for stray in STRAYS if inner.name not in OF_DATA else STRAYS - {"secret.json"}:
                (inner / stray).write_text("a stray", encoding="utf-8")
    build(copy / folder.relative_to(ROOT), copy / "out")
    return folder, copy / "out"


def build(folder: Path, out: Path, *words: str) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr


def expected(folder: Path) -> set[str]:
    """Paths from src/ of what a package is made of; core has the template, where `polyattn new-plugin` looks for it."""
    files = {name.removeprefix("src/") for name in tracked(folder) if name.startswith("src/")}
    return files | ({f"polyattn/cli/template/{name}" for name in tracked(TEMPLATE)} if folder.name == "core" else set())


def in_wheel(out: Path) -> set[str]:
    (wheel,) = out.glob("*.whl")
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def in_sdist(out: Path) -> set[str]:
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_a_wheel_has_what_git_has_and_no_stray(built: tuple[Path, Path]) -> None:
    folder, out = built
    assert in_wheel(out) == expected(folder)


def test_a_source_distribution_has_no_stray_and_makes_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    folder, out = built
    names = in_sdist(out)
    assert {name.removeprefix("src/") for name in names if name.startswith("src/")} == expected(folder)
    assert not {Path(name).name for name in names} & STRAYS
    (sdist,) = out.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    build(unpacked, tmp_path / "out", "-t", "wheel")
    assert in_wheel(tmp_path / "out") == expected(folder)
