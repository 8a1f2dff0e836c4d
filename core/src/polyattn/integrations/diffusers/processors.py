"""This module reaches layers whose code calls torch's SDPA itself, where diffusers has no name to set.

The processor of such a layer gets a class of its own. Its `__call__` is that of diffusers, with a module in place of
`torch.nn.functional` that differs in one function. Nothing of diffusers is changed, and the old class can come back.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as torch_functional

__all__ = ["attention_modules", "calls_sdpa", "direct", "redirect", "restore"]

_SDPA = "scaled_dot_product_attention"
_BEFORE = "_polyattn_before"
_numbers = itertools.count()


def attention_modules(model: Any) -> list[tuple[str, Any]]:
    """List the attention layers of a model that have a processor, as diffusers itself finds them, by name."""
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    kinds = Attention, MochiAttention, AttentionModuleMixin
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    return [(name, module) for name, module in found if getattr(module, "processor", None) is not None]


def direct(processor: Any) -> bool:
    """Tell whether diffusers' names reach a processor."""
    return hasattr(processor, "_attention_backend")


def calls_sdpa(processor: Any) -> bool:
    """Tell whether a processor calls torch's SDPA through a module that can be replaced."""
    kind: Any = type(processor)  # of one that is redirected already, its own: layers may share a processor
    kind = kind.__dict__.get(_BEFORE, kind)
    call = inspect.unwrap(kind.__call__) if callable(processor) else None
    code = getattr(call, "__code__", None)
    return code is not None and _SDPA in code.co_names and bool(_functional(call))


def _functional(call: Any) -> list[str]:
    """The names under which a function knows `torch.nn.functional`."""
    return [name for name in call.__code__.co_names if call.__globals__.get(name) is torch_functional]


def redirect(processor: Any, sdpa: Callable[..., Any]) -> None:
    """Let a processor call `sdpa` where it calls torch's. One that is redirected already is redirected anew."""
    restore(processor)
    kind: Any = type(processor)
    processor.__class__ = _redirected(kind, sdpa)


@functools.lru_cache(maxsize=256)
def _redirected(kind: Any, sdpa: Callable[..., Any]) -> type:
    call: Any = inspect.unwrap(kind.__call__)
    functional = types.ModuleType(torch_functional.__name__)
    functional.__dict__.update({**vars(torch_functional), _SDPA: sdpa})
    # A module that can be imported, where torch.compile looks for what a function of it knows.
    home = types.ModuleType(f"{__name__}.{kind.__name__}_{next(_numbers)}")
    home.__dict__.update(
        {**call.__globals__, **dict.fromkeys(_functional(call), functional), "__name__": home.__name__}
    )
    sys.modules[home.__name__] = home
    made = types.FunctionType(call.__code__, vars(home), call.__name__, call.__defaults__, call.__closure__)
    made.__kwdefaults__, made.__annotations__ = call.__kwdefaults__, call.__annotations__
    return type(kind.__name__, (kind,), {"__call__": made, "__module__": kind.__module__, _BEFORE: kind})


def restore(processor: Any) -> None:
    """Give a processor its own class back; one that was not redirected keeps what it has."""
    before = type(processor).__dict__.get(_BEFORE)
    if before is not None:
        processor.__class__ = before
