"""Sparse attention for video models: runs, and what a call is told of its place. See docs/methods.md."""

from ..contract import Place
from .run import LayerRow, Run, RunReport, place

__all__ = ["LayerRow", "Place", "Run", "RunReport", "place"]
