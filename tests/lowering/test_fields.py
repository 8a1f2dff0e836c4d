"""Lowerings say which fields they relieve of. The table of docs/lowerings.md is written by docs/tables.py."""

from __future__ import annotations

import random
from typing import Any

from polyattn.contract import AttentionRequest
from polyattn.lowering import KEPT, LOWERINGS, Ways, lowerings


def test_every_lowering_relieves_of_fields_that_exist() -> None:
    names = {
        *(f for f in vars(AttentionRequest()) if not f.startswith("_")),
        "group",
        "dims",
        "same_dims",
        "kv_storage",
    }
    for lowering in lowerings():
        assert lowering.fields, lowering.name
        assert lowering.fields <= names, lowering.name


def test_no_rewrite_changes_a_field_that_is_said_to_be_kept() -> None:
    values: dict[str, tuple[Any, ...]] = {
        "family": ("dense", "varlen", "paged", "mla", "block_sparse", "linear"),
        "state_layout": ("", "KV", "VK"),
        "raw_gates": ("", "", "softplus"),
        "state_out": ("", "", "every"),
        "phase": ("prefill", "extend", "decode", "verify"),
        "dtype": ("float32", "bfloat16"),
        "head_dim": (40, 128, 576),
        "v_head_dim": (0, 64, 512),
        "heads": (8,),
        "kv_heads": (2, 8),
        "layout": ("BSHD", "BHSD", "THD"),
        "kv_dtype": ("auto", "fp8_e4m3"),
        "kv_scales": ("", "tensor", "token"),
        "causal": ("none", "bottom_right", "top_left"),
        "window": ((-1, -1), (5, -1), (5, 5)),
        "mask": ("none", "bool", "additive"),
        "scale": (None, 0.3),
        "grad": ((), ("query", "sinks")),
        "s_relation": ("equal", "one", "fewer", "more"),
        "page_size": (16, 64),
        "save_kv_cache": (None, True, False),
        "kv_parts": (0, 0, 2),
        "spec_topk": (0, 4),
        "chunk": (0, 0, 16),
        "segments": ("", "", "shared", "pair"),
        "graph_capture": (False, "session"),
    }
    switches = (
        "sinks",
        "lse",
        "misaligned",
        "large",
        "zero_size",
        "state_slots",
        "qk_norm",
        "block_map",
        "block_sizes",
        "tree",
        "chunked_prefix",
    )
    rare = ("alibi", "deterministic", "batch_invariant", "cross", "multimodal")
    assert all(lowering.fields.isdisjoint(KEPT) for lowering in lowerings())
    draw, offered = random.Random(0), set()
    for _ in range(10_000):
        fields = {name: draw.choice(allowed) for name, allowed in values.items()}
        fields |= {name: draw.random() < 0.2 for name in switches} | {name: draw.random() < 0.05 for name in rare}
        request = AttentionRequest(**fields).normalised()
        ways = Ways()
        for lowering in lowerings():
            for _, inner in ways.of(ways.at(request), lowering):
                offered.add(lowering.name)
                differ = {n for one in inner for n, v in vars(one.request).items() if v != vars(request).get(n, v)}
                assert differ.isdisjoint(KEPT), lowering.name
    assert offered == {*LOWERINGS}
