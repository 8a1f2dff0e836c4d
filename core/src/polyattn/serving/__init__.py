"""What an engine needs around attention: caches, request tables, steps, phases, graphs, drafts.

Names are resolved at first use: importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

_WHERE = {
    "Accepted": "speculative",
    "AttentionBackend": "backend",
    "AttentionLayer": "layer",
    "Beam": "speculative",
    "CacheGroup": "pool",
    "CudaGraph": "graphs",
    "DeviceGraph": "graphs",
    "DraftLinks": "tree",
    "DraftTree": "tree",
    "EncoderBatch": "planning",
    "FakeGraph": "graphs",
    "ForwardBatch": "batch",
    "ForwardMode": "batch",
    "GraphRunner": "graphs",
    "KVCacheConfig": "pool",
    "KVPool": "pool",
    "LayerCache": "pool",
    "Limits": "workspace",
    "Match": "prefix_cache",
    "PageAllocator": "pages",
    "PageCopy": "requests",
    "PrefixCache": "prefix_cache",
    "RequestTable": "requests",
    "StateLayer": "layer",
    "Step": "step",
    "StepBuffers": "step",
    "TreeDraft": "speculative",
    "batch_buckets": "graphs",
    "check_pages": "pages",
    "commit": "speculative",
    "draw_children": "speculative",
    "drawn_accept": "speculative",
    "greedy_accept": "speculative",
    "negotiate_layout": "layout",
    "pages_for": "pool",
    "sampled_accept": "speculative",
    "validate_static": "graphs",
    "vision_attention": "multimodal",
    "wide_tree": "speculative",
}

__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from .backend import AttentionBackend as AttentionBackend
    from .batch import ForwardBatch as ForwardBatch
    from .batch import ForwardMode as ForwardMode
    from .graphs import CudaGraph as CudaGraph
    from .graphs import DeviceGraph as DeviceGraph
    from .graphs import FakeGraph as FakeGraph
    from .graphs import GraphRunner as GraphRunner
    from .graphs import batch_buckets as batch_buckets
    from .graphs import validate_static as validate_static
    from .layer import AttentionLayer as AttentionLayer
    from .layer import StateLayer as StateLayer
    from .layout import negotiate_layout as negotiate_layout
    from .multimodal import vision_attention as vision_attention
    from .pages import PageAllocator as PageAllocator
    from .pages import check_pages as check_pages
    from .planning import EncoderBatch as EncoderBatch
    from .pool import CacheGroup as CacheGroup
    from .pool import KVCacheConfig as KVCacheConfig
    from .pool import KVPool as KVPool
    from .pool import LayerCache as LayerCache
    from .pool import pages_for as pages_for
    from .prefix_cache import Match as Match
    from .prefix_cache import PrefixCache as PrefixCache
    from .requests import PageCopy as PageCopy
    from .requests import RequestTable as RequestTable
    from .speculative import Accepted as Accepted
    from .speculative import Beam as Beam
    from .speculative import TreeDraft as TreeDraft
    from .speculative import commit as commit
    from .speculative import draw_children as draw_children
    from .speculative import drawn_accept as drawn_accept
    from .speculative import greedy_accept as greedy_accept
    from .speculative import sampled_accept as sampled_accept
    from .speculative import wide_tree as wide_tree
    from .step import Step as Step
    from .step import StepBuffers as StepBuffers
    from .tree import DraftLinks as DraftLinks
    from .tree import DraftTree as DraftTree
    from .workspace import Limits as Limits


if not TYPE_CHECKING:  # a checker would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_import_module(f".{_WHERE[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
