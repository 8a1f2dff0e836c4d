"""What adapters ask of the device at a call."""

from __future__ import annotations

import torch

__all__ = ["capturing", "recording"]

# Its Python name is a call more; builds without CUDA have that alone.
recording = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def capturing(kind: str) -> bool:
    """Whether work on a device of this type is recorded into a graph now."""
    return kind == "cuda" and recording()
