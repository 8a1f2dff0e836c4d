"""The former name of `polyattn.selection.inspection`."""

from __future__ import annotations

from polyattn.moved import warn
from polyattn.selection.inspection import *  # noqa: F403
from polyattn.selection.inspection import __all__ as __all__

warn("polyattn.inspection", "polyattn.selection.inspection")
