"""What was measured on this machine, kept between processes and looked up without a wait.

A kernel that has choices (tile sizes, splits) is registered with what they may be, and asks for them on its way to a
launch; the defaults that its package ships serve until somebody measures. Nothing is measured unless `tune` is called.
Importing this imports no torch.
"""

from __future__ import annotations

from .current import MODES, default_path, kernel_config, mode, record, reload, store
from .kernels import Choices, Kernel, Key, bucket, register_kernel, registered_kernels
from .offline import MOST_CANDIDATES, Trial, Tuned, note_serving, tune
from .places import place_of
from .rows import Place, Row
from .store import TuningStore

__all__ = [
    "MODES",
    "MOST_CANDIDATES",
    "Choices",
    "Kernel",
    "Key",
    "Place",
    "Row",
    "Trial",
    "Tuned",
    "TuningStore",
    "bucket",
    "default_path",
    "kernel_config",
    "mode",
    "note_serving",
    "place_of",
    "record",
    "register_kernel",
    "registered_kernels",
    "reload",
    "store",
    "tune",
]
