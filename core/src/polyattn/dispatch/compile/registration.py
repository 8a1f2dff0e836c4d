"""Register the custom ops as soon as both polyattn and torch are imported, whichever comes first, and their FLOP
formulas as soon as torch's counter is.

A saved graph names its ops: to load one, torch has to know them before anything of polyattn is used. Nothing of torch
is imported for that.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["register"]

_AFTER = {"torch": (".custom_ops", "...methods.custom_op"), "torch.utils.flop_counter": (".flops",)}
"""A module of torch, and which of ours register something with it."""


def register() -> None:
    """Now where torch is imported, else right after it is."""
    for name, ours in _AFTER.items():
        there = sys.modules.get(name)
        if there is None:
            sys.meta_path.insert(0, _After(name, ours))
        elif not getattr(
            there.__spec__, "_initializing", False
        ):  # else torch itself imports polyattn: not all is there
            _load(ours)


def _load(ours: Sequence[str]) -> None:
    for name in ours:
        importlib.import_module(name, __package__)


class _After:
    """Finds a module as all other finders do, and imports ours once it has run. It does not name `importlib.abc`, which
    costs a third of the import of polyattn."""

    def __init__(self, name: str, ours: Sequence[str]) -> None:
        self._name, self._ours = name, ours
        self._asked = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._asked:
            return None
        self._asked = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _load(self._ours)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
