"""Hosts are programs that can be taught to call polyattn: `polyattn.integrations.transformers.install()`.

One room per host, imported when it is first named; importing a room imports nothing of its host.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .common.hosts import OLDEST, outdated

__all__ = ["HOSTS", "OLDEST", "outdated"]

HOSTS = ("diffusers", "sglang", "torch", "transformers", "vllm")

if TYPE_CHECKING:
    from . import diffusers as diffusers
    from . import sglang as sglang
    from . import torch as torch
    from . import transformers as transformers
    from . import vllm as vllm


if not TYPE_CHECKING:  # a checker would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name in HOSTS:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; hosts: {', '.join(HOSTS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *HOSTS])
