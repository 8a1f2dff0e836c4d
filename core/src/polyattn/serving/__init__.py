"""This room has what an engine needs around attention: caches, request tables, steps, phases, graphs, drafts.

Names are resolved at first use: importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy as _lazy

_WHERE = {
    "Accepted": "speculative",
    "AttentionBackend": "attention.backend",
    "AttentionLayer": "layer",
    "Beam": "speculative",
    "CacheGroup": "kv_cache.pool",
    "CudaGraph": "graphs.graphs",
    "DeviceGraph": "graphs.graphs",
    "DraftLinks": "step.tree",
    "DraftTree": "step.tree",
    "EncoderBatch": "attention.plan_slots",
    "FakeGraph": "graphs.graphs",
    "ForwardBatch": "step.batch",
    "ForwardMode": "step.batch",
    "GraphRunner": "graphs.graphs",
    "KVCacheConfig": "kv_cache.pool",
    "KVPool": "kv_cache.pool",
    "LayerCache": "kv_cache.pool",
    "Limits": "attention.workspace",
    "Match": "kv_cache.prefix_cache",
    "PageAllocator": "kv_cache.pages",
    "PageCopy": "step.requests",
    "PrefixCache": "kv_cache.prefix_cache",
    "RequestTable": "step.requests",
    "StateLayer": "layer",
    "Step": "step.step",
    "StepBuffers": "step.step",
    "TreeDraft": "speculative",
    "batch_buckets": "graphs.graphs",
    "check_pages": "kv_cache.pages",
    "commit": "speculative",
    "draw_children": "speculative",
    "drawn_accept": "speculative",
    "greedy_accept": "speculative",
    "negotiate_layout": "kv_cache.layout",
    "pages_for": "kv_cache.pool",
    "sampled_accept": "speculative",
    "validate_static": "graphs.graphs",
    "vision_attention": "attention.multimodal",
    "wide_tree": "speculative",
}

__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from .attention.backend import AttentionBackend as AttentionBackend
    from .attention.multimodal import vision_attention as vision_attention
    from .attention.plan_slots import EncoderBatch as EncoderBatch
    from .attention.workspace import Limits as Limits
    from .graphs.graphs import CudaGraph as CudaGraph
    from .graphs.graphs import DeviceGraph as DeviceGraph
    from .graphs.graphs import FakeGraph as FakeGraph
    from .graphs.graphs import GraphRunner as GraphRunner
    from .graphs.graphs import batch_buckets as batch_buckets
    from .graphs.graphs import validate_static as validate_static
    from .kv_cache.layout import negotiate_layout as negotiate_layout
    from .kv_cache.pages import PageAllocator as PageAllocator
    from .kv_cache.pages import check_pages as check_pages
    from .kv_cache.pool import CacheGroup as CacheGroup
    from .kv_cache.pool import KVCacheConfig as KVCacheConfig
    from .kv_cache.pool import KVPool as KVPool
    from .kv_cache.pool import LayerCache as LayerCache
    from .kv_cache.pool import pages_for as pages_for
    from .kv_cache.prefix_cache import Match as Match
    from .kv_cache.prefix_cache import PrefixCache as PrefixCache
    from .layer import AttentionLayer as AttentionLayer
    from .layer import StateLayer as StateLayer
    from .speculative import Accepted as Accepted
    from .speculative import Beam as Beam
    from .speculative import TreeDraft as TreeDraft
    from .speculative import commit as commit
    from .speculative import draw_children as draw_children
    from .speculative import drawn_accept as drawn_accept
    from .speculative import greedy_accept as greedy_accept
    from .speculative import sampled_accept as sampled_accept
    from .speculative import wide_tree as wide_tree
    from .step.batch import ForwardBatch as ForwardBatch
    from .step.batch import ForwardMode as ForwardMode
    from .step.requests import PageCopy as PageCopy
    from .step.requests import RequestTable as RequestTable
    from .step.step import Step as Step
    from .step.step import StepBuffers as StepBuffers
    from .step.tree import DraftLinks as DraftLinks
    from .step.tree import DraftTree as DraftTree


if not TYPE_CHECKING:  # a checker would take every name for one that is here
    __getattr__, __dir__ = _lazy(__name__, _WHERE)
