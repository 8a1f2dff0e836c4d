"""The libraries beside polyattn's candidates, each called directly: `polyattn bench ... --peers benchmarks/peers`.

One file for each library; `polyattn.bench.peers` says what its functions take and return.
"""

from __future__ import annotations

from polyattn.bench import Peer

__all__ = ["PEERS"]

_FLASHINFER = ("flashinfer-python", "apache-tvm-ffi")
_FA4 = ("flash-attn-4", "nvidia-cutlass-dsl")

PEERS: dict[str, Peer] = {
    "sdpa": Peer(".torch_sdpa:automatic", "torch SDPA, the kernel that torch picks"),
    "sdpa_cudnn": Peer(".torch_sdpa:cudnn", "torch SDPA, cuDNN"),
    "sdpa_flash": Peer(".torch_sdpa:flash", "torch SDPA, FlashAttention 2"),
    "sdpa_gathered": Peer(".torch_sdpa:gathered", "torch SDPA on gathered pages, the gathering counted"),
    "flex_attention": Peer(".flex_attention:flex", "torch FlexAttention", compiles=True),
    "flashinfer": Peer(".flashinfer_peer:default", "FlashInfer, its defaults", distributions=_FLASHINFER),
    "flashinfer_fa2": Peer(".flashinfer_peer:fa2", "FlashInfer, fa2", distributions=_FLASHINFER),
    "flashinfer_fa3": Peer(".flashinfer_peer:fa3", "FlashInfer, fa3", distributions=_FLASHINFER),
    "flashinfer_cascade": Peer(
        ".flashinfer_peer:cascade", "FlashInfer, cascade of a shared prefix", distributions=_FLASHINFER
    ),
    "xqa": Peer(".flashinfer_peer:xqa", "FlashInfer, XQA", distributions=_FLASHINFER),
    "fa3": Peer(".fa3:fixed", "FlashAttention 3", distributions=("vllm",)),
    "fa3_varlen": Peer(".fa3:packed", "FlashAttention 3, packed", distributions=("vllm",)),
    "fa4": Peer(".fa4:fa4", "FlashAttention 4", compiles=True, distributions=_FA4),
    "flashmla": Peer(".flashmla:dense", "FlashMLA", distributions=("vllm",)),
    "fla": Peer(".fla_peer:parallel", "flash-linear-attention", compiles=True, distributions=("fla-core",)),
}
"""By the names that results and bars use."""
