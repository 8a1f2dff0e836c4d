"""Memory of TensorRT-LLM's kernels: they need no plan, and count in a workspace that must be zero when it is new."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

__all__ = ["SEMAPHORES", "TILE", "WORKSPACE", "counters", "lse_bytes", "scratch_bytes", "workspace_of"]

WORKSPACE = 128 << 20
"""Bytes, what FlashInfer recommends."""
SEMAPHORES = 8 << 20
"""Bytes of it that are XQA's semaphores; behind them is its scratch."""
TILE = 32
"""Rows of a tile of XQA's drafts: (draft, head of the group), draft by draft."""

_kept: dict[Hashable, Tensor] = {}
_growing = threading.Lock()


def lse_bytes(heads: int, sequences: int, max_seqlen_q: int) -> int:
    """What trtllm-gen keeps of a workspace for the LSE: two numbers for each head and query, where each sequence has
    the queries of the longest, rounded up to 256 (trtllm_paged_attention_launcher)."""
    return 8 * heads * sequences * -(-max_seqlen_q // 256) * 256


def scratch_bytes(sequences: int, kv_heads: int, rows: int, head_dim: int, processors: int) -> int:
    """What XQA keeps of drafts that it splits by keys: of each tile its numbers, the largest logits and the sums, for
    each part of a sequence. It looks at nothing but sequences and heads when it chooses how many parts there are, and
    at no size of its scratch (`nbSubSeqPerSeq`, `scratchBuffers` of mha.cu).

    Args:
        rows: (draft, head of the group) of the longest sequence.
    """
    parts = processors // (sequences * kv_heads)
    if parts < 2:
        return 0
    return parts * sequences * kv_heads * -(-rows // TILE) * TILE * (2 * head_dim + 2 * 4)


def workspace_of(device: torch.device, nbytes: int = WORKSPACE) -> Tensor:
    """The workspace of calls by themselves, one for each device, stream: calls of a stream run one after another. A
    recorded call gets one of its own, in the memory of its graph, since that may be replayed on any stream."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    found = _kept.get(key)
    if found is not None and found.numel() >= nbytes:
        return found
    with _growing:  # threads of one stream: what one of them made larger stays
        found = _kept.get(key)
        if found is None or found.numel() < nbytes:
            found = _kept[key] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return found


def counters(memory: Callable[[str, int], Tensor], sequences: int, heads: int, processors: int) -> Tensor:
    """Semaphores of trtllm-gen, zero when they are new: `get_trtllm_gen_multi_ctas_kv_counter_bytes` of them."""
    return memory("trtllm counters", 4 * (-(-max(sequences * heads, processors) // 8) * 8)).zero_()
