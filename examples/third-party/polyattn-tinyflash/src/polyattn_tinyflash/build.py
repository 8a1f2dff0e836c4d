"""The kernel, compiled at its first use by torch's extension loader and kept for later processes."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polyattn.errors import BackendUnavailableError

from .tools import compiler, missing, search_path

__all__ = ["kernel"]

SOURCE = Path(__file__).with_name("kernel.cpp")


def flags() -> list[str]:
    """Compiler flags for this processor. Named features and no `-march=native`: a home folder, and with it the cache of
    built kernels, may be shared by machines that differ."""
    found = ["-O3", "-fno-math-errno"]
    if platform.machine() in ("x86_64", "AMD64") and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        found += ["-mavx2", "-mfma"]
    if sys.platform == "linux":
        found.append("-fopenmp")
    return found


@functools.cache
def kernel() -> Any:
    """torch.ops.polyattn_tinyflash, with `forward` and `backward`.

    Raises:
        BackendUnavailableError: a tool is missing, or the build failed.
    """
    if lacking := missing():
        needs = " and ".join(f"{need.distribution} is missing ({need.hint})" for need in lacking)
        raise BackendUnavailableError(f"tinyflash compiles its kernel at first use: {needs}")
    # One folder per version of everything that goes in, so that no build is ever replaced under a running process.
    inputs = "\n".join([SOURCE.read_text(encoding="utf-8"), torch.__version__, compiler(), *flags()])
    name = f"polyattn_tinyflash_{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"
    try:
        with _tools_on_path():
            # Imported here: it needs setuptools, and brings a second of imports.
            from torch.utils.cpp_extension import load

            openmp = [flag for flag in flags() if flag == "-fopenmp"]
            load(name, str(SOURCE), extra_cflags=flags(), extra_ldflags=openmp, is_python_module=False)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as exc:
        raise BackendUnavailableError(
            f"tinyflash could not build its kernel with {compiler()}: {exc}\nRepair the compiler, or name another one "
            f"in CXX; TORCH_EXTENSIONS_DIR names a folder for built kernels"
        ) from exc
    return torch.ops.polyattn_tinyflash


@contextmanager
def _tools_on_path() -> Iterator[None]:
    before = os.environ.get("PATH")
    os.environ["PATH"] = search_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before
