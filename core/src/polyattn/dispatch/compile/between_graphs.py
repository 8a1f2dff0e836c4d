"""What compiled code calls between its graphs. Only tracing imports this, when dynamo is there anyway."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["between_graphs"]


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def between_graphs(*given: Any) -> Any:
    """`polyattn.dispatch.placed.at`, by a method."""
    from ..placed import at

    return at(*given)
