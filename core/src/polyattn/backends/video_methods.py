"""Records of the sparse video methods that serve on every platform, by whoever runs their lists there. No torch import.

polyattn-cuda has those of CUDA, beside the vendors' own kernels: `portable_provider` is their common provider.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..contract import BackendInfo
from ..methods.video.options import DENSE_THERE, STA, VSA, dense_by_rule, portable_provider

__all__ = ["video_methods"]

LOSSY = "sparse: exact over the keys it keeps, dense only at full budget"


def video_methods(platform: str) -> Iterable[BackendInfo]:
    """Those of one platform, but for CUDA, whose plugin has them, and MPS, which has none."""
    if platform in DENSE_THERE:
        common: dict[str, Any] = {
            "priority": None,
            "fallbacks": dense_by_rule(DENSE_THERE[platform]),
            "lossy": LOSSY,
            "upstream": "polyattn",
        }
        yield BackendInfo(
            "sliding_tile_attn",
            platform,
            (portable_provider("sta:SlidingTile"),),
            summary="Sliding tile attention (STA)",
            config=STA,
            **common,
        )
        yield BackendInfo(
            "video_sparse_attn",
            platform,
            (portable_provider("vsa:VideoSparse"),),
            summary="Video sparse attention (VSA)",
            config=VSA,
            note="needs the gate that a model learned, or the option coarse",
            **common,
        )
