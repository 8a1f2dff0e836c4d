"""What a model may be given under a name that transformers knows nothing about. Asked when a model is built.

Under its own names transformers checks each model; under any other it checks nothing. Two things would go wrong without
a word. Models that compute attention in their own code are never reached, and would add bool masks to their logits.
Models that were not made for SDPA work on their float mask, or leave causality to it: no other mask will do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from ...errors import UnsupportedRequestError

__all__ = ["SHOWN", "dual_chunks", "guarded"]

SHOWN = frozenset({"flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"})
"""Model types that turn SDPA down for its lack of softcap or sinks only. A test shows that bool masks suit them."""


def guarded(base: Any, ours: Callable[[str], bool], trust: dict[type, bool]) -> Callable[..., str]:
    """Wrap `get_correct_attn_implementation`, which every model asks for its name when it is built or changed.

    Args:
        base: transformers' PreTrainedModel. ours: whether a name is one that the guard is for.
        trust: filled here, see `masks.make_mask`.
    """
    original = base.get_correct_attn_implementation

    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention is None or not ours(requested_attention):
            name: str = original(self, requested_attention, *args, **kwargs)
            return name
        # What transformers asks of names with "sdpa" or "flex_attention" in them is about its own functions.
        if not any(_asks(kind) for kind in type(self).__mro__ if issubclass(kind, base) and kind is not base):
            raise _unreached(type(self).__name__, requested_attention)
        kind = type(self.config)
        # Two models may share a config class; one that cannot be trusted is enough.
        trust[kind] = trust.get(kind, True) and (self._supports_sdpa or self.config.model_type in SHOWN)
        return requested_attention

    return get_correct_attn_implementation


def dual_chunks(config: Any) -> str:
    """The name of a setting by which a model asks for sparse attention in chunks, which transformers does not read:
    plain attention is another function of the same weights. Empty where there is none."""
    return "dual_chunk_attention_config" if getattr(config, "dual_chunk_attention_config", None) else ""


def _unreached(kind: str, name: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"attn_implementation={name!r} cannot reach {kind}: it computes attention in its own code and never asks for "
        f"an attention function. Load it with attn_implementation='eager'; if it is one part of a model, give the "
        f"parts their own, for example attn_implementation={{'': 'eager', 'text_config': {name!r}}}",
        {name: [f"{kind} computes attention in its own code"]},
    )


def _asks(kind: Any) -> bool:
    """Whether the code of a model class asks for an attention function, as transformers itself judges it. Code that
    cannot be read, typed into a shell for instance, has the benefit of the doubt."""
    try:
        inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return True
    return bool(kind._can_set_attn_implementation())
