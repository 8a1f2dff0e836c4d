"""Records of the published sparse video methods that core computes itself: their rows are the same on every platform.

Core lists them where no vendor has kernels of its own; a vendor's plugin lists the same record with its providers
before core's. Torch-free data, like everything a plugin's `plugin.py` imports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...contract import Accuracy, BackendInfo, Provider, Range, Row, row
from .options import SAGE_SLA, SLA, STA, SVG2, VMOBA, VSA, dense_by_rule

__all__ = ["EMULATED", "PORTABLE", "portable"]

LOSSY = "sparse: exact over the keys it keeps, dense only at full budget"


def _row(**limits: Any) -> Row:
    """Return the row of self-attention at a place. What the calls of a method need is judged when they are made."""
    return row(
        when={"place": True},
        family="dense",
        dtype=("float64", "float32", "float16", "bfloat16"),
        head_dim=Range(1),
        v_head_dim=Range(1),
        group=True,
        s_relation="equal",
        misaligned=True,
        **limits,
    )


TRAINABLE = ("query", "key", "value")


def _record(name: str, target: str, limits: Row, accuracy: Accuracy | None = None, **more: Any) -> BackendInfo:
    provider = Provider("polyattn", (limits,), f"polyattn.methods.video.{target}", accuracy=accuracy)
    kept: dict[str, Any] = {"priority": None, "fallbacks": dense_by_rule(), "lossy": LOSSY, "upstream": "polyattn"}
    return BackendInfo(name, "cpu", (provider,), **{**kept, **more})


PORTABLE: Mapping[str, BackendInfo] = {
    info.name: info
    for info in (
        _record(
            *("sliding_tile_attn", "sta:SlidingTile", _row(grad=TRAINABLE, scale=True)),
            summary="Sliding tile attention (STA)",
            config=STA,
        ),
        _record(
            *("video_sparse_attn", "vsa:VideoSparse", _row(grad=TRAINABLE, scale=True)),
            summary="Video sparse attention (VSA)",
            config=VSA,
            note="needs the gate that a model learned, or the option coarse",
        ),
        _record(
            *("sla_attn", "sla:SLA", _row(grad=TRAINABLE)),
            summary="Sparse-linear attention (SLA)",
            config=SLA,
            note="needs weights trained for it (proj_l); at least one key block is always kept",
        ),
        _record(
            *("sage_sla_attn", "sla:SageSLA", _row()),
            accuracy=Accuracy(0.998, 0.06),
            summary="SLA with INT8 scores (SageSLA), inference only",
            config=SAGE_SLA,
            lossy="sparse, and INT8 QK over the keys it keeps: cosine at least 0.998 to SLA",
            note="emulated: it has the rounding of 8-bit integers and not their speed",
        ),
        _record(
            *("vmoba_attn", "vmoba:VMoBA", _row(grad=TRAINABLE, scale=True)),
            summary="V-MoBA: mixture of block attention for video",
            config=VMOBA,
            note="a moba_threshold of 1 or more keeps every chunk; upstream's threshold mode has no dense limit",
        ),
        _record(
            *("sparse_video_gen_2_attn", "svg2:SVG2", _row()),
            summary="Sparse VideoGen 2: clusters of similar tokens",
            config=SVG2,
            note="keeps centroids between steps, in the place of each layer and branch",
        ),
    )
}
"""The records by name, as of CPUs."""

CAPTURED = ("sliding_tile_attn", "video_sparse_attn", "sla_attn")
"""Those whose calls can be recorded into a graph of a device: V-MoBA counts what a threshold keeps, and SVG2 goes on
from the centroids of the step before, which a recorded call would not."""

EMULATED = ("sage_sla_attn",)
"""Those whose kernels are emulated: for CPUs alone, as nobody is helped by a slow emulation on a device."""


def portable(name: str, platform: str, *vendors: Provider, to: str = "", **changes: Any) -> BackendInfo:
    """Return the record of a method for a platform.

    Args:
        vendors: providers of the vendor, which are chosen before core's. to: as `dense_by_rule`. changes: other fields
            of the record.
    """
    info = PORTABLE[name]
    own = info.providers
    if name in CAPTURED and platform in ("cuda", "rocm"):
        more = row(graph_capture=True).allows
        rows = [tuple(dataclasses.replace(r, allows={**r.allows, **more}) for r in one.rows) for one in own]
        own = tuple(dataclasses.replace(one, rows=found) for one, found in zip(own, rows, strict=True))
    providers = (*vendors, *own)
    return dataclasses.replace(info, platform=platform, providers=providers, fallbacks=dense_by_rule(to), **changes)
