"""This room keeps what was measured on this machine, and looks it up without a wait.

A kernel that has choices (tile sizes, splits) is registered with what they may be, and asks for them on its way to a
launch; the defaults that its package ships serve until somebody measures. Nothing is measured unless `tune` is called.
Importing this imports no torch.
"""

from __future__ import annotations

from .choices import (
    NOTHING,
    Advice,
    advise,
    advising,
    backend_row,
    measured,
    meet,
    shipped_advice,
    with_lengths,
)
from .current import MODES, default_path, kernel_config, mode, quarantine, record, release, reload, store, watch
from .kernels import Choices, Kernel, Key, bucket, fine_bucket, registered_kernels
from .keys import request_key, request_of
from .known import measured_of, shipped_devices
from .offline import MOST_CANDIDATES, Trial, Tuned, note_serving, serving, tune
from .places import cpu_name, driver, place_of
from .rows import BACKEND, Place, Quarantined, Row
from .store import TuningStore
from .times import SAME, Measured

__all__ = [
    "BACKEND",
    "MODES",
    "MOST_CANDIDATES",
    "NOTHING",
    "SAME",
    "Advice",
    "Choices",
    "Kernel",
    "Key",
    "Measured",
    "Place",
    "Quarantined",
    "Row",
    "Trial",
    "Tuned",
    "TuningStore",
    "advise",
    "advising",
    "backend_row",
    "bucket",
    "cpu_name",
    "default_path",
    "driver",
    "fine_bucket",
    "kernel_config",
    "measured",
    "measured_of",
    "meet",
    "mode",
    "note_serving",
    "place_of",
    "quarantine",
    "record",
    "registered_kernels",
    "release",
    "reload",
    "request_key",
    "request_of",
    "serving",
    "shipped_advice",
    "shipped_devices",
    "store",
    "tune",
    "watch",
    "with_lengths",
]
