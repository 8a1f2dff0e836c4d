"""What building the kernel needs beside torch, found without torch: polyattn asks when it lists backends."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig

from polyattn.contract import Requirement

__all__ = ["compiler", "missing", "search_path"]


def search_path() -> str:
    """PATH, and the folder of this environment's commands: pip puts ninja there, activated or not."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def compiler() -> str:
    """The C++ compiler that torch's extension loader will call."""
    return (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]


def missing() -> tuple[Requirement, ...]:
    """The tools that are not here. They may come from anywhere (pip, apt, conda), so the commands decide, not the
    metadata of a distribution."""
    wanted = {
        "ninja": Requirement("ninja", hint="pip install ninja"),
        compiler(): Requirement("a C++ compiler", hint="install g++ or clang++, or name one in CXX"),
    }
    return tuple(need for command, need in wanted.items() if shutil.which(command, path=search_path()) is None)
