"""This module finds plugins that import torch, or a library of their providers, when they are loaded: every program
that lists backends would wait for it. No torch here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from ..contract import BackendInfo
from ..contract.hookspecs import PROJECT
from ..errors import InternalError
from ..registry.manager import PluginReport

__all__ = ["early_imports"]

# A process of its own, because what this one has imported cannot be told apart. There nothing heavy is imported: who
# asks for it is told, and gets an ImportError.
_SCRIPT = """
import contextlib, importlib, importlib.abc, json, os, sys

asked = json.loads(sys.stdin.read())
sys.path[:] = asked["path"]
said = {}


class Watch(importlib.abc.MetaPathFinder):
    heavy, name = frozenset(), ""

    def find_spec(self, fullname, path=None, target=None):
        if fullname in self.heavy:
            said.setdefault(self.name, []).append(fullname)
            raise ModuleNotFoundError(f"{fullname} is not to be imported here", name=fullname)


watch = Watch()
sys.meta_path.insert(0, watch)
for name, module, heavy in asked["plugins"]:
    watch.name, watch.heavy = name, frozenset(heavy)
    with contextlib.suppress(BaseException), open(os.devnull, "w") as quiet:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            importlib.import_module(module)
print(json.dumps(said), flush=True)
# Nothing that a plugin has left to be done at the end is done.
os._exit(0)
"""


def early_imports(plugins: Iterable[PluginReport], backends: Iterable[BackendInfo]) -> list[str]:
    """A sentence for each plugin whose module imports torch or a library of its providers.

    Args:
        plugins: those to look at; that can be used, or whose import ended with an error. backends: of all plugins.
    """
    known = {report.name: report for report in plugins if report.state in ("ready", "broken")}
    asked = [_asked(report, tuple(backends)) for report in known.values()]
    given = json.dumps({"path": sys.path, "plugins": asked})
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InternalError(f"looking at what plugins import ended with code {done.returncode}: {done.stderr.strip()}")
    try:
        said: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as exc:
        raise InternalError(f"looking at what plugins import ended with {done.stdout.strip()!r}") from exc
    return [
        f"plugin {known[name].label} imports {', '.join(dict.fromkeys(heavy))} when it is loaded, so that every "
        f"program which lists backends waits for it: import it in the adapter, which is loaded at the first call"
        for name, heavy in said.items()
    ]


def _asked(report: PluginReport, backends: tuple[BackendInfo, ...]) -> tuple[Any, ...]:
    own = [info for info in backends if info.id in report.backends]
    needs = [need.module for info in own for provider in info.providers for need in provider.requires]
    libraries = {"torch", *(module.partition(".")[0] for module in needs)}
    return report.name, report.module, sorted(libraries - {"", PROJECT, report.module.partition(".")[0]})
