"""Linear attention of the `triton` backend: gated delta net (`gdn`) and Kimi delta attention (`kda`)."""

from __future__ import annotations

from typing import Any

from polyattn.contract import Range, Row, row

from .common import ANY_TREE, HALF, TRAINABLE

VERIFIES = ("cuda", "rocm", "cpu")
"""Platforms where draft tokens, trees included, are verified as well."""


def linear_rows(platform: str) -> tuple[Row, ...]:
    """Prefill and decode everywhere; verification where `VERIFIES` says so."""
    verifies = platform in VERIFIES
    shared: dict[str, Any] = {
        "family": "linear",
        "method": ("gdn", "kda"),
        "dtype": (*HALF, "float32"),
        "head_dim": Range(1, 256),
        "v_head_dim": Range(1, 512),
        # Questions of verification say fewer queries than keys, as those of a cache do.
        "s_relation": ("equal", "one", "fewer"),
        "causal": ("none", "bottom_right"),
        "group": True,
        "scale": True,
        "state_layout": ("", "KV", "VK"),
        "deterministic": True,
        "misaligned": True,
        "zero_size": True,
    }
    serving = row(
        phase=("prefill", "decode", "verify") if verifies else ("prefill", "decode"),
        state_slots=True,
        state_out=("", "every") if verifies else "",
        raw_gates=("", "softplus", "bounded"),
        beta_range=(1, 2),
        qk_norm=True,
        spec_topk=ANY_TREE if verifies else 0,
        tree=verifies,
        batch_invariant=True,
        graph_capture=platform in ("cuda", "rocm"),
        **shared,
    )
    return serving, row(phase=("prefill", "decode"), grad=TRAINABLE, **shared)
