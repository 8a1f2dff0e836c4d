"""What a kernel asks before a launch: its measured choices, and whether selections made before still hold."""

from __future__ import annotations

from ..epoch import EPOCH, bump
from ..tuning import kernel_config

__all__ = ["EPOCH", "bump", "kernel_config"]
