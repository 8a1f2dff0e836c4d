"""`polyattn config check` lists the settings in force, where each comes from, and everything that is wrong with
them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from .. import tuning
from ..contract import BackendInfo
from ..contract.names import parts
from ..envvars import flag, number, unknown
from ..errors import ConfigError
from ..registry.distributions import availability
from ..registry.manager import PluginManager, get_manager
from ..selection.aliases import is_of
from ..selection.config import Settings, backend_names, check_settings, load_settings, named_backends
from ..selection.inspection import BackendStatus, detect, list_backends
from .options import Json, settings_of, with_options
from .probes import speaks_of
from .rendering import grid, screen, show_json, title

__all__ = ["config", "not_here", "unknown_words", "wrong_variables"]

READ_LATER: tuple[Callable[[], object], ...] = (
    lambda: flag("POLYATTN_VALIDATE"),
    lambda: flag("POLYATTN_SGLANG_DIFFUSION"),
    lambda: number("POLYATTN_REFERENCE_MEMORY_GB", 4.0),
    tuning.mode,
)
"""Readers of variables that are no settings. Calls ask them, and they raise there when the value does not parse."""

MAPPINGS = ("component_attention_backends", "attention_backend_config")

config = typer.Typer(rich_markup_mode="rich", add_completion=False)


@config.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    """Check the configuration before a run does."""
    if context.invoked_subcommand is None:
        context.get_help()


def wrong_variables() -> list[str]:
    """Return one sentence per variable whose value does not parse, of those that `load_settings` does not read."""
    problems = []
    for ask in READ_LATER:
        try:
            ask()
        except ConfigError as problem:
            problems.append(str(problem))
    return problems


def unknown_words(manager: PluginManager) -> tuple[list[str], list[str]]:
    """Return what the lists of plugins name and no plugin is: (wrong, to be told). A slip in the list of plugins to
    leave out would let one in; a plugin to allow may be installed on another machine."""
    found = manager.unknown_words
    wrong = [sentence for variable, sentence in found if variable == "POLYATTN_DISABLE"]
    return wrong, [sentence for variable, sentence in found if variable != "POLYATTN_DISABLE"]


def not_here(settings: Settings, statuses: Iterable[BackendStatus], more: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Return one sentence per setting that names a backend which cannot be used on this machine. This is no mistake:
    the same file may be meant for another one. `more`: as of `check_settings`."""
    known = backend_names(get_manager().backends.values())
    found = {f"{status.name}@{status.platform}": status for status in statuses}
    said = []
    for name, backend in (*named_backends(settings), *more):
        meant = [info for info in known.get(backend, ()) if not info.planned and info.id in found]
        reasons = {info.platform: _lacks(info, backend, found[info.id]) for info in meant}
        if reasons and all(reasons.values()):
            here = [platform for platform in reasons if detect(platform).present]
            why = f"there is no device of {', '.join(sorted(reasons))}"
            if here:
                why = "; ".join(dict.fromkeys(reasons[here[0]]))
            elif len(reasons) == 1:
                ((why, *_),) = reasons.values()
            source = settings.source(name)
            said.append(
                f"{name}={backend!r} ({source}) cannot be used on this machine: {why}; fine if the run is elsewhere"
            )
    return said


def _lacks(info: BackendInfo, word: str, status: BackendStatus) -> tuple[str, ...]:
    """Say why the backend that a word means cannot be used here; empty when it can. An alias may mean the kernels of
    one library, and NAME/KIND does."""
    if status.status != "available" or word in (info.name, info.id):
        return status.reasons
    only = {alias.provider for alias in info.aliases if alias.name == word} or {parts(word.partition("@")[0])[1]}
    answers = [availability(one) for one in info.providers if any(is_of(one.name, kind) for kind in only)]
    lacking = [f"{answer.reason}; {answer.hint}" for answer in answers if not answer.ok]
    return tuple(lacking) if len(lacking) == len(answers) else ()


