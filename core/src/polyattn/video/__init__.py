"""The public face of sparse attention for video models: what a call is told of its place. See docs/methods.md."""

from ..records import Place

__all__ = ["Place"]
