"""Peers: libraries that are called directly beside polyattn's candidates. They are plugins of the benchmark, not part
of polyattn.

A module, or a folder that is a package, lists them in `PEERS`, name -> `Peer`. What a peer's target names is imported
when the peer is first prepared: a function from the inputs of a problem (`polyattn.bench.measure.Inputs`) to a call
from the number of an input set to the result, as the contract lays it out. Beforehand it brings the tensors into its
own layout, and plans what its users plan once per step. It raises `UnsupportedRequestError` for what it has no kernel
for.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, did_you_mean
from ..registry.distributions import distribution_version

__all__ = ["Peer", "load", "named", "versions_of"]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library, or one of its kernels.

    Attributes:
        target: "module:function"; a module that begins with a dot is beside the one that lists the peer.
        library: what its figures are to be ascribed to. compiles: its kernels are made at their first call.
        distributions: whose versions a result names. package: of a relative target; `load` fills it in.
    """

    target: str
    library: str
    compiles: bool = False
    distributions: tuple[str, ...] = ()
    package: str = ""

    def prepare(self, inputs: Any) -> Any:
        """Return what to call for each input set."""
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module, self.package or None), function)(inputs)


def load(places: Sequence[str]) -> dict[str, Peer]:
    """The peers of modules and folders.

    Raises:
        ConfigError: a place that is neither, cannot be imported or lists none, or two peers of one name.
    """
    found: dict[str, Peer] = {}
    for place in places:
        module = _module(place)
        listed = getattr(module, "PEERS", None)
        if not isinstance(listed, Mapping) or not all(
            isinstance(name, str) and isinstance(peer, Peer) for name, peer in listed.items()
        ):
            raise ConfigError(f"--peers {place}: PEERS must be a mapping of names to polyattn.bench.Peer")
        for name, peer in listed.items():
            if name in found or "/" in name:
                raise ConfigError(f"--peers {place}: {name!r} is taken, or has a slash in it: give it another name")
            found[name] = dataclasses.replace(peer, package=peer.package or module.__name__)
    return found


def _module(place: str) -> ModuleType:
    path = Path(place)
    if path.is_dir():
        # Under a name of its own, so that `peers` of two folders, or of nobody, are not mixed up.
        name = f"polyattn_bench_{path.resolve().name}"
        spec = importlib.util.spec_from_file_location(
            name, path / "__init__.py", submodule_search_locations=[str(path.resolve())]
        )
        if spec is None or spec.loader is None or not (path / "__init__.py").is_file():
            raise ConfigError(f"--peers {place}: the folder has no __init__.py that lists PEERS")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as exc:  # a module may raise anything
            del sys.modules[name]
            raise _broken(place, exc) from exc
        return module
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{place}.".startswith(f"{exc.name}."):
            raise _broken(place, exc) from exc
        raise ConfigError(f"--peers {place}: neither a folder nor a module that can be imported") from exc
    except Exception as exc:
        raise _broken(place, exc) from exc


def _broken(place: str, exc: Exception) -> ConfigError:
    return ConfigError(
        f"--peers {place}: it raises {type(exc).__name__} when it is imported: {exc}. Repair it, or leave it out; what "
        f"a peer's library needs is imported by the function that its target names"
    )


def named(known: Mapping[str, Any], patterns: Sequence[str], flag: str) -> list[str]:
    """The names that patterns select, in their order (`*` stands for anything).

    Raises:
        ConfigError: a pattern that names none.
    """
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ConfigError(
                f"{flag} {pattern!r} names none.{did_you_mean(pattern, known)} There are: {', '.join(known) or 'none'}"
            )
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def versions_of(peers: Mapping[str, Peer]) -> dict[str, str]:
    """Return the versions of the peers' distributions that are here."""
    names = sorted({name for peer in peers.values() for name in peer.distributions})
    return {name: version for name in names if (version := distribution_version(name))}
