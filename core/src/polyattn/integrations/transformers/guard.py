"""This module decides, when a model is built, what may be given to it under a name that transformers knows nothing
about.

Under its own names transformers checks each model; under any other it checks nothing. Two things would go wrong without
a word. Models that compute attention in their own code are never reached, and would add bool masks to their logits.
Models that were not made for SDPA work on their float mask, or leave causality to it: no other mask will do.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import UnsupportedRequestError

__all__ = ["SHOWN", "asks", "dual_chunks", "guarded"]

SHOWN = frozenset({"flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"})
"""Model types that turn SDPA down for its lack of softcap or sinks only. A test shows that bool masks suit them."""


def guarded(
    base: Any, ours: Callable[[str], bool], trust: dict[type, bool], seen: Callable[[Any], None]
) -> dict[str, Callable[..., Any]]:
    """Make two methods for `base` to carry. Every model asks `get_correct_attn_implementation` for its name when it is
    built or changed; `set_attn_implementation` skips models that it cannot change with a line in the log.

    Args:
        base: transformers' PreTrainedModel. ours: whether a name is one that the guard is for; raises where it is a pin
            of a backend that nobody knows.
        trust: filled here, see `masks.make_mask`.
        seen: called with the Python module of each model.
    """
    original, setter = base.get_correct_attn_implementation, base.set_attn_implementation

    @functools.wraps(original)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        seen(sys.modules.get(type(self).__module__))
        if requested_attention is None or not ours(requested_attention):
            name: str = original(self, requested_attention, *args, **kwargs)
            return name
        # What transformers asks of names with "sdpa" or "flex_attention" in them is about its own functions.
        if not asks(type(self), base):
            raise _unreached(type(self).__name__, requested_attention)
        if ignored := dual_chunks(self.config):
            raise _ignored(type(self).__name__, requested_attention, ignored)
        kind = type(self.config)
        # Two models may share a config class; one that cannot be trusted is enough.
        trust[kind] = trust.get(kind, True) and (self._supports_sdpa or self.config.model_type in SHOWN)
        return requested_attention

    @functools.wraps(setter)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        wanted = dict(_wanted(self.config, attn_implementation))
        for module in self.modules():
            if isinstance(module, base):
                name = wanted.get(id(module.config), attn_implementation)
                if not isinstance(name, str) or not ours(name) or name == module.config._attn_implementation:
                    continue
                if not module._can_set_attn_implementation():
                    refusal = _unchanged if asks(type(module), base) else _unreached
                    raise refusal(type(module).__name__, name)
        setter(self, attn_implementation, *args, **kwargs)

    return {
        "get_correct_attn_implementation": get_correct_attn_implementation,
        "set_attn_implementation": set_attn_implementation,
    }


def _wanted(config: Any, given: Any) -> Iterator[tuple[int, str | None]]:
    """Yield (id of a configuration, the name it is given), None = it keeps its own; as transformers reads such a
    dict."""
    yield id(config), given.get("") if isinstance(given, dict) else given
    for part in getattr(config, "sub_configs", None) or ():
        if (inner := getattr(config, part, None)) is not None:
            yield from _wanted(inner, given.get(part) if isinstance(given, dict) else given)


def dual_chunks(config: Any) -> str:
    """Name the setting by which a model asks for sparse attention in chunks; empty where there is none. Transformers
    does not read it, and plain attention is another function of the same weights."""
    return "dual_chunk_attention_config" if getattr(config, "dual_chunk_attention_config", None) else ""


def asks(kind: type, base: Any) -> bool:
    """Tell whether a model class, or one that it is made from, asks for an attention function."""
    return any(_asks(one) for one in kind.__mro__ if issubclass(one, base) and one is not base)


def _unreached(kind: str, name: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"attn_implementation={name!r} cannot reach {kind}: it computes attention in its own code and never asks for "
        f"an attention function. Load it with attn_implementation='eager'; if it is one part of a model, give the "
        f"parts their own, for example attn_implementation={{'': 'eager', 'text_config': {name!r}}}",
        {name: [f"{kind} computes attention in its own code"]},
    )


def _unchanged(kind: str, name: str) -> UnsupportedRequestError:
    reason = "transformers changes only models in whose code it finds its attention interface"
    return UnsupportedRequestError(
        f"attn_implementation={name!r} cannot be set on {kind} any more: {reason}. Build or load it with "
        f"attn_implementation={name!r} instead",
        {name: [reason]},
    )


def _ignored(kind: str, name: str, setting: str) -> UnsupportedRequestError:
    reason = f"transformers does not read {setting} and computes plain attention"
    return UnsupportedRequestError(
        f"attn_implementation={name!r} is not given to {kind} with {setting}: {reason}. Where plain attention is what "
        f"you want, set config.{setting} = None first",
        {name: [reason]},
    )


def _asks(kind: Any) -> bool:
    """Tell whether the code of a model class asks for an attention function, as transformers itself judges it. Code
    that cannot be read, typed into a shell for instance, counts as asking."""
    try:
        inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return True
    return bool(kind._can_set_attn_implementation())
