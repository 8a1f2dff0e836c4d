"""Known faults of the libraries that CUDA backends call, with what is done about each.

A fault that a capability row leaves out already is written down as `undeclared`: it says why the row is as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyattn.adapters import low_lse_defect
from polyattn.contract import AttentionRequest, Constraint, Defect, NotEmpty, Range, WiderThan, conditions

from .common import AMPERE_AND_LATER, HOPPER

SEVERAL = ("equal", "fewer", "more")
"""Relations of lengths with more than one query to a sequence."""


def _request(family: str, **fields: Any) -> AttentionRequest:
    paged: dict[str, Any] = {"page_size": 16, "phase": "extend"} if family == "paged" else {}
    usual: dict[str, Any] = {"platform": "cuda", "dtype": "bfloat16", "heads": 4, "kv_heads": 4}
    return AttentionRequest(**{**usual, **paged, "family": family, **fields})


# --- FlashAttention 3

_VLLM = (
    "under a window on both sides, of which a causal mask is one, queries see later keys: its tiles of keys begin "
    "where the window does, and those that need the mask are counted from the first key"
)
_VLLM_SOURCE = (
    "vllm-project/flash-attention 8f468e7d, hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp; vllm 0.33.0 on an H200, "
    "2026-11-27: 3,053 of 12,008 random calls of this kind were wrong, and none of 7,992 others (`python "
    "benchmarks/vllm_windows.py`)"
)
_TILES = ((Range(65, 128), 128), (Range(129, 192), 96), (Range(193, 256), 64))
"""Head dims, and the keys of a tile. Up to 64 another loop serves, which is right."""


def _windows(reach: int, **more: Any) -> Iterator[dict[str, Constraint]]:
    """Windows of more than `reach` keys beside the query's own, bounded on both sides, of several queries."""
    known = {"arch": HOPPER, "s_relation": SEVERAL, **more}
    yield conditions(**known, causal="bottom_right", window=WiderThan(reach))
    yield conditions(**known, causal="none", window=WiderThan(reach, right=True))


def _of_vllm(*families: str) -> tuple[Defect, ...]:
    found = []
    for width, tile in _TILES:
        causal, banded = _windows(tile - 1, family=families, head_dim=width)
        shown = {"head_dim": int(width.high or 0), "family": families[0]}
        found += [
            Defect(
                "vllm",
                _VLLM,
                _VLLM_SOURCE,
                "refused",
                causal,
                witness=_request(**shown, causal="bottom_right", window=(300, -1)),
            ),
            Defect("vllm", _VLLM, _VLLM_SOURCE, "refused", banded, witness=_request(**shown, window=(300, 100))),
        ]
    return tuple(found)


VLLM_FA3_DENSE = _of_vllm("dense", "varlen")
VLLM_FA3_PAGED = _of_vllm("paged")
# Over FP8 caches the other loop is not used, and a tile has 64 keys or more.
VLLM_FA3_FP8 = tuple(Defect("vllm", _VLLM, _VLLM_SOURCE, "refused", when) for when in _windows(63, family="paged"))


def _longer_than_seen(library: str) -> tuple[Defect, ...]:
    """What is said of the other builds of FlashAttention 3, until their windows were run at such lengths."""
    return tuple(
        Defect(
            library,
            "under a window of more than 100 keys vLLM's build of FlashAttention 3 is wrong; this one counts tiles in "
            "another way, and was not run with longer ones",
            "hopper/block.h of Dao-AILab/flash-attention 0251105a and sgl-project/sgl-flash-attn 2580b5a",
            "by name",
            when,
            witness=_request("dense", head_dim=128, **band),
        )
        for when, band in zip(
            _windows(100), ({"causal": "bottom_right", "window": (300, -1)}, {"window": (300, 100)}), strict=True
        )
    )


FA3_WINDOWS = _longer_than_seen("flash-attn-3")
SGL_FA3_WINDOWS = _longer_than_seen("sgl-kernel")
FA3_DETERMINISTIC = Defect(
    "flash-attn-3",
    "builds of 2025 take deterministic=True and add up dQ in any order; the version of all builds is the same",
    "Dao-AILab/flash-attention#1596 and #1766",
    "undeclared",
    conditions(deterministic=True),
)
SGL_CHUNKS = Defect(
    "sgl-kernel",
    "of attention_chunk and a shorter window it keeps the window alone, where a tile of queries crosses chunks",
    "sglang-kernel 0.4.2 on an H200",
    "undeclared",
    conditions(chunk=Range(1), window=WiderThan(0)),
)

# --- FlashAttention 2 and 4

