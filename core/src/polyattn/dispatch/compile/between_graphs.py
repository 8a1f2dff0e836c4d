"""What compiled code calls between its graphs. Only tracing imports this, when dynamo is there anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["between_graphs"]


@torch.compiler.disable(reason="polyattn makes it between two graphs: leave fullgraph=True out")  # type: ignore[no-untyped-call,untyped-decorator,unused-ignore]
def between_graphs(run: Callable[..., Any], *given: Any) -> Any:
    """`run`: the graph ends before the call and goes on after it."""
    return run(*given)
