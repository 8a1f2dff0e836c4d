"""Memory of TensorRT-LLM's kernels: they need no plan, and count in a workspace that must be zero when it is new."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

__all__ = ["WORKSPACE", "counters", "workspace_of"]

WORKSPACE = 128 << 20
"""Bytes, what FlashInfer recommends; the first 8 MiB are XQA's semaphores."""

_kept: dict[Hashable, Tensor] = {}


def workspace_of(device: torch.device) -> Tensor:
    """The workspace of calls by themselves, one for each device, stream: calls of a stream run one after another. A
    recorded call gets one of its own, in the memory of its graph, since that may be replayed on any stream."""
    if device.type != "cuda":
        return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _kept:
        _kept[key] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    return _kept[key]


def counters(memory: Callable[[str, int], Tensor], sequences: int, heads: int, processors: int) -> Tensor:
    """Semaphores of trtllm-gen, zero when they are new: `get_trtllm_gen_multi_ctas_kv_counter_bytes` of them."""
    return memory("trtllm counters", 4 * (-(-max(sequences * heads, processors) // 8) * 8)).zero_()