def _not_linear(settings: Settings, linear: Iterable[tuple[str, str]]) -> list[str]:
    """Return one sentence per flag of linear attention that names a backend of other attention."""
    known = backend_names(get_manager().backends.values())
    said = []
    for name, backend in linear:
        if backend in known and not any(_is_linear(info) for info in known[backend]):
            able = sorted({info.name for infos in known.values() for info in infos if _is_linear(info)})
            said.append(
                f"{name}={backend!r} ({settings.source(name)}) serves no linear attention: name {', '.join(able)}"
            )
    return said


def _is_linear(info: BackendInfo) -> bool:
    return any(speaks_of(row, "linear") for provider in info.providers for row in provider.rows)


def in_force(settings: Settings) -> list[dict[str, Any]]:
    """List every setting that somebody set, one entry per component and per option, with its source."""
    found = []
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        if field.name == "sources" or field.name in MAPPINGS or settings.source(field.name) == "default":
            continue
        found.append((field.name, value))
    found += [(f"{MAPPINGS[0]}.{name}", backend) for name, backend in settings.component_attention_backends.items()]
    for backend, options in settings.attention_backend_config.items():
        found += [(f"{MAPPINGS[1]}.{backend}.{option}", value) for option, value in options.items()]
    return [{"name": name, "value": value, "source": settings.source(name)} for name, value in found]


@config.command()
@with_options("config check")
def check(
    file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A config file. Default: the one that POLYATTN_CONFIG names.")
    ] = None,
    *,
    given: Mapping[str, Any],
    as_json: Json = False,
) -> None:
    """Read command line, environment and file as a run would, and list everything that is wrong.

    Exit code 2: something does not parse. 4: a backend that is unknown or planned, an option its backend does not take,
    a file that is not there, a POLYATTN_ variable that nothing reads, a plugin to leave out that nobody is. A backend
    that this machine cannot use is a warning: the run may be elsewhere.
    """
    try:
        settings = load_settings(settings_of(given), os.environ, file)
    except ConfigError as wrong:
        raise ConfigError("\n".join([str(wrong), *wrong_variables(), *unknown()])) from wrong
    if more := wrong_variables():
        raise ConfigError("\n".join([*more, *unknown()]))
    # Flags of a run and no settings: no file or variable has them.
    linear = [(name, word) for name, word in given.items() if name.startswith("linear_attn_") and word is not None]
    settings = dataclasses.replace(settings, sources={**settings.sources, **{n: "command line" for n, _ in linear}})
    manager = get_manager()
    wrong_words, odd_words = unknown_words(manager)
    problems = check_settings(settings, backend_names(manager.backends.values()), linear)
    problems += _not_linear(settings, linear) + wrong_words + unknown()
    warnings = odd_words + not_here(settings, list_backends(), linear)
    entries = in_force(settings)
    entries += [{"name": name, "value": word, "source": settings.source(name)} for name, word in linear]
    if as_json:
        show_json({"settings": entries, "problems": problems, "warnings": warnings})
    else:
        _print(entries, problems, warnings)
    if problems:
        raise typer.Exit(4)


def _print(entries: list[dict[str, Any]], problems: list[str], warnings: list[str]) -> None:
    console = screen()
    if entries:
        console.print(title("Settings", "the strongest source of each"))
        table = grid("setting", "value", "source")
        for entry in entries:
            table.add_row(
                Text(entry["name"], style="name"), Text(str(entry["value"])), Text(entry["source"], style="quiet")
            )
        console.print(table)
    else:
        console.print(Text("Nothing is configured: every choice is automatic.", style="quiet"))
    for problem in problems:
        console.print(Text.assemble(("wrong  ", "bad"), problem))
    for warning in warnings:
        console.print(Text.assemble(("warning  ", "warn"), warning))
    if not problems:
        console.print(Text("No problem beside the warnings." if warnings else "No problem found.", style="good"))
