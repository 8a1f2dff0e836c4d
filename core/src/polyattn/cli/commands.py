"""The commands by name. A command is imported when it is run: the list of commands and the version need none."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["COMMANDS", "Commands"]


class _Where(NamedTuple):
    module: str
    function: str
    summary: str


COMMANDS = {
    "list": _Where(
        "listing",
        "list_command",
        "List the backends: where each comes from, whether it can be used here, and how far it was shown to work.",
    ),
    "matrix": _Where(
        "matrix",
        "matrix",
        "Show which backend exists on which platform, how far it was shown to work, and what its kernels can do.",
    ),
    "explain": _Where(
        "explain",
        "explain",
        "Say which backend serves a request, what it needs to be rewritten, who decided, and why not the others.",
    ),
    "doctor": _Where(
        "doctor",
        "doctor",
        "Examine this machine: devices, versions, plugins, variables, and why a backend cannot be used.",
    ),
    "demo": _Where(
        "demo", "demo", "See it work on this machine's CPU, with real weights; offline, about half a minute."
    ),
    "conform": _Where(
        "conform",
        "conform",
        "Try everything that a backend declares against the reference, and see that it refuses the rest with a reason.",
    ),
    "new-plugin": _Where(
        "new_plugin",
        "new_plugin",
        "Write a new plugin: a package with one working backend, its conformance test and its CI.",
    ),
    "fuzz": _Where(
        "fuzz",
        "fuzz",
        "Draw random calls, fine and wrong ones, and compare what every backend makes of them with the reference.",
    ),
    "generate": _Where(
        "generate",
        "generate",
        "Continue prompts with a causal LM, or make an image or a video with a pipeline of diffusers.",
    ),
    "serve": _Where(
        "serve",
        "serve",
        "Serve a causal LM over OpenAI's protocol: continuous batching over a paged KV cache, one backend per phase.",
    ),
    "bench": _Where(
        "bench",
        "bench",
        "Measure every candidate for every row, and libraries that are called directly, each checked before it is "
        "timed.",
    ),
    "tune": _Where(
        "tune",
        "tune",
        "Measure which backend serves requests fastest on this machine; calls use it from then on.",
    ),
    "trace": _Where(
        "trace",
        "trace",
        "Run a program and record which requests it makes of polyattn, at which lengths and how often.",
    ),
    "verify": _Where(
        "verify",
        "verify",
        "Show what works on this device: run conformance of every backend that can run here, and a short benchmark.",
    ),
    "video-map": _Where(
        "video_map",
        "video_map",
        "Draw the map of a sparse video method: the keys that one query sees, frame by frame, and those of all "
        "queries.",
    ),
    "parallel-plan": _Where(
        "parallel_plan",
        "parallel_plan",
        "Predict what layers over several devices cost each rank, and say which mesh to take.",
    ),
    "config": _Where("config_check", "config", "Check the configuration before a run does."),
}
"""In the order of the help. The summary is the first paragraph of the command's docstring."""


class _Imported(MutableMapping[str, Any]):
    """The commands, each imported when it is looked up."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            where = COMMANDS[name]
            found = getattr(importlib.import_module(f"{__package__}.{where.module}"), where.function)
            if not isinstance(found, typer.Typer):
                one = typer.Typer(add_completion=False, rich_markup_mode="rich")
                one.command(name)(found)
                found = one
            self._found[name] = typer.main.get_command(found)
            self._found[name].name = name
        return self._found[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._found[name] = command

    def __delitem__(self, name: str) -> None:
        raise TypeError("commands are not taken out")

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Commands(TyperGroup):
    """The group of all commands. Where they are only listed, for the help or a shell, none is imported."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Imported()
        self._listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands."""
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command, or what the list says of it."""
        if self._listing and cmd_name in COMMANDS:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name].summary)
        return self.commands.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        with self._listed():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the name of a command."""
        with self._listed():
            return super().shell_complete(ctx, incomplete)

    @contextlib.contextmanager
    def _listed(self) -> Iterator[None]:
        self._listing = True
        try:
            yield
        finally:
            self._listing = False
