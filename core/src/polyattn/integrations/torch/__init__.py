"""PyTorch itself as a host: `install()` puts polyattn behind `torch.nn.functional.scaled_dot_product_attention`.

It uses torch's own slot for implementations of flash attention, so that programs change nothing, and calls whose masks
and sizes torch sends elsewhere stay with torch. `slot.py`: install and uninstall. `kernels.py`: torch's operators,
served by polyattn.
"""

from __future__ import annotations

from .slot import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
