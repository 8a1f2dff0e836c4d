"""Attention whose tokens lie on several ranks: who holds what, what ranks exchange, and how they agree."""

from .layers import RingAttention, UlyssesAttention, USPAttention
from .ranks import init_mesh

__all__ = ["RingAttention", "USPAttention", "UlyssesAttention", "init_mesh"]
