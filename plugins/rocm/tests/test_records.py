"""The records of polyattn-rocm: they load, and they say yes and no where the libraries do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn import what_if
from polyattn.backends.torch_sdpa import TorchSDPA
from polyattn.contract import AttentionRequest
from polyattn.errors import PolyattnError
from polyattn.selection.inspection import list_backends
from polyattn.testing import Asked, AttentionRecords

PAGED, MLA = AttentionRecords.paged_decode, AttentionRecords.latent_decode
E4M3 = {"kv_dtype": "fp8_e4m3", "kv_scales": "tensor"}
MI300, MI350, MI200, RDNA4 = "rocm:gfx942", "rocm:gfx950", "rocm:gfx90a", "rocm:gfx1201"


class TestRecords(AttentionRecords):
    plugin = "polyattn_rocm.plugin"
    names = ("fa", "aiter", "aiter_sage", "wave")
    asked = (
        Asked("fa, dropout", MI300, "fa", {"dtype": "float16", "dropout": 0.1}, lowerings=()),
        Asked("fa, 256 wide", MI300, "fa", {"head_dim": 256}, lowerings=()),
        Asked("fa, K wider than V", MI300, "fa", {"head_dim": 192, "v_head_dim": 128, "sinks": True}, lowerings=()),
        Asked(
            "fa, a packed batch with a softcap",
            MI300,
            "fa",
            {"family": "varlen", "layout": "THD", "softcap": 30.0},
            lowerings=(),
        ),
        Asked("fa, width 100", MI300, "fa", {"head_dim": 100}, lowerings=("pad_head_dim", "pad_value_dim")),
        Asked("fa, a softcap", MI300, "fa", {"softcap": 30.0}, lowerings=("pack_sequences",)),
        Asked("fa, a right bound", MI300, "fa", {"window": (-1, 9), "s_relation": "fewer"}, lowerings=()),
        Asked("aiter, any page", MI300, "aiter", {**PAGED, "page_size": 48, "lse": True}, lowerings=()),
        Asked("aiter, FP8 on MI350", MI350, "aiter", {**PAGED, **E4M3}, lowerings=()),
        Asked("aiter, FP8 on MI300", MI300, "aiter", {**PAGED, **E4M3}, lowerings=("dequantise_kv",)),
        Asked(
            "aiter, FP8 on MI350 in pages of 8",
            MI350,
            "aiter",
            {**PAGED, **E4M3, "page_size": 8},
            lowerings=("dequantise_kv",),
        ),
        Asked("aiter, FP8 on RDNA 4", RDNA4, "aiter", {**PAGED, **E4M3}, lowerings=()),
        Asked(
            "aiter, sinks beside an LSE",
            MI300,
            "aiter",
            {**PAGED, "sinks": True, "lse": True},
            lowerings=("sinks_from_lse",),
        ),
        Asked("aiter, RDNA 4, page 48", RDNA4, "aiter", {**PAGED, "page_size": 48}, lowerings=("finer_pages",)),
        Asked("aiter, latent", MI300, "aiter", MLA, lowerings=()),
        Asked("aiter, 64 heads on MI350", MI350, "aiter", {**MLA, "heads": 64}, lowerings=()),
        Asked("sage", MI300, "aiter_sage", {"lse": True}, lowerings=()),
        Asked("sage, 96 wide", MI300, "aiter_sage", {"head_dim": 96}, lowerings=("pad_head_dim", "pad_value_dim")),
        Asked("fa, 264 wide", MI300, "fa", {"head_dim": 264}, "head_dim=264 is not 8 to 256, a multiple of 8"),
        Asked("fa, ALiBi", MI300, "fa", {"alibi": True}, "alibi=True is not declared"),
        Asked("fa, a mask", MI300, "fa", {"mask": "bool"}, "mask='bool' is not declared"),
        Asked("fa, float32", MI300, "fa", {"dtype": "float32"}, "dtype='float32' is not one of bfloat16, float16"),
        Asked(
            "fa, gradients of a packed batch with a softcap",
            MI300,
            "fa",
            {"family": "varlen", "layout": "THD", "softcap": 30.0, "grad": ("query",)},
            "softcap=30.0 is not declared",
        ),
        Asked(
            "fa, a right bound where queries stand before the keys",
            MI300,
            "fa",
            {"window": (-1, 9), "s_relation": "more"},
            "window=(-1, 9) has a right bound",
        ),
        Asked("fa, dropout and an LSE", MI300, "fa", {"dropout": 0.1, "lse": True}, "dropout=0.1 is not declared"),
        Asked(
            "fa, RDNA without flash-attn",
            "rocm:gfx1100",
            "fa",
            {"dropout": 0.1, "softcap": 30.0},
            "softcap=30.0 is not",
        ),
        Asked("aiter, HND", MI300, "aiter", {**PAGED, "kv_layout": "HND"}, "kv_layout='HND' is not declared"),
        Asked("aiter, MI200 latent", MI200, "aiter", MLA, "arch='gfx90a' is not"),
        Asked("aiter, 24 heads", MI300, "aiter", {**MLA, "heads": 24}, "heads=24 is not one of 8, 16, 32, 128"),
        Asked(
            "aiter, 64 heads on MI300", MI300, "aiter", {**MLA, "heads": 64}, "heads=64 is not one of 8, 16, 32, 128"
        ),
        Asked(
            "aiter, latent in float16", MI300, "aiter", {**MLA, "dtype": "float16"}, "dtype='float16' is not bfloat16"
        ),
        Asked(
            "aiter, RDNA 4, page 8", RDNA4, "aiter", {**PAGED, "page_size": 8}, "page_size=8 is not one of 16, 32, 64"
        ),
        Asked("aiter, RDNA 4, an LSE", RDNA4, "aiter", {**PAGED, "lse": True}, "lse=True is not declared"),
        Asked("wave has no window", MI300, "wave", {**PAGED, "window": (127, -1)}, "window"),
        Asked("sage on MI200", MI200, "aiter_sage", {}, "arch='gfx90a' is not one of"),
        Asked("sage, 136 wide", MI300, "aiter_sage", {"head_dim": 136}, "head_dim=136 is not one of 64, 128"),
        Asked("sage, more queries", MI300, "aiter_sage", {"s_relation": "more"}, "s_relation='more' is not one of"),
    )


@pytest.mark.parametrize("chip", ["rocm:gfx90a", "rocm:gfx1100", "rocm:gfx1201"])
def test_flash_attn_serves_every_chip_and_takes_no_softcap(chip: str) -> None:
    """Its Composable Kernel build would take one and ignore it."""
    plain = what_if(AttentionRequest(window=(8, 8)), platform=chip, installed=("flash-attn",), backend="fa")
    assert (plain.backend, plain.provider) == ("fa", "fa2/flash-attn")
    with pytest.raises(PolyattnError, match=r"softcap=30\.0 is not declared"):
        what_if(AttentionRequest(softcap=30.0), platform=chip, installed=("flash-attn",), backend="fa", strict=True)


SDPA: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 72, "mask": "bool", "causal": "top_left"}, ""),
    ({"window": (8, 8), "s_relation": "more", "grad": ("query", "mask"), "mask": "additive"}, ""),
    ({"dtype": "float32", "dropout": 0.1, "graph_capture": True}, ""),
    ({"dtype": "float64"}, "dtype='float64' is not one of"),
    ({"lse": True}, "lse=True is not declared"),
    ({"softcap": 30.0}, "softcap=30.0 is not declared"),
    ({"deterministic": True}, "deterministic=True is not declared"),
]


@pytest.mark.parametrize(("changes", "refusal"), SDPA)
@pytest.mark.parametrize("chip", ["rocm:gfx942", "rocm:gfx1201"])
def test_sdpa_serves_every_chip_in_torchs_limits(chip: str, changes: dict[str, Any], refusal: str) -> None:
    request = AttentionRequest(**changes)
    if not refusal:
        assert what_if(request, platform=chip, backend="torch_sdpa").lowerings == ()
        return
    with pytest.raises(PolyattnError) as refused:
        what_if(request, platform=chip, backend="torch_sdpa")
    assert refusal in str(refused.value)


def test_sdpa_multiplies_no_matrices_by_itself() -> None:
    """No call of BLAS, hipBLASLt or another, beside PyTorch's fused kernels, which on ROCm are AOTriton's."""
    called: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k = torch.randn(2, 1, 8, 4, 64)
    for fields in ({}, {"causal": "bottom_right"}, {"window": (2, 0)}, {"scale": 0.3, "mask": "bool"}):
        request = AttentionRequest(platform="rocm", arch="gfx942", dtype="float32", heads=4, kv_heads=4, **fields)
        bound = TorchSDPA().bind(dataclasses.replace(request, head_dim=64, v_head_dim=64).normalised())
        mask = {"attn_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)} if "mask" in fields else {}
        with Watch():
            bound.forward(q, k, k, **mask)
    assert sum("scaled_dot_product" in name for name in called) == 4
    assert not [name for name in called if any(word in name for word in ("mm.", "matmul", "einsum"))]


def test_vendor_code_is_claimed_for_the_providers_that_ran() -> None:
    where: dict[str, Any] = {"platform": MI350, "installed": ("amd-aiter",), "backend": "aiter"}
    triton = what_if(AttentionRequest(**{**PAGED, **E4M3}), **where)
    assert (triton.provider, triton.evidence.partition(", stale")[0]) == ("amd-aiter/triton", "vendor code")
    ck = what_if(AttentionRequest(**PAGED), **where)
    assert (ck.provider, ck.evidence) == ("amd-aiter", "emulator")
    (shown,) = [row for row in list_backends("rocm") if row.name == "aiter"]
    assert shown.evidence.startswith("vendor code (")
    assert shown.evidence.partition(", stale")[0].endswith(", in part)")
