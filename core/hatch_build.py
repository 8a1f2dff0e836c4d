"""Puts `plugins/_template`, which `polyattn new-plugin` copies, into the distributions of core.

A plain `force-include` of a folder outside core would be missing when the wheel is built from the source distribution.
There the template lies in `src/` already, so that nothing is left to do. An editable install reads it in the checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "polyattn/cli/template"


class Template(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        template = Path(self.root).parent / "plugins" / "_template"
        if version != "editable" and (template / "pyproject.toml").is_file():
            build_data["force_include"][str(template)] = PLACE if self.target_name == "wheel" else f"src/{PLACE}"
