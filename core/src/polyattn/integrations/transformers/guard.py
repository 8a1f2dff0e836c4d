"""Models that compute attention in code of their own: the name cannot reach them, so they refuse it when they are built.

transformers checks such models for its own names only. Under another name they would get bool masks that their code
adds to the logits, or no mask at all, and the numbers would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import UnsupportedRequestError

__all__ = ["guarded"]


def guarded(original: Callable[..., str], ours: Callable[[str], bool]) -> Callable[..., str]:
    """Wrap `PreTrainedModel.get_correct_attn_implementation`, which every model asks when it is built.

    Args:
        original: transformers' method. ours: whether a name is one that the guard is for.
    """

    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> str:
        name = original(self, *args, **kwargs)
        if ours(name) and not self._can_set_attn_implementation():
            kind = type(self).__name__
            reason = f"{kind} computes attention in its own code and never asks for an attention function"
            raise UnsupportedRequestError(
                f"attn_implementation={name!r} cannot reach {kind}: {reason.removeprefix(kind + ' ')}. Load it with "
                f"attn_implementation='eager'; if it is one part of a model, give the parts their own, "
                f"attn_implementation={{'': 'eager', 'text_config': {name!r}}}",
                {name: [reason]},
            )
        return name

    return get_correct_attn_implementation
