"""Costs of the tuning store, the matrix and the command line."""

from __future__ import annotations

from .common import Quantity

QUANTITIES: tuple[Quantity, ...] = ()
