"""Each NVIDIA architecture and each kind of call: who is chosen with everything installed, and as packages go missing.

A chain is who is chosen, first to last; after each the packages that its providers come from are taken away. The last
one needs none.
"""

from __future__ import annotations

from typing import Any

import pytest

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.registry.manager import get_manager

ARCHITECTURES = {
    "Ampere": ("sm80", "sm86"),
    "Ada": ("sm89",),
    "Hopper": ("sm90",),
    "Blackwell": ("sm100", "sm103"),
    "Blackwell, consumer": ("sm120",),
}
PAGED: dict[str, Any] = {"family": "paged", "heads": 32, "kv_heads": 8, "page_size": 64}
LATENT: dict[str, Any] = {
    "family": "mla",
    "heads": 128,
    "head_dim": 576,
    "v_head_dim": 512,
    "scale": 192**-0.5,
    "page_size": 64,
}
DECODE = {"phase": "decode", "s_relation": "one"}
EXTEND = {"phase": "extend", "s_relation": "fewer", "causal": "bottom_right"}
CHAIN = {**EXTEND, "phase": "verify", "spec_topk": 1}
TREE = {**EXTEND, "phase": "verify", "spec_topk": 4, "tree": True}
CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, causal": {"causal": "bottom_right"},
    "dense, training": {"causal": "bottom_right", "grad": ("query", "key", "value")},
    "dense, cross": {"cross": True, "s_relation": "more"},
    "dense, float32": {"dtype": "float32"},
    "packed": {"family": "varlen", "causal": "bottom_right"},
    "decode": {**PAGED, **DECODE},
    "extend": {**PAGED, **EXTEND},
    "chain of drafts": {**PAGED, **CHAIN},
    "tree of drafts": {**PAGED, **TREE},
    "latent decode": {**LATENT, **DECODE},
    "latent extend": {**LATENT, **EXTEND},
    "gated delta rule": {"family": "linear", "method": "gdn", "heads": 32, "kv_heads": 16},
}

FA = ("fa", "torch_sdpa")
SDPA = ("torch_sdpa",)
EVERYWHERE = {
    "dense": FA,
    "dense, causal": FA,
    "dense, training": FA,
    "dense, cross": FA,
    "dense, float32": SDPA,
    "packed": ("fa", "flashinfer", "triton"),
    "gated delta rule": ("triton",),
}
FLASHINFER = ("flashinfer", "triton")
SERVED = {
    "decode": FLASHINFER,
    "extend": FLASHINFER,
    "chain of drafts": FLASHINFER,
    "tree of drafts": FLASHINFER,
    "latent decode": ("triton",),
    "latent extend": ("triton",),
}
FA3 = ("fa3", "flashinfer", "triton")
TRTLLM = ("trtllm_mha", "triton")
EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    **{name: {**EVERYWHERE, **SERVED} for name in ARCHITECTURES},
    "Hopper": {
        **EVERYWHERE,
        **dict.fromkeys(("decode", "extend", "chain of drafts"), FA3),
        "tree of drafts": FLASHINFER,
        **dict.fromkeys(("latent decode", "latent extend"), ("fa3", "triton")),
    },
    "Blackwell": {
        **EVERYWHERE,
        **dict.fromkeys(("decode", "extend", "chain of drafts"), TRTLLM),
        "tree of drafts": FLASHINFER,
        **dict.fromkeys(("latent decode", "latent extend"), ("trtllm_mla", "triton")),
    },
}
TOGETHER = [
    pytest.param(arch, call, EXPECTED[name][call], id=f"{name} {arch}, {call}")
    for name, archs in ARCHITECTURES.items()
    for arch in archs
    for call in CALLS
]
OURS = ("torch", "polyattn-triton")


def packages(backend: str = "") -> set[str]:
    """What the providers of a CUDA backend, or of all of them, are installed from."""
    backends = get_manager().backends.values()
    named = [b for b in backends if b.platform == "cuda" and backend in ("", b.name)]
    return {r.distribution for b in named for p in b.providers for r in p.requires} - set(OURS)


@pytest.mark.parametrize(("arch", "call", "chain"), TOGETHER)
def test_chain(arch: str, call: str, chain: tuple[str, ...]) -> None:
    installed = packages()
    for number, backend in enumerate(chain):
        request = AttentionRequest(**CALLS[call])
        selection = what_if(request, platform=f"cuda:{arch}@12.8", installed=(*installed, *OURS))
        assert selection.backend == backend, f"after {number} of {chain}: {selection}"
        assert selection.source in ("platform rule", "priority")
        assert selection.why
        installed -= packages(backend)


@pytest.mark.parametrize("arch", [arch for archs in ARCHITECTURES.values() for arch in archs])
@pytest.mark.parametrize("call", list(CALLS))
def test_nothing_installed(arch: str, call: str) -> None:
    """What PyTorch brings serves every call, and is who remains of the chain."""
    name = next(name for name, archs in ARCHITECTURES.items() if arch in archs)
    selection = what_if(AttentionRequest(**CALLS[call]), platform=f"cuda:{arch}@12.8", installed=())
    assert selection.backend == EXPECTED[name][call][-1]


@pytest.mark.parametrize("arch", [arch for archs in ARCHITECTURES.values() for arch in archs])
def test_all_calls_have_a_rule(arch: str) -> None:
    """With everything installed no choice is left to priorities."""
    chosen = {
        call: what_if(AttentionRequest(**fields), platform=f"cuda:{arch}@12.8", installed=packages()).source
        for call, fields in CALLS.items()
    }
    assert set(chosen.values()) == {"platform rule"}, chosen