FA2_PAGED_LSE = Defect(
    "flash-attn",
    "packed over pages, it writes the LSE of a block of queries that sees no key to other memory",
    "Dao-AILab/flash-attention#2842, 2.8.3.post2",
    "undeclared",
    conditions(family="paged", s_relation="more"),
)
FA4_PAGED_WIDTHS = Defect(
    "flash-attn-4",
    "over pages on Hopper it misplaces rows of some widths, 96 and 240 among them",
    "4.0.0b36 on an H200",
    "undeclared",
    conditions(family="paged", arch=HOPPER),
)

# --- FlashInfer

_FA2_SPANS = (
    "the fa2 template gives wrong rows for windows without a causal mask where it splits the keys: it takes those of a "
    "tile of queries for no more than the window and the tile"
)


def _fa2_template(family: str) -> tuple[Defect, ...]:
    """Where the fa2 template serves: on all chips but Hopper, and there over pages what its fa3 template does not."""
    elsewhere = tuple(arch for arch in AMPERE_AND_LATER if arch not in HOPPER)
    places: list[dict[str, Any]] = [{"arch": elsewhere}]
    if family == "paged":
        places += [
            {"arch": HOPPER, "kv_dtype": ("fp8_e4m3", "fp8_e5m2")},
            {"arch": HOPPER, "mask": "bool"},
            {"arch": HOPPER, "same_dims": False},
        ]
    shown: list[dict[str, Any]] = [
        {"arch": "sm80", "head_dim": 128},
        {"head_dim": 128, "kv_dtype": "fp8_e4m3"},
        {"head_dim": 128, "mask": "bool"},
        {"head_dim": 192, "v_head_dim": 128},
    ]
    return tuple(
        Defect(
            "flashinfer-python",
            _FA2_SPANS,
            "flashinfer-ai/flashinfer#4972 and #4992",
            "refused",
            conditions(**place, family=family, causal="none", s_relation=SEVERAL, window=WiderThan(0)),
            witness=_request(family, **one, window=(300, -1)),
        )
        for place, one in zip(places, shown, strict=False)
    )


FLASHINFER_RAGGED = (*_fa2_template("dense"), *_fa2_template("varlen"))
FLASHINFER_PAGED = _fa2_template("paged")

# --- cuDNN

CUDNN_LOW_LSE = low_lse_defect(
    ("dense",), "the gradients of calls of these lengths are those of the FlashAttention 2 that torch brings"
)
CUDNN_PACKED_GAPS = Defect(
    "cuDNN",
    "its packed backward gives wrong gradients, or a CUDA error, where the rows of a query have gaps",
    "cuDNN 9.19 on an H200",
    "mended",
    conditions(family="varlen", grad=NotEmpty()),
    how="the query is made contiguous",
)
CUDNN_PAGED_BITS = Defect(
    "cuDNN",
    "its decode over pages gives other last bits from run to run",
    "cuDNN 9.19, by FlashInfer 0.7.2 on an H200",
    "mended",
    conditions(family="paged", deterministic=True),
    how="requests for the same bits take its other graph",
)

# --- flash-linear-attention

FLA_TRITON = Defect(
    "triton",
    "it gets products of flash-linear-attention's gated backward wrong on Hopper, so that the library raises "
    "RuntimeError: take Triton 3.7.1 or newer (of tilelang, which it offers instead, nothing is known here)",
    "fla-org/flash-linear-attention#640; fla-core 0.6.0, Triton 3.6.0 on an H100, 2026-11-28",
    "refused",
    conditions(family="linear", method="gdn", arch=HOPPER, grad=NotEmpty()),
    versions=">=3.4,<3.7.1",
    witness=_request("linear", head_dim=128, method="gdn", grad=("query", "key", "value")),
)
FLA_ODD_WIDTHS = Defect(
    "flash-linear-attention",
    "gradients of heads of an odd width end in an illegal memory access",
    "fla-core 0.6.0, Triton 3.6.0 on an H100, 2026-11-28: head dims 255 and 24, 128 and 17",
    "undeclared",
    conditions(family="linear", grad=NotEmpty()),
)
FLA_WIPED = Defect(
    "flash-linear-attention",
    "its chunks add up log decays, and take differences of the sums: after one of -inf all is NaN, after one of -1e6 "
    "they are off by 0.06",
    "fla-core 0.6.0 under Triton's interpreter, 2026-11-28: outputs and gradients were NaN with -inf, not with -104",
    "mended",
    conditions(family="linear", phase=("prefill", "extend")),
    how="log decays below -104, which decay to 0, are -104",
)
