"""`polyattn new-plugin` writes a package with a working backend, copied from `plugins/_template` under another name."""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ..errors import ConfigError, did_you_mean
from ..registry.manager import get_manager
from .options import Json
from .rendering import screen, show_json, title

__all__ = ["new_plugin", "template_files", "write_package"]

TEMPLATE = "template"
"""The template's own backend. Everywhere in its files this word is replaced, so it stands for nothing else there."""

PLATFORM = 'PLATFORM = "cpu"'
"""The line of the template's records that names the platform."""

LEFTOVERS = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".venv", "build", "dist"}
"""Folders that working on the template in a checkout leaves behind."""


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of a new plugin: `backend`, `module` and `distribution`, which is the folder's name too."""

    backend: str

    @property
    def module(self) -> str:
        return f"polyattn_{self.backend}"

    @property
    def distribution(self) -> str:
        return f"polyattn-{self.backend.replace('_', '-')}"

    def put_into(self, text: str) -> str:
        """Replace the template's names in a path or in a file's text by these."""
        return re.sub(f"(polyattn-)?{TEMPLATE}", lambda found: self.distribution if found[1] else self.backend, text)


def new_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The backend's name: acme makes the package polyattn-acme.")
    ],
    platform: Annotated[
        str,
        typer.Option(metavar="NAME", help="The platform that the backend runs on, as `polyattn doctor` lists them."),
    ] = "cpu",
    into: Annotated[Path, typer.Option(metavar="DIR", help="The folder that the package is made in.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write a new plugin: a package with one working backend, its conformance test and its CI.

    It goes to polyattn-NAME/ in the current folder. Install it and its tests are green; then put your kernel into it.
    """
    names = check_name(name, platform)
    folder = into / names.distribution
    files = write_package(folder, names, platform)
    next_steps = [f'python -m pip install -e "{_as_typed(folder)}[test]"', f"polyattn conform {names.backend}"]
    if as_json:
        show_json(
            {
                "backend": names.backend,
                "platform": platform,
                "distribution": names.distribution,
                "module": names.module,
                "folder": str(folder),
                "files": files,
                "next": next_steps,
            }
        )
        return
    console = screen()
    console.print(title(f"{folder}/", f"{len(files)} files"))
    console.print(Text("\n".join(f"  {file}" for file in files), style="quiet"))
    console.print(title("Next", "its README.md says what to change; docs/adapters.md has other shapes of kernels"))
    # Not wrapped: these lines are there to be copied.
    console.print(Text("\n".join(f"  {line}" for line in next_steps)), soft_wrap=True)


def _as_typed(folder: Path) -> str:
    """Return a folder as pip must be given it: a bare name would be looked up on an index."""
    return str(folder) if folder.is_absolute() else f"./{folder.as_posix()}"


def check_name(name: str, platform: str) -> Names:
    """Return the names of a new backend `name` on `platform`.

    Raises:
        ConfigError: the name is no name of a backend, or one that is here has it; or there is no such platform.
    """
    manager = get_manager()
    if platform not in manager.platforms:
        known = ", ".join(sorted(manager.platforms))
        raise ConfigError(
            f"--platform {platform!r} is not known.{did_you_mean(platform, manager.platforms)} Allowed: {known}"
        )
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise ConfigError(
            f"{name!r} is no name for a backend: give lower-case letters and digits, a letter first, with single "
            f"hyphens or underscores between them, such as 'acme' or 'acme-fa2'"
        )
    names = Names(name.replace("-", "_"))
    if keyword.iskeyword(names.backend):
        raise ConfigError(f"{name!r} is a keyword of Python: choose another name, such as '{name}-attention'")
    for report in manager.plugins.values():
        if names.backend == report.name or names.distribution == report.distribution:
            raise ConfigError(
                f"a plugin named {names.backend!r} is installed here: {report.label}. Choose another name, or "
                f"uninstall it"
            )
    for info in manager.backends.values():
        if info.platform == platform and names.backend in (info.name, *(alias.name for alias in info.aliases)):
            owner = manager.owner(info).label
            raise ConfigError(
                f"the name {names.backend!r} is taken on {platform}, by {info.id} of plugin {owner}. "
                f"Choose another name, or another --platform"
            )
    return names


def write_package(folder: Path, names: Names, platform: str) -> list[str]:
    """Write a package and return its files, relative to `folder`.

    Raises:
        ConfigError: the folder is there already, or cannot be made.
    """
    source = template()
    files = []
    try:
        folder.mkdir()
        for file in template_files(source):
            name = names.put_into(file.relative_to(source).as_posix())
            text = names.put_into(file.read_text(encoding="utf-8")).replace(PLATFORM, f'PLATFORM = "{platform}"')
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
            files.append(name)
    except FileExistsError as exc:
        raise ConfigError(f"{folder} is there already: move it away, or choose another name or --into") from exc
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be written: {exc.strerror or exc}. Choose another --into") from exc
    return files


def template() -> Path:
    """Find the folder of the template. A wheel has it beside this file (core/hatch_build.py puts it there); a checkout
    has it in `plugins/`, which is also where an editable install reads it."""
    here = Path(__file__).parent
    for place in (here / "template", here.joinpath(*[".."] * 4, "plugins", "_template")):
        if (place / "pyproject.toml").is_file():
            return place
    raise ConfigError(f"the files to copy are not in this installation of polyattn ({here}): install it again")


def template_files(folder: Path) -> Iterator[Path]:
    """List the template's files, in order, without what builds and runs of it left behind."""
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        evidence = inside.parent.name == "evidence" and inside.suffix == ".json"  # of another backend
        if file.is_file() and not evidence and not LEFTOVERS.intersection(inside.parts):
            yield file
