"""The former name of `polyattn.registry.platforms`."""

from __future__ import annotations

from polyattn.moved import warn
from polyattn.registry.platforms import *  # noqa: F403
from polyattn.registry.platforms import __all__ as __all__

warn("polyattn.platforms", "polyattn.registry.platforms")
