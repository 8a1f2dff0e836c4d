"""docs/add-a-backend.md and docs/publish.md, followed to the letter: from an empty folder to a wheel that conforms.

The blocks of the pages are taken in order. `console fresh` is run, `console fresh fails` must end with code 1, `diff`
is applied, `python no-run` is run after the first one; a block that starts with `# path` shows a part of that file.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import yaml

from .conftest import ROOT, Fresh

PAGES = [ROOT / "docs" / name for name in ("add-a-backend.md", "publish.md")]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
BLOCKS = re.findall(r"^```([^\n`]+)\n(.*?)^```$", TEXT, re.M | re.S)
PACKAGE = "polyattn-acme"


class Reader:
    """Somebody who does what the page says, in a fresh environment."""

    def __init__(self, fresh: Fresh) -> None:
        self.fresh = fresh
        self.package = fresh.folder / PACKAGE
        self.python = ""
        self.commands: list[str] = []

    def follow(self, kind: str, text: str) -> None:
        shown = re.match(r"# (\S+/\S+|pyproject\.toml)\n", text)
        if kind in ("console fresh", "console fresh fails"):
            self._run(text, code=1 if kind.endswith("fails") else 0)
        elif kind == "diff":
            self._apply(text)
        elif kind == "yaml":
            assert "python -m build" in [step.get("run") for step in yaml.safe_load(text)["jobs"]["pypi"]["steps"]]
        elif shown is not None:
            file = self.package / shown[1]
            assert text[shown.end() :] in file.read_text(encoding="utf-8"), f"{shown[1]} is not what the page shows"
        elif kind == "python no-run":
            self._python(text)
        elif kind == "python":
            pass  # tests/docs runs it: it needs none of the package
        elif kind == "text":
            self._compare(text)
        else:
            raise AssertionError(f"nobody follows a block of kind {kind!r}:\n{text}")

    def _run(self, text: str, code: int) -> None:
        for line in text.splitlines():
            assert line.startswith("$ "), line
            self.fresh.run(line[2:], code=code)
            self.commands.append(line[2:])

    def _python(self, text: str) -> None:
        # What follows uses the first block's imports and tensors; the claims in between may hold no more.
        self.python = self.python or text
        (self.fresh.folder / "page.py").write_text(self.python + (text if text != self.python else ""))
        self.fresh.run("python -W error page.py")

    def _apply(self, text: str) -> None:
        head, _, hunk = text.partition("\n")
        file = self.package / head.removeprefix("# ")
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
        before = file.read_text(encoding="utf-8")
        assert before.count(old) == 1, f"{file.name} has these lines {before.count(old)} times:\n{old}"
        file.write_text(before.replace(old, new), encoding="utf-8")

    def _compare(self, text: str) -> None:
        """The tree of files."""
        top, *lines = text.splitlines()
        assert top == PACKAGE
        shown, folder = set(), PurePosixPath()
        for line in lines:
            name = line.split()[-1]
            deep = line.index(name) > len("├── ")
            folder = folder if deep else PurePosixPath()
            shown.add((folder / name).as_posix())
            if not deep:
                folder = PurePosixPath(name)
        shown = {name for name in shown if not (self.package / name).is_dir()}
        there = {f.relative_to(self.package).as_posix() for f in self.package.rglob("*") if f.is_file()}
        assert shown == {name for name in there if "__pycache__" not in name}


def test_the_pages_lead_from_nothing_to_a_published_package(fresh: Callable[..., Fresh], core_wheel: Path) -> None:
    reader = Reader(fresh())
    for kind, text in BLOCKS:
        reader.follow(kind, text)

    wheel = zipfile.ZipFile(next((reader.package / "dist").glob("*.whl")))
    assert "polyattn_acme/evidence/acme@cpu.json" in wheel.namelist(), "the evidence is published with the package"
    commands = reader.commands
    first = commands[commands.index("polyattn new-plugin acme") : commands.index("polyattn conform acme") + 1]
    assert len(first) == 3, "one command each: to write, to install and to check the package"
    assert _is_installed_from(core_wheel, reader.fresh), "what was tried is not this checkout"


def _is_installed_from(wheel: Path, fresh: Fresh) -> bool:
    """Whether pip took this wheel when it was asked for polyattn."""
    record = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/RECORD"))
    ours = zipfile.ZipFile(wheel).read(record).decode().splitlines()
    (there,) = fresh.folder.glob(f".venv/lib/python*/site-packages/{record}")
    files = [line for line in ours if ".dist-info/" not in line]
    return len(files) > 100 and set(files) <= set(there.read_text().splitlines())
