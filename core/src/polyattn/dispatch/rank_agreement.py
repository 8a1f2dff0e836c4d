"""Ranks of one job that ask for the same must be served by the same: what their files say may differ.

Ranks compare through the key-value store of torch.distributed, which no rank waits on another for: the first to resolve
a request says what it chose, those that come later compare. So ranks that ask for different things, as the stages of a
pipeline do, are in nobody's way. What was said holds as long as the job: a rank that resolves a request anew, because
something was measured meanwhile, cannot know whether the others ever will. What a process chose before its job began
it chooses anew, and compares, once it has compared anything.

Choices by name are compared too. A program may ask for one request by several names, one after the other: the first way
of each rank is compared with the first of the others, the second with the second. That asks for ranks that make the
same calls. Those of a layer over ranks do not, where heads are uneven or a rank has no tokens: it compares by itself.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

from torch import distributed as dist

from ..contract import AttentionRequest
from ..epoch import bump
from ..errors import ConfigError

__all__ = ["ELSEWHERE", "agree", "distributed", "not_compared"]


class _Before:
    """Whether this process chose anything that it has not compared."""

    chosen = False


_ways: dict[AttentionRequest, dict[str, int]] = {}
"""Of each request, the names that it was asked for by, numbered; empty where nobody named a backend."""

ELSEWHERE: ContextVar[bool] = ContextVar("polyattn_compared_elsewhere", default=False)
"""Whether the caller compares choices itself, before any rank waits for another."""


def distributed() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def not_compared() -> None:
    """A choice was made by a process that is not `distributed`, or not yet."""
    _Before.chosen = True


def agree(request: AttentionRequest, asked: str, choice: str, why: str) -> None:
    """Compare a choice with that of the other ranks, in a job that is `distributed`.

    Args:
        asked: the name that somebody chose by, empty for none. choice: the same text on ranks that chose the same.
        why: for people.

    Raises:
        ConfigError: a rank chose otherwise for the same request.
    """
    if ELSEWHERE.get():
        return
    if _Before.chosen:
        _Before.chosen = False
        bump(traced=False)  # compiled code stays: to trace it anew would cost each rank seconds
    store = dist.distributed_c10d._get_default_store()
    ways = _ways.setdefault(request, {})
    way = ways.setdefault(asked, len(ways))
    key = f"polyattn/choice/{hashlib.sha256(repr(request).encode()).hexdigest()[:24]}/{way}"
    if store.add(f"{key}/count", 1) == 1:
        store.set(key, f"{dist.get_rank()}\n{choice}\n{why}")
        return
    other, chosen, reason = store.get(key).decode().split("\n", 2)
    if chosen != choice:
        raise ConfigError(
            f"rank {dist.get_rank()} would serve {request.summary()} by {why}, and rank {other} began with {reason}: "
            "ranks of one job choose alike. Give them one tuning store (POLYATTN_TUNING_STORE) or copies of one, and "
            "measure before the job; or set POLYATTN_TUNING=off on all, or name one backend on all of them"
        )
