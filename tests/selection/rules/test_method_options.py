"""The typed options of the sparse video methods: names, types and defaults, on every platform that lists them."""

from __future__ import annotations

from typing import Any

import pytest

from polyattn.contract import ConfigField
from polyattn.registry.manager import get_manager

REQUIRED = ...
OPTIONS: dict[str, dict[str, tuple[str, Any]]] = {
    "sliding_tile_attn": {
        "mask_strategy_file_path": ("path", ""),
        "sta_mode": ("str", "STA_inference"),
        "skip_time_steps": ("int", 15),
        "sta_tile": ("list[int]", (6, 8, 8)),
        "sta_search_path": ("str", ""),
        "sta_candidates": ("list[int]", (3, 1, 10, 1, 5, 7, 3, 3, 3, 1, 6, 5, 1, 3, 10, 3, 6, 1)),
    },
    "video_sparse_attn": {"sparsity": ("float", 0.0), "coarse": ("str", "gate")},
    "vmoba_attn": {
        "temporal_chunk_size": ("int", REQUIRED),
        "temporal_topk": ("int", REQUIRED),
        "spatial_chunk_size": ("list[int]", REQUIRED),
        "spatial_topk": ("int", REQUIRED),
        "st_chunk_size": ("list[int]", REQUIRED),
        "st_topk": ("int", REQUIRED),
        "moba_select_mode": ("str", "threshold"),
        "moba_threshold": ("float", 0.25),
        "moba_threshold_type": ("str", "query_head"),
        "first_full_step": ("int", 12),
        "first_full_layer": ("int", 0),
        "temporal_layer": ("int", 1),
        "spatial_layer": ("int", 1),
        "st_layer": ("int", 1),
    },
    "sla_attn": {
        "topk_ratio": ("float", 0.1),
        "feature_map": ("str", "softmax"),
        "linear_scope": ("str", "all"),
        "BLKQ": ("int", 128),
        "BLKK": ("int", 64),
    },
    "sage_sla_attn": {
        "topk_ratio": ("float", 0.5),
        "feature_map": ("str", "softmax"),
        "linear_scope": ("str", "all"),
        "BLKQ": ("int", 128),
        "BLKK": ("int", 64),
    },
    "sparse_video_gen_2_attn": {
        "svg2_num_q_centroids": ("int", 300),
        "svg2_num_k_centroids": ("int", 1000),
        "svg2_top_p_kmeans": ("float", 0.9),
        "svg2_min_kc_ratio": ("float", 0.1),
        "svg2_kmeans_iter_init": ("int", 50),
        "svg2_kmeans_iter_step": ("int", 2),
        "svg2_zero_step_kmeans_init": ("bool", False),
        "svg2_first_layers_fp": ("float", 0.03),
        "svg2_first_times_fp": ("float", 0.2),
    },
}


def schemas(name: str) -> list[tuple[ConfigField, ...]]:
    return [b.config for b in get_manager().backends.values() if b.name == name]


@pytest.mark.parametrize("name", OPTIONS)
def test_names_types_and_defaults(name: str) -> None:
    found = schemas(name)
    assert found
    for schema in found:
        assert {field.name: (field.type, field.default) for field in schema} == OPTIONS[name]
        assert all(field.doc for field in schema)


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_are_allowed_values(name: str) -> None:
    for field in schemas(name)[0]:
        if field.default is REQUIRED:
            continue
        assert not field.choices or field.default in field.choices
        for value in field.default if isinstance(field.default, tuple) else (field.default,):
            assert field.low is None or value >= field.low
            assert field.high is None or value <= field.high


def test_lengths_of_chunk_sizes() -> None:
    lengths = {field.name: field.length for field in schemas("vmoba_attn")[0] if field.type == "list[int]"}
    assert lengths == {"spatial_chunk_size": 2, "st_chunk_size": 3}
