"""Building the functions of a plan: the kernel's own at the leaves, wrapped by each rewrite on the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import AttentionRequest, Bound
from .catalogue import get_lowering
from .planning import Plan

__all__ = ["bind"]


def bind(plan: Plan, load: Callable[[AttentionRequest], Bound], load_helper: Callable[[Any], Bound]) -> Bound:
    """The functions that serve `plan.request`.

    Args:
        load: the backend's functions for a request that it takes as it is.
        load_helper: the functions of a helper, as the planner named it.
    """
    if plan.rewrite is None:
        return load(plan.request)
    inner = [bind(part, load, load_helper) for part in plan.inner]
    helpers = [load_helper(helper) for helper in plan.helpers]
    return get_lowering(plan.lowering).bind(plan.request, plan.rewrite, inner, helpers)
