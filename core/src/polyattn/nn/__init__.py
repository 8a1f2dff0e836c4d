"""Layers: attention as a module, for any model component. A layer captures its backend choice when it is built."""

from .local import LocalAttention

__all__ = ["LocalAttention"]
