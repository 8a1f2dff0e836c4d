"""The plugin of NVIDIA GPUs: it announces backends, as data. Their limits are in `records/`, one file per library."""

from __future__ import annotations

from collections.abc import Iterable

from polyattn.contract import BackendInfo, hookimpl

from .records import diffusion, fa, fa_serving, flashinfer, flashinfer_cudnn, linear, serving

__all__ = ["BACKENDS", "polyattn_register_backends", "polyattn_register_measurements"]

POLYATTN_API_VERSION = 2

BACKENDS: tuple[BackendInfo, ...] = (
    *fa.BACKENDS,
    *fa_serving.BACKENDS,
    *flashinfer.BACKENDS,
    *flashinfer_cudnn.BACKENDS,
    *serving.BACKENDS,
    *diffusion.BACKENDS,
    *linear.BACKENDS,
)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """Every CUDA backend polyattn knows."""
    return BACKENDS


@hookimpl
def polyattn_register_measurements() -> Iterable[str]:
    """What was measured: on an H200 by `polyattn bench --tune`, with the sheets of benchmarks/sheets, and by `polyattn
    tune`; on an H200 and an H100 random shapes, by benchmarks/sample_table.py."""
    names = "nvidia-h200", "nvidia-h200-sample", "nvidia-h100"
    return [f"polyattn_cuda:measurements/{name}.json" for name in names]
