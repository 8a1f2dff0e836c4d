"""Which backend serves each attention layer of a model, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ...dispatch import attention
from ...errors import ConfigError
from ...inspection import explain
from ...selection import Selection
from ...varlen import varlen_attention
from .attention import make_forward
from .registry import entries, interfaces

__all__ = ["LayerReport", "report"]


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One attention call: the layer's name in the model, its class, the `attn_implementation` it asked for, and the
    selection with its reasons."""

    layer: str
    kind: str
    implementation: str
    selection: Selection

    def __str__(self) -> str:
        chosen = self.selection
        return f"{self.layer} ({self.kind}, {self.implementation}): {chosen.id} by {chosen.source}: {chosen.why}"


def report(model: Any, *args: Any, **kwargs: Any) -> list[LayerReport]:
    """Run `model(*args, **kwargs)` once and say who served its attention calls, in the order they came.

    Selections are complete: `.selection.rejected` has everybody's reasons. Not for compiled models, and nothing else
    should run attention in this process meanwhile.

    Raises:
        ConfigError: nothing is installed, or no call of the model reached polyattn.
    """
    if not entries():
        raise ConfigError("report() needs an installed name; call polyattn.integrations.transformers.install() first")
    functions = interfaces()[0]
    layers = {id(module): name for name, module in model.named_modules()}
    found: list[LayerReport] = []

    def recording(name: str, backend: str | None, harmless: frozenset[str]) -> Callable[..., Any]:
        def ask(call: Callable[..., Any], module: Any, *given: Any, **options: Any) -> Any:
            selection = explain(call, *given, **options)
            kind = type(module).__name__
            found.append(LayerReport(layers.get(id(module), kind), kind, name, selection))
            return call(*given, **options)

        def forward(module: Any, *given: Any, **options: Any) -> Any:
            def dense(*q: Any, **kw: Any) -> Any:
                return ask(attention, module, *q, **kw)

            def packed(*q: Any, **kw: Any) -> Any:
                return ask(varlen_attention, module, *q, **kw)

            return make_forward(backend, harmless, dense, packed)(module, *given, **options)

        return forward

    before = dict(functions._global_mapping)
    try:
        for name, entry in entries().items():
            functions.register(name, recording(name, entry.backend, entry.harmless))
        model(*args, **kwargs)
    finally:
        for name in entries():
            functions.register(name, before[name])
    if not found:
        used = getattr(getattr(model, "config", None), "_attn_implementation", None)
        raise ConfigError(
            f"no attention call of {type(model).__name__} reached polyattn: its attn_implementation is {used!r}; "
            f"set one of {', '.join(list(entries())[:4])}, ... with model.set_attn_implementation(...)"
        )
    return found
