"""Costs of calls, masks and selection that grow with signatures, lengths and installed backends."""

from __future__ import annotations

from .common import Quantity

QUANTITIES: tuple[Quantity, ...] = ()
