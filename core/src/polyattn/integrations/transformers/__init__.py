"""This room puts polyattn into Hugging Face transformers (5.4 or newer): `install()`, then
`attn_implementation="polyattn"`.

- `attention.py`: the function every layer calls. `keywords.py`: what else a model says, and what becomes of it.
- `masks.py`: the mask function, and masks put together. `names.py`: names transformers accepts.
- `linear.py`: linear attention, whose functions are replaced by name.
- `registry.py`: install and uninstall. `guard.py`: models whose code the name cannot reach. `layers.py`: `report`.

What it does and refuses: docs/transformers.md.
"""

from __future__ import annotations

from .layers import LayerReport, report
from .registry import install, installed, uninstall

__all__ = ["LayerReport", "install", "installed", "report", "uninstall"]
