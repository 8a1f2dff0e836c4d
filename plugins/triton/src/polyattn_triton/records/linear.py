"""Linear attention of the `triton` backend: gated delta net (`gdn`) and Kimi delta attention (`kda`)."""

from __future__ import annotations

from polyattn.contract import Range, Row, row

from .common import ANY_TREE, HALF, PHASES, TRAINABLE

VERIFIES = ("cuda", "rocm")
"""Platforms where draft tokens, trees included, are verified as well."""


def linear_rows(platform: str) -> tuple[Row, ...]:
    """Prefill, extend and decode everywhere; verification where `VERIFIES` says so."""
    verifies = platform in VERIFIES
    return (
        row(
            family="linear",
            method=("gdn", "kda"),
            dtype=(*HALF, "float32"),
            head_dim=Range(16, 256),
            v_head_dim=Range(16, 256),
            phase=PHASES if verifies else PHASES[:3],
            s_relation=("equal", "one", "fewer"),
            causal=True,
            group=True,
            scale=True,
            state_layout=("", "KV", "VK"),
            spec_topk=ANY_TREE if verifies else 0,
            tree=verifies,
            grad=TRAINABLE,
        ),
    )
