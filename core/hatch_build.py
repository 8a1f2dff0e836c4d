"""Puts `plugins/_template`, which `polyattn new-plugin` copies, into the distributions of core.

A plain `force-include` of a folder outside core would be missing when the wheel is built from the source distribution.
There the template lies in `src/` already, so that nothing is left to do. An editable install reads it in the checkout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "polyattn/cli/template"
NAMED = {"README.md", "pyproject.toml", "py.typed", "xfails.txt", ".gitignore", ".github/workflows/tests.yml"}
"""What the template is made of beside its Python: backups, notes and secrets that lie in the folder are published by
nobody. Names, or paths from its root."""


def files_of(template: Path) -> Iterator[Path]:
    """The files below `template` that go into core's distributions."""
    for file in sorted(template.rglob("*")):
        inside = file.relative_to(template)
        python = file.suffix == ".py" and not any(part.startswith(".") for part in inside.parts)
        built = {"build", "dist"}.intersection(inside.parts)
        if file.is_file() and not built and (python or {file.name, inside.as_posix()} & NAMED):
            yield file


class Template(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        template = Path(self.root).parent / "plugins" / "_template"
        if version != "editable" and (template / "pyproject.toml").is_file():
            place = PLACE if self.target_name == "wheel" else f"src/{PLACE}"
            for file in files_of(template):
                build_data["force_include"][str(file)] = f"{place}/{file.relative_to(template).as_posix()}"
