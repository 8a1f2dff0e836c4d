"""The costs that benchmarks/scaling.py measures, one file per room of core."""

from __future__ import annotations

from . import dispatch, serving, stores
from .common import Quantity

QUANTITIES: tuple[Quantity, ...] = (*serving.QUANTITIES, *dispatch.QUANTITIES, *stores.QUANTITIES)
