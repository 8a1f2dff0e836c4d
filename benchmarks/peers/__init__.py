"""What a row can be measured with: polyattn's own kernels, and the libraries beside them, each called directly.

An entry is a function in a module of this folder, imported when it is first asked for. It takes a problem, brings its
tensors into its own layout, plans what it plans once per step, and returns a function from the number of an input set
to the result, laid out as the problem says. What it raises is reported in its place.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from measuring.problems import Problem

__all__ = ["ENTRIES", "Call", "Entry", "RefusedError", "versions"]

Call = Callable[[int], Any]


class RefusedError(Exception):
    """An entry has no kernel for a problem."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One library, or one of its kernels.

    Attributes:
        target: module.function in this folder. library: what its figures are to be ascribed to.
        compiles: its kernels are made at their first call, so that it pays to make them ahead, in several processes.
        distributions: whose versions a result names.
    """

    target: str
    library: str
    compiles: bool = False
    distributions: tuple[str, ...] = ()

    def prepare(self, problem: Problem) -> Call:
        module, _, function = self.target.rpartition(".")
        call: Call = getattr(importlib.import_module(f"{__name__}.{module}"), function)(problem)
        return call


_FLASHINFER = ("flashinfer-python", "apache-tvm-ffi")

ENTRIES: dict[str, Entry] = {
    "sdpa_cudnn": Entry("torch_sdpa.cudnn", "torch SDPA, cuDNN"),
    "sdpa_flash": Entry("torch_sdpa.flash", "torch SDPA, FlashAttention 2"),
    "sdpa_gathered": Entry("torch_sdpa.gathered", "torch SDPA on gathered pages, the gathering counted"),
    "flex_attention": Entry("flex_attention.flex", "torch FlexAttention", compiles=True),
    "flashinfer": Entry("flashinfer_peer.cuda_cores", "FlashInfer, CUDA cores", distributions=_FLASHINFER),
    "flashinfer_fa2": Entry("flashinfer_peer.fa2", "FlashInfer, fa2", distributions=_FLASHINFER),
    "flashinfer_fa3": Entry("flashinfer_peer.fa3", "FlashInfer, fa3", distributions=_FLASHINFER),
    "xqa": Entry("flashinfer_peer.xqa", "FlashInfer, XQA", distributions=_FLASHINFER),
    "fa3": Entry("fa3.fixed", "FlashAttention 3", distributions=("vllm",)),
    "fa3_varlen": Entry("fa3.packed", "FlashAttention 3, packed", distributions=("vllm",)),
    "fa4": Entry("fa4.fa4", "FlashAttention 4", compiles=True, distributions=("flash-attn-4", "nvidia-cutlass-dsl")),
    "flashmla": Entry("flashmla.dense", "FlashMLA", distributions=("vllm",)),
    "fla": Entry("fla_peer.parallel", "flash-linear-attention", compiles=True, distributions=("fla-core",)),
}
"""By the names that the sheet uses."""


def versions() -> dict[str, str]:
    """Of the peers' distributions that are here."""
    found = {}
    for name in sorted({name for entry in ENTRIES.values() for name in entry.distributions}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
