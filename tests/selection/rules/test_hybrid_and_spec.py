"""Hybrid serving (a backend per phase) and speculation: who serves which phase, and which pairs do not work."""

from __future__ import annotations

from typing import Any

import pytest

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.errors import ConfigError, UnsupportedRequestError

MHA: dict[str, Any] = {
    "family": "paged",
    "heads": 32,
    "kv_heads": 8,
    "page_size": 64,
    "causal": "bottom_right",
    "save_kv_cache": True,
}
MLA: dict[str, Any] = {
    **MHA,
    "family": "mla",
    "save_kv_cache": None,
    "heads": 128,
    "kv_heads": 1,
    "head_dim": 576,
    "v_head_dim": 512,
    "scale": 192**-0.5,
}
PREFILL = {"phase": "prefill", "s_relation": "equal"}
EXTEND = {"phase": "extend", "s_relation": "fewer"}
DECODE = {"phase": "decode", "s_relation": "one"}
VERIFY = {"phase": "verify", "s_relation": "fewer", "spec_topk": 1}
TREE = {"phase": "verify", "s_relation": "fewer", "spec_topk": 4, "tree": True}
ALL = ("flash-attn-3", "flash-attn-4", "flashinfer", "sgl-kernel", "sgl-flash-mla")

# id, platform, request, arguments, served by
PHASES = [
    ("decode's own", "cuda:sm90", {**MHA, **DECODE}, {"decode_backend": "flashinfer"}, "flashinfer"),
    (
        "prefill inherits the base",
        "cuda:sm90",
        {**MHA, **PREFILL},
        {"backend": "triton", "decode_backend": "fa3"},
        "triton",
    ),
    (
        "extend inherits the base",
        "cuda:sm90",
        {**MHA, **EXTEND},
        {"backend": "triton", "decode_backend": "fa3"},
        "triton",
    ),
    (
        "decode inherits the base",
        "cuda:sm90",
        {**MHA, **DECODE},
        {"backend": "triton", "prefill_backend": "fa3"},
        "triton",
    ),
    ("without a base the rule", "cuda:sm90", {**MHA, **PREFILL}, {"decode_backend": "flashinfer"}, "fa3"),
    (
        "both, prefill",
        "cuda:sm100",
        {**MHA, **EXTEND, "page_size": 64},
        {"prefill_backend": "fa4", "decode_backend": "trtllm_mha"},
        "fa4",
    ),
    (
        "both, decode",
        "cuda:sm100",
        {**MHA, **DECODE},
        {"prefill_backend": "fa4", "decode_backend": "trtllm_mha"},
        "trtllm_mha",
    ),
    (
        "MLA, prefill fa4, decode trtllm_mla",
        "cuda:sm100",
        {**MLA, **DECODE},
        {"backend": "trtllm_mla", "prefill_backend": "fa4"},
        "trtllm_mla",
    ),
    (
        "a decode-only kernel with a prefill backend",
        "cuda:sm100",
        {**MLA, **EXTEND, "chunked_prefix": True},
        {"prefill_backend": "trtllm_mla", "decode_backend": "cutedsl_mla"},
        "trtllm_mla",
    ),
    (
        "mode prefill: prefill's verifies",
        "cuda:sm90",
        {**MHA, **VERIFY},
        {"prefill_backend": "flashinfer", "decode_backend": "fa3"},
        "flashinfer",
    ),
    (
        "mode decode: decode's verifies",
        "cuda:sm90",
        {**MHA, **VERIFY},
        {"prefill_backend": "flashinfer", "decode_backend": "fa3", "speculative_attention_mode": "decode"},
        "fa3",
    ),
    (
        "one alone, mode prefill",
        "cuda:sm90",
        {**MHA, **VERIFY},
        {"backend": "triton", "decode_backend": "fa3"},
        "triton",
    ),
    (
        "one alone, mode decode",
        "cuda:sm90",
        {**MHA, **VERIFY},
        {"backend": "triton", "decode_backend": "fa3", "speculative_attention_mode": "decode"},
        "fa3",
    ),
]


@pytest.mark.parametrize(
    ("platform", "changes", "arguments", "backend"), [pytest.param(*case[1:], id=case[0]) for case in PHASES]
)
def test_who_serves_a_phase(platform: str, changes: dict[str, Any], arguments: dict[str, Any], backend: str) -> None:
    selection = what_if(AttentionRequest(**changes), platform=platform, installed=ALL, **arguments)
    assert selection.backend == backend


