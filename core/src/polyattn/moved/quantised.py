"""The former name of `polyattn.semantics.kv_quant`."""

from __future__ import annotations

from polyattn.moved import warn
from polyattn.semantics.kv_quant import *  # noqa: F403
from polyattn.semantics.kv_quant import __all__ as __all__

warn("polyattn.quantised", "polyattn.semantics.kv_quant")
