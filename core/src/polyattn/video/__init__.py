"""Sparse attention for video models: what a call is told of its place. See docs/methods.md."""

from ..contract import Place

__all__ = ["Place"]
