"""This module finds the files that a result of conformance depends on: when one of them changes, its evidence is
stale."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..contract import Provider
from ..contract.hookspecs import PROJECT
from ..errors import PluginError

__all__ = ["KERNELS", "UNPACK", "absolute", "computes", "file_of", "kernels_beside", "packed", "sources_of"]

KERNELS = frozenset((".c", ".cc", ".cl", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp", ".metal", ".mlir", ".mm"))
"""Suffixes of kernel sources."""

UNPACK = "Install the package (`pip install`), or unpack it into a folder"


def packed(file: str) -> str:
    """Return where a module is that is in no file of its own: a zip or a wheel on the path."""
    archive = next((str(one) for one in Path(file).parents if one.is_file()), file)
    return f"its module is in the archive {archive}"


def sources_of(origin: str, providers: Sequence[Provider]) -> tuple[str, ...]:
    """The adapters' files and what they compute with, relative to the folder of the plugin loaded from `origin`.

    Followed are imports within the adapter's own package; of polyattn itself only modules that import torch, since the
    others are records and errors, which compute nothing. Kernels that are no Python (`KERNELS`) count where they lie in
    the folder of a file that was followed, or below it.

    Raises:
        PluginError: an adapter's module cannot be found, or is in an archive.
    """
    if origin and not Path(origin).is_file():
        raise PluginError(f"{packed(origin)}: no file of evidence can be beside it. {UNPACK}")
    folder = Path(origin).parent
    found: set[Path] = set()
    modules: set[Path] = set()
    for provider in providers:
        module = provider.target.partition(":")[0]
        path = file_of(module)
        if path is None:
            raise PluginError(
                f"the adapter {provider.target!r} of provider {provider.name!r} is in no file that can be imported; "
                f"see `polyattn doctor`"
            )
        if not path.is_file():
            raise PluginError(f"{packed(str(path))}, and so is what its results stand on. {UNPACK}")
        _follow(module, path, modules)
    for path in modules:
        found |= {path, *kernels_beside(path)}
    return tuple(sorted(Path(os.path.relpath(path, folder)).as_posix() for path in found))


def _behind(package: str, name: str = "") -> Iterator[str]:
    """The modules that the `__init__.py` of a package of polyattn takes `name` from; without a name, all it takes from.

    Such a file imports no torch itself: it shows the names of modules that do.
    """
    file = file_of(package) if package.startswith(f"{PROJECT}.") else None
    if file is not None and file.name == "__init__.py":
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                yield from (owner for bound, (owner, _) in absolute(node, package, file).items() if name in ("", bound))


def kernels_beside(path: Path) -> Iterator[Path]:
    """Kernel sources that are no Python, in the folder of a module or below it."""
    return (kernel for kernel in path.parent.rglob("*") if kernel.suffix in KERNELS)


def _follow(module: str, path: Path, found: set[Path]) -> None:
    if path in found:
        return
    found.add(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for owner, name in absolute(node, module, path).values():
                whole = f"{owner}.{name}" if name else owner
                for one in (owner, whole, *_behind(owner, name), *_behind(whole)):
                    if one.partition(".")[0] == module.partition(".")[0]:
                        file = file_of(one)
                        if file is not None and (module.partition(".")[0] != PROJECT or computes(file)):
                            _follow(one, file, found)


def file_of(module: str) -> Path | None:
    """The file of a module, or None where there is no such module or it has no file."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # ValueError: a module made by hand has no spec
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def absolute(node: ast.Import | ast.ImportFrom, module: str, path: Path) -> dict[str, tuple[str, str]]:
    """Return what an import statement of a module binds: name -> (module, name in it; empty for the module itself)."""
    if isinstance(node, ast.Import):
        plain = {alias.name.partition(".")[0]: (alias.name, "") for alias in node.names if not alias.asname}
        return plain | {alias.asname: (alias.name, "") for alias in node.names if alias.asname}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    return {alias.asname or alias.name: (base, alias.name) for alias in node.names}


def computes(path: Path) -> bool:
    """Return whether a module of polyattn imports torch as a whole: the others are records and errors."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    return any(name.partition(".")[0] == "torch" for name in names)
