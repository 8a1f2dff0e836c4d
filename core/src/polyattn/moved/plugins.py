"""The former name of `polyattn.registry.manager`."""

from __future__ import annotations

from polyattn.moved import warn
from polyattn.registry.manager import *  # noqa: F403
from polyattn.registry.manager import __all__ as __all__

warn("polyattn.plugins", "polyattn.registry.manager")