FP4 = {"kv_dtype": "fp4_e2m1", "kv_scales": "block16"}
# id, platform, request, arguments, words of the refusal
RULES = [
    (
        "trtllm_mha decodes, topk 4",
        "cuda:sm100",
        {**MHA, **TREE},
        ("flashinfer", "trtllm_mha"),
        "spec_topk=4 is not 0 to 1",
    ),
    (
        "trtllm_mha prefills, topk 4",
        "cuda:sm100",
        {**MHA, **TREE},
        ("trtllm_mha", "flashinfer"),
        "spec_topk=4 is not 0 to 1",
    ),
    (
        "trtllm_mha alone, topk 4",
        "cuda:sm100",
        {**MHA, **TREE},
        ("trtllm_mha", "trtllm_mha"),
        "spec_topk=4 is not 0 to 1",
    ),
    ("fa4 prefills an FP4 cache", "cuda:sm100", {**MHA, **DECODE, **FP4}, ("fa4", "trtllm_mha"), "FP4 cache"),
    ("the same, asked at prefill", "cuda:sm100", {**MHA, **EXTEND, **FP4}, ("fa4", "trtllm_mha"), "FP4 cache"),
    ("ascend, topk 4", "npu", {**MHA, **TREE, "page_size": 128}, ("ascend", "ascend"), "spec_topk=4"),
    ("intel_xpu, topk 4", "xpu", {**MHA, **TREE}, ("intel_xpu", "intel_xpu"), "spec_topk=4"),
    ("hpc_ops never speculates", "cuda:sm90", {**MHA, **VERIFY}, ("hpc_ops", "hpc_ops"), "spec_topk=1 is not"),
    ("flashinfer_mla, topk 4", "cuda:sm90", {**MLA, **TREE}, ("flashinfer_mla", "flashinfer_mla"), "spec_topk=4"),
    ("fa4 MLA, topk 1", "cuda:sm100", {**MLA, **VERIFY}, ("fa4", "fa4"), "spec_topk=1 is not declared"),
]
EVERYTHING = (*ALL, "amd-aiter", "torch-npu", "sgl-kernel-xpu", "hpc-ops")


@pytest.mark.parametrize(("platform", "changes", "pair", "words"), [pytest.param(*c[1:], id=c[0]) for c in RULES])
def test_pairs_that_do_not_work(platform: str, changes: dict[str, Any], pair: tuple[str, str], words: str) -> None:
    """Reported before any kernel runs, whichever phase is asked about."""
    request = AttentionRequest(**changes)
    with pytest.raises(UnsupportedRequestError) as refusal:
        what_if(request, platform=platform, installed=EVERYTHING, prefill_backend=pair[0], decode_backend=pair[1])
    assert words in str(refusal.value)


WORKS = [
    ("torch_native, topk 1", "cuda:sm90", {**MHA, **VERIFY}, ("torch_native", "torch_native"), "torch_native"),
    ("torch_sdpa, topk 4, page 64", "cuda:sm90", {**MHA, **TREE}, ("torch_sdpa", "torch_sdpa"), "torch_sdpa"),
    ("flex_attention, topk 4", "cuda:sm90", {**MHA, **TREE}, ("flex_attention", "triton"), "flex_attention"),
    ("fa4 prefills FP4, triton decodes", "cuda:sm100", {**MHA, **DECODE, **FP4}, ("fa4", "triton"), "triton"),
    ("fa4 prefills bf16, trtllm_mha decodes", "cuda:sm100", {**MHA, **DECODE}, ("fa4", "trtllm_mha"), "trtllm_mha"),
    ("trtllm_mha in both, FP4", "cuda:sm100", {**MHA, **DECODE, **FP4}, ("trtllm_mha", "trtllm_mha"), "trtllm_mha"),
    ("trtllm_mha, topk 1", "cuda:sm100", {**MHA, **VERIFY}, ("trtllm_mha", "flashinfer"), "trtllm_mha"),
    ("flashinfer, topk 4, page 64", "cuda:sm90", {**MHA, **TREE}, ("flashinfer", "flashinfer"), "flashinfer"),
    ("fa3, topk 4, page 64", "cuda:sm90", {**MHA, **TREE}, ("fa3", "fa3"), "fa3"),
    ("triton, topk 4, page 64", "cuda:sm90", {**MHA, **TREE}, ("triton", "triton"), "triton"),
    ("triton MLA, topk 4, page 64", "cuda:sm90", {**MLA, **TREE}, ("triton", "triton"), "triton"),
    ("aiter, topk 4, page 64", "rocm:gfx942", {**MHA, **TREE}, ("aiter", "aiter"), "aiter"),
    ("aiter, topk 4, page 1", "rocm:gfx942", {**MHA, **TREE, "page_size": 1}, ("aiter", "aiter"), "aiter"),
    ("fa4, topk 4, page 64", "cuda:sm100", {**MHA, **TREE}, ("fa4", "fa4"), "fa4"),
    ("fa4, topk 4, page 1", "cuda:sm100", {**MHA, **TREE, "page_size": 1}, ("fa4", "fa4"), "fa4"),
    ("fa3 MLA, topk 4, page 64", "cuda:sm90", {**MLA, **TREE}, ("fa3", "fa3"), "fa3"),
    ("fa3 MLA, topk 4, page 1", "cuda:sm90", {**MLA, **TREE, "page_size": 1}, ("fa3", "fa3"), "fa3"),
]


@pytest.mark.parametrize(("platform", "changes", "pair", "backend"), [pytest.param(*c[1:], id=c[0]) for c in WORKS])
def test_pairs_that_work(platform: str, changes: dict[str, Any], pair: tuple[str, str], backend: str) -> None:
    request = AttentionRequest(**changes)
    selection = what_if(
        request, platform=platform, installed=EVERYTHING, prefill_backend=pair[0], decode_backend=pair[1]
    )
    assert selection.backend == backend


def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="'prefill' or 'decode'"):
        what_if(AttentionRequest(**MHA), platform="cuda:sm90", speculative_attention_mode="draft")
