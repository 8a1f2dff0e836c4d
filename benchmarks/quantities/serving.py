"""Costs of serving that grow with requests, pages and prefixes."""

from __future__ import annotations

from .common import Quantity

QUANTITIES: tuple[Quantity, ...] = ()
