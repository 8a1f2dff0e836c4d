"""Attention whose tokens lie on several ranks: who holds what, what ranks exchange, and how they agree."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

__all__ = ["RingAttention", "USPAttention", "UlyssesAttention", "init_mesh"]

if TYPE_CHECKING:
    from .layers import RingAttention as RingAttention
    from .layers import UlyssesAttention as UlyssesAttention
    from .layers import USPAttention as USPAttention
    from .ranks import init_mesh as init_mesh
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(".ranks" if name == "init_mesh" else ".layers", __name__), name)
