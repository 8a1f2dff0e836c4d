"""This module puts the commands together and turns their failures into a message, or JSON, and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import (
    BackendUnavailableError,
    BusyError,
    ConfigError,
    GraphError,
    InternalError,
    InvalidInputError,
    OutOfPagesError,
    PluginError,
    PolyattnError,
    RankError,
    UnsupportedRequestError,
    without_torch,
)
from . import WIDTH
from .commands import Commands

__all__ = ["EXIT_CODES", "app", "run"]

EXIT_CODES: dict[type[PolyattnError], int] = {
    ConfigError: 2,
    InvalidInputError: 2,
    UnsupportedRequestError: 3,
    BackendUnavailableError: 4,
    PluginError: 4,
    OutOfPagesError: 1,
    BusyError: 1,
    GraphError: 1,
    InternalError: 1,
    RankError: 1,
}
OTHER_ERROR = 1
INTERRUPTED = 130
TERMINATED = 143

# typer's own copy of click from 0.26 on, click itself before: typer re-exports one of the two.
_ProblemWithWords: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="polyattn",
    cls=Commands,
    help="One attention call for every chip: what is here, what is chosen, and why.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"polyattn {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        context.get_help()


def run(words: list[str]) -> int:
    """Run a command line; every expected failure becomes a message and an exit code, never a traceback."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell has closed it: what is printed goes nowhere
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good
    try:
        code = _run(words)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _silence(sys.stdout)
        if error.errno != errno.EPIPE:  # else the reader (head, a closed pager) has seen enough, and needs no word
            with contextlib.suppress(OSError):
                print(f"error: the answer cannot be written: {error}", file=sys.stderr)
        return OTHER_ERROR
    return code


_NO_ROOM = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT if hasattr(errno, "EDQUOT") else errno.EIO)
"""Errors that writing an answer may end with."""


def _silence(stream: Any) -> None:
    """Drop what is still buffered, so that it does not fail once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(words: list[str]) -> int:
    # What follows `--` is of the program that `trace` runs.
    own = words[: words.index("--")] if "--" in words else words
    as_json = "--json" in own
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    if "--version" not in own:
        from typer import rich_utils

        # Of help, which typer prints: as wide as `screen` makes answers.
        rich_utils.MAX_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    try:
        with _answers_alone(own):
            code = app(words, prog_name="polyattn", standalone_mode=False)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _report(as_json, BackendUnavailableError.__name__, without_torch(f"`{_command(words)}`"))
        return EXIT_CODES[BackendUnavailableError]
    except PolyattnError as error:
        _report(as_json, type(error).__name__, str(error), getattr(error, "rejected", None))
        return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), OTHER_ERROR)
    except _ProblemWithWords as error:
        said = (_wrong_number(error) or error.format_message()).rstrip(". ")
        _report(as_json, "UsageError", f"{said}{'' if said.endswith('?') else '.'} See `{_command(words)} --help`")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit as ended:
        if ended.code == TERMINATED:
            return TERMINATED
        if ended.code == 0:  # completions were told to a shell
            return 0
        _silence(sys.stdout)  # typer ends so where a reader has gone away
        return OTHER_ERROR
    return code if isinstance(code, int) else 0


def _answers_alone(words: list[str]) -> contextlib.AbstractContextManager[None]:
    """Let nothing else stand beside an answer that is data."""
    if not _read_by_programs(words):
        return contextlib.nullcontext()
    from .rendering import answers_alone

    return answers_alone()


def _read_by_programs(words: list[str]) -> bool:
    """Tell whether an answer is data."""
    text = " ".join(words).replace("--format=", "--format ")
    data = any(word in f"{text} " for word in ("--json ", "--format json ", "--format markdown "))
    return data and not {"-h", "--help"} & set(words)


def _command(words: list[str]) -> str:
    """Name the command that is asked for; typer does not say whose option lacks its value."""
    group, path = typer.main.get_command(app), ["polyattn"]
    for word in words:
        if word not in getattr(group, "commands", {}):
            break
        group = group.commands[word]  # type: ignore[attr-defined]
        path.append(word)
    return " ".join(path)


def _wrong_number(error: Any) -> str:
    """Say in our words that a number is none or out of bounds; empty where something else is wrong. Typer may check
    with pydantic, whose sentences do not name the value. Click's sentences do, and are kept."""
    found: Any = error.__cause__
    option = getattr(error, "param", None)
    if option is None or not hasattr(found, "errors"):
        return ""
    (wrong, *_) = found.errors()
    flag, kind = max(option.opts, key=len), wrong["type"]
    if kind == "greater_than_equal":
        return f"{flag} {wrong['input']}: give {wrong['ctx']['ge']:g} or more"
    what = {"int_parsing": "a whole number", "float_parsing": "a number"}.get(kind)
    return f"{flag} {wrong['input']!r} is not {what}" if what else ""


def _report(as_json: bool, kind: str, message: str, rejected: Mapping[str, list[str]] | None = None) -> None:
    """Print a failure on standard error, or as JSON on standard output. `rejected`: each backend's reasons, if it has
    any."""
    from rich.text import Text

    from .reasons import reasons_table
    from .rendering import screen, show_json

    if as_json:
        more = {} if rejected is None else {"rejected": rejected}
        show_json({"error": {"type": kind, "message": message, **more}})
        return
    console = screen(errors=True)
    # The rest of such a message lists the reasons; the table does that better.
    text = message.partition("\n")[0] if rejected else message
    console.print(Text.assemble(("error: ", "bad"), text))
    if rejected:
        console.print(reasons_table(rejected))
