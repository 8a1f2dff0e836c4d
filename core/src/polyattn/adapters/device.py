"""What adapters ask of the device at a call."""

from __future__ import annotations

import torch

__all__ = ["capturing", "recording"]

# Its Python name is a call more; builds without CUDA have that alone.
recording = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def capturing(kind: str) -> bool:
    """Say whether work on a device is recorded into a CUDA or HIP graph now.

    Args:
        kind: the device's type, as `tensor.device.type` has it. ROCm's is "cuda"; others record no graphs here.
    """
    return kind == "cuda" and recording()
