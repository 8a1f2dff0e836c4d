"""The former name of `polyattn.selection.config`."""

from __future__ import annotations

from polyattn.moved import warn
from polyattn.selection.config import *  # noqa: F403
from polyattn.selection.config import __all__ as __all__

warn("polyattn.config", "polyattn.selection.config")
