"""Options of the sparse video methods (`--attention-backend-config`), and what they leave to dense attention.

A method's options belong to the method, not to a vendor: every plugin that brings a kernel for one attaches these
records to its backend. Torch-free data, like everything a plugin's `plugin.py` imports.
"""

from __future__ import annotations

from ...contract import ConfigField, Fallback, conditions

__all__ = ["SAGE_SLA", "SLA", "STA", "SVG2", "VMOBA", "VSA", "WINDOW", "dense_by_rule"]

_OF_A_SEARCH = ("STA_searching", "STA_tuning", "STA_tuning_cfg")

STA: tuple[ConfigField, ...] = (
    ConfigField(
        "mask_strategy_file_path",
        "path",
        "",
        "JSON of step_layer_head -> window in tiles [t, h, w]; where there is none, sta_mode=STA_searching begins one",
        needed=(("sta_mode", "STA_inference"),),
    ),
    ConfigField(
        "sta_mode",
        "str",
        "STA_inference",
        "read windows, search for them, or choose among those that were searched; cfg: by negative prompts too",
        choices=("STA_inference", *_OF_A_SEARCH),
    ),
    ConfigField("skip_time_steps", "int", 15, "first denoising steps that run dense", low=0),
    ConfigField("sta_tile", "list[int]", (6, 8, 8), "[T, H, W] of a tile, in tokens", low=1, length=3),
    ConfigField(
        "sta_search_path",
        "str",
        "",
        "folder of the losses of a search, which exists",
        needed=tuple(("sta_mode", mode) for mode in _OF_A_SEARCH),
    ),
    ConfigField(
        "sta_candidates",
        "list[int]",
        (3, 1, 10, 1, 5, 7, 3, 3, 3, 1, 6, 5, 1, 3, 10, 3, 6, 1),
        "windows that a search tries, three numbers for each",
        low=1,
    ),
)
"""Sliding tile attention (arXiv 2502.04507)."""

VSA: tuple[ConfigField, ...] = (
    ConfigField("sparsity", "float", 0.0, "share of key tiles the fine branch drops, below 1", low=0.0, high=1.0),
    ConfigField(
        "coarse",
        "str",
        "gate",
        "weight of the coarse branch: the gate that the model learned, or without one off, or one",
        choices=("gate", "off", "one"),
    ),
)
"""Video sparse attention (arXiv 2505.13389)."""

VMOBA: tuple[ConfigField, ...] = (
    ConfigField("temporal_chunk_size", "int", doc="frames per chunk in temporal layers", low=1),
    ConfigField("temporal_topk", "int", doc="chunks each query keeps in temporal layers", low=1),
    ConfigField("spatial_chunk_size", "list[int]", doc="[H, W] of a chunk in spatial layers", low=1, length=2),
    ConfigField("spatial_topk", "int", doc="chunks each query keeps in spatial layers", low=1),
    ConfigField("st_chunk_size", "list[int]", doc="[T, H, W] of a chunk in spatiotemporal layers", low=1, length=3),
    ConfigField("st_topk", "int", doc="chunks each query keeps in spatiotemporal layers", low=1),
    ConfigField("moba_select_mode", "str", "threshold", "how chunks are chosen", choices=("threshold", "topk")),
    ConfigField("moba_threshold", "float", 0.25, "gate mass to keep in threshold mode; 1 and above keep all", low=0.0),
    ConfigField(
        "moba_threshold_type",
        "str",
        "query_head",
        "scope over which gates are compared",
        choices=("query_head", "block", "overall", "head_global"),
    ),
    ConfigField("first_full_step", "int", 12, "first denoising steps that run dense", low=0),
    ConfigField("first_full_layer", "int", 0, "first layers that run dense", low=0),
    ConfigField("temporal_layer", "int", 1, "temporal layers per cycle", low=0),
    ConfigField("spatial_layer", "int", 1, "spatial layers per cycle", low=0),
    ConfigField("st_layer", "int", 1, "spatiotemporal layers per cycle", low=0),
)
"""V-MoBA (arXiv 2506.23858)."""


def _sla(topk_ratio: float, block_q: int) -> tuple[ConfigField, ...]:
    return (
        ConfigField("topk_ratio", "float", topk_ratio, "share of key blocks kept exact", low=0.0, high=1.0),
        ConfigField("feature_map", "str", "softmax", "map of the linear branch", choices=("softmax", "elu", "relu")),
        ConfigField(
            "linear_scope",
            "str",
            "all",
            "keys the linear branch sees: every key, or those the exact branch left out",
            choices=("all", "complement"),
        ),
        ConfigField("BLKQ", "int", block_q, "queries per block", choices=(64, 128)),
        ConfigField("BLKK", "int", 64, "keys per block", choices=(64, 128)),
    )


SLA = _sla(topk_ratio=0.1, block_q=128)
"""Sparse-linear attention (arXiv 2509.24006)."""

SAGE_SLA = _sla(topk_ratio=0.5, block_q=128)
"""SLA with INT8 scores; inference only. Published video models run it at a topk_ratio of 0.1."""

SVG2: tuple[ConfigField, ...] = (
    ConfigField("svg2_num_q_centroids", "int", 300, "clusters of queries", low=1),
    ConfigField("svg2_num_k_centroids", "int", 1000, "clusters of keys", low=1),
    ConfigField("svg2_top_p_kmeans", "float", 0.9, "attention mass each query cluster keeps", low=0.0, high=1.0),
    ConfigField("svg2_min_kc_ratio", "float", 0.1, "share of key clusters always kept", low=0.0, high=1.0),
    ConfigField("svg2_kmeans_iter_init", "int", 50, "k-means rounds at the first step", low=1),
    ConfigField("svg2_kmeans_iter_step", "int", 2, "k-means rounds at later steps", low=0),
    ConfigField("svg2_zero_step_kmeans_init", "bool", False, "cluster already at step 0"),
    ConfigField("svg2_first_layers_fp", "float", 0.03, "share of first layers that run dense", low=0.0, high=1.0),
    ConfigField("svg2_first_times_fp", "float", 0.2, "share of first time steps that run dense", low=0.0, high=1.0),
)
"""Sparse VideoGen 2 (arXiv 2505.18875)."""


WINDOW: tuple[ConfigField, ...] = (
    ConfigField(
        "window_reach",
        "list[int]",
        (1, 1, 1),
        "tiles seen on either side along time, height and width; three numbers, or three for each head",
        low=0,
    ),
    ConfigField("window_tile", "list[int]", (4, 4, 4), "[T, H, W] of a tile, in tokens", low=1, length=3),
    ConfigField("first_full_step", "int", 0, "first denoising steps that run dense", low=0),
    ConfigField("first_full_layer", "int", 0, "first layers that run dense", low=0),
)
"""A window of tiles: the example of docs/methods.md."""


def dense_by_rule(to: str = "") -> tuple[Fallback, ...]:
    """What every sparse video method leaves to dense attention: keys of another sequence, of which a map of one video
    says nothing, and calls without a place, which have no grid.

    Args:
        to: the backend that serves them where it can; "" = whoever is chosen without a name.
    """
    return (
        Fallback(
            to,
            why="sparse video methods never serve cross-attention: it is computed densely",
            when=conditions(cross=True),
            rule=True,
        ),
        Fallback(
            to,
            why="sparse video methods serve calls with a place, and this one has none: it is computed densely",
            when=conditions(place=False, family=("dense", "varlen")),
            rule=True,
        ),
    )
