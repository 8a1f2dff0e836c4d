"""The former name of `polyattn.semantics.reference`."""

from __future__ import annotations

from polyattn.moved import warn
from polyattn.semantics.reference import *  # noqa: F403
from polyattn.semantics.reference import __all__ as __all__

warn("polyattn.reference", "polyattn.semantics.reference")
