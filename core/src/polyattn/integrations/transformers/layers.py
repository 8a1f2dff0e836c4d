"""This module reports which backend serves each attention layer of a model of transformers, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ...dispatch.dense import attention
from ...dispatch.varlen import varlen_attention
from ...errors import ConfigError
from ..common.reports import LayerReport, Recorder
from .attention import make_forward
from .guard import asks
from .linear import recorded
from .registry import entries, interfaces

__all__ = ["LayerReport", "recording", "report"]


def report(model: Any, *args: Any, **kwargs: Any) -> list[LayerReport]:
    """Run `model(*args, **kwargs)` once and say who served its attention calls, in the order they came, those of linear
    attention among them.

    Selections are complete: `.selection.rejected` has everybody's reasons. Not for compiled models, and nothing else
    should run attention in this process meanwhile.

    Raises:
        ConfigError: nothing is installed, or no call of the model reached polyattn.
    """
    if not entries():
        raise ConfigError("report() needs an installed name; call polyattn.integrations.transformers.install() first")
    recorder = Recorder(model)
    with recording(recorder), recorded(model, recorder):
        model(*args, **kwargs)
    if not recorder.found:
        raise ConfigError(f"no attention call of {type(model).__name__} reached polyattn: {_why(model)}")
    return recorder.found


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let a recorder make the calls of every installed name while it lasts. Nothing else should run attention
    meanwhile."""
    functions = interfaces()[0]

    def recorded_as(name: str, backend: str | None, harmless: frozenset[str]) -> Callable[..., Any]:
        def forward(module: Any, *given: Any, **options: Any) -> Any:
            def dense(*tensors: Any, **words: Any) -> Any:
                return recorder.call(attention, module, name, *tensors, **words)

            def packed(*tensors: Any, **words: Any) -> Any:
                return recorder.call(varlen_attention, module, name, *tensors, **words)

            return make_forward(backend, harmless, dense, packed)(module, *given, **options)

        return forward

    before = dict(functions._global_mapping)
    try:
        for name, entry in entries().items():
            functions.register(name, recorded_as(name, entry.backend, entry.harmless))
        yield
    finally:
        for name in entries():
            functions.register(name, before[name])


def _why(model: Any) -> str:
    base, names = interfaces()[2], list(entries())
    kind, used = type(model).__name__, getattr(getattr(model, "config", None), "_attn_implementation", None)
    if own := sorted(
        {type(part).__name__ for part in model.modules() if isinstance(part, base) and not asks(type(part), base)}
    ):
        return (
            f"{', '.join(own)} computes attention in its own code and never asks for an attention function, so no name "
            f"reaches it; leave it at attn_implementation='eager'"
        )
    if used in names:
        return (
            f"its attn_implementation is {used!r} already, and it never asked for an attention function: this call ran "
            f"no attention layer, or {kind} has none; there is nothing to report"
        )
    return (
        f"its attn_implementation is {used!r}; set one of {', '.join(names[:4])}, ... with "
        f"model.set_attn_implementation(...)"
    )
