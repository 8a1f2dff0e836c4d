"""Fresh environments: what a stranger has who installs core from its wheel and a plugin beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 3600
"""Seconds for one command."""


class Fresh:
    """A folder to work in, with a virtual environment `.venv` once a command has made one.

    Everything of polyattn in it was installed by a command of the test. Everything else (torch and what it needs,
    typer, pytest) is borrowed from the environment that runs the tests: to install torch again would take longer than
    all tests of this room. `--system-site-packages` would not do: core and the plugins are installed there too.
    """

    def __init__(self, folder: Path, core: Path, borrowed: Path) -> None:
        self.folder, self.core = folder, core
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("POLYATTN_", "PYTHON", "VIRTUAL_ENV"))}
        self.environ = {
            **inherited,
            "PYTHONPATH": str(borrowed),
            "PYTHONNOUSERSITE": "1",
            # Where pip finds core when it is asked for `polyattn`.
            "PIP_FIND_LINKS": f"{core.parent} {inherited.get('PIP_FIND_LINKS', '')}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1"),
        }

    def run(self, command: str, *, code: int = 0, **environ: str) -> str:
        """Run a line of shell with the environment active; its output, both streams. `code`: how it must exit."""
        return self._done(command, code, subprocess.STDOUT, environ).stdout

    def data(self, command: str, *, code: int = 0) -> Any:
        """The JSON that a command prints. What it says beside that, as of its progress on a slow machine, is no part
        of it."""
        return json.loads(self._done(command, code, subprocess.PIPE, {}).stdout)

    def _done(self, command: str, code: int, stderr: int, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "-c", f"[ ! -d .venv ] || . .venv/bin/activate\n{command}"],
            cwd=self.folder,
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == code, f"$ {command}\n{done.stdout}\n{done.stderr or ''}"
        return done


def build(source: Path, into: Path, *words: str) -> Path:
    """Build a distribution with the tools of this environment (by default the wheel from the source distribution, as it
    is published); the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", *words, "--outdir", str(into), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return wheel


def _borrow(folders: Iterable[Path], into: Path) -> None:
    """Link what is installed in `folders`, but polyattn, its plugins, pip, and the files that extend the path."""
    for entry in (entry for folder in folders if folder.is_dir() for entry in folder.iterdir()):
        name = entry.name.lower().lstrip("_")
        ours = name.startswith(("polyattn", "pip-", "__pycache__")) or name in ("pip", "pycache__")
        if not ours and entry.suffix != ".pth" and not (into / entry.name).exists():
            (into / entry.name).symlink_to(entry)


@pytest.fixture(scope="session")
def core_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of core, built from its source distribution."""
    return build(ROOT / "core", tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="session")
def borrowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to everything that is installed here, without polyattn."""
    folder = tmp_path_factory.mktemp("borrowed")
    _borrow([Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")], folder)
    assert (folder / "torch").is_dir(), "torch is not among the packages that this interpreter sees"
    return folder


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory, core_wheel: Path, borrowed: Path) -> Callable[..., Fresh]:
    """`fresh()`: an empty folder; `fresh(wheel, ...)`: with an environment that has core and these installed."""

    def make(*wheels: Path) -> Fresh:
        made = Fresh(tmp_path_factory.mktemp("fresh"), core_wheel, borrowed)
        if wheels:
            made.run(f'"{sys.executable}" -m venv .venv')
            made.run(f"python -m pip install -q '{core_wheel}[cli,testing]' " + " ".join(f"'{w}'" for w in wheels))
        return made

    return make
