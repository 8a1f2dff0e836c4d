"""This module records which backend serves each attention layer of a model, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ...selection.inspection import explain
from ...selection.select import Selection

__all__ = ["LayerReport", "Recorder"]


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """A report is about one attention call: the layer's name in the model, its class, the name under which the host
    asked for attention, and the selection with its reasons."""

    layer: str
    kind: str
    implementation: str
    selection: Selection

    def __str__(self) -> str:
        chosen = self.selection
        return f"{self.layer} ({self.kind}, {self.implementation}): {chosen.id} by {chosen.source}: {chosen.why}"


class Recorder:
    """A recorder makes the calls of a model's layers and keeps who served them.

    Args:
        model: a module whose layers have names, or None where a host's layers have none.
        compute: whether calls are made; else they are asked about, and answer nothing of the right shape.

    Attributes:
        found: a report for each call, in the order they came.
    """

    def __init__(self, model: Any = None, *, compute: bool = True) -> None:
        modules: Mapping[int, str] = {}
        if model is not None:
            modules = {id(module): name for name, module in model.named_modules()}
        self._names, self._compute = modules, compute
        self.found: list[LayerReport] = []

    def call(self, call: Callable[..., Any], module: Any, implementation: str, *given: Any, **options: Any) -> Any:
        """Make one of polyattn's calls and record who serves it.

        Args:
            call: `polyattn.attention` or another call. module: the layer. implementation: the host's name for
                attention. given, options: of the call.
        """
        selection = explain(call, *given, **options)
        kind = type(module).__name__
        self.found.append(LayerReport(self._names.get(id(module), kind), kind, implementation, selection))
        if not self._compute:
            query, _, value = given[:3]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return call(*given, **options)
