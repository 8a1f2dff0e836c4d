"""What a traced call raises. What a constant function raises, dynamo takes for a bug in PyTorch, and says so; a plan
that cannot be made is therefore a plan that raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import PolyattnError, UnsupportedRequestError

__all__ = ["INFERENCE_ONLY", "raising", "refuse_transforms"]

INFERENCE_ONLY = (
    "attention over a paged cache is inference only; run it under torch.no_grad(), or train with attention()"
)


def raising(error: PolyattnError) -> Callable[..., Any]:
    """A plan that raises `error` when it is called; dynamo does not look into it.

    Where a graph may break, it breaks here and the plan runs. Where it may not (`fullgraph=True`), dynamo raises its
    own `Unsupported`, which quotes the reason. A plan that dynamo sees raise would have it give the caller's function
    up for good, and run the next calls, which may be valid, uncompiled.
    """
    kind, given, state, cause = type(error), error.args, dict(vars(error)), error.__cause__

    def plan(*args: Any, **kwargs: Any) -> Any:
        # Anew each time: an exception keeps the frames, and so the tensors, of the call that raised it. As pickle does
        # it, without __init__: a plugin's own class may want more than a message.
        made = kind.__new__(kind, *given)
        made.__dict__.update(state)
        raise made from cause

    reason = f"it raises {kind.__name__}: {error}"
    hidden: Callable[..., Any] = torch.compiler.disable(plan, reason=reason)  # type: ignore[no-untyped-call]
    return hidden


def refuse_transforms(around: str) -> None:
    """What torch.func derives while it is traced it must look into, and would take a custom op for a constant; nor has
    an op a rule of batching."""
    if around in ("grad", "gradgrad", "jvp", "vmap"):
        raise UnsupportedRequestError(
            f"attention inside a torch.func transform ({around}) that is compiled, by a custom op that no transform "
            "looks into. Leave what is transformed to eager code (torch.compiler.disable, or compile the function "
            "without the transform), or use attention(), whose torch_sdpa and reference are traced"
        )
