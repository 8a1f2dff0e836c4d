"""The former name of `polyattn.contract`."""

from __future__ import annotations

from polyattn.contract.hookspecs import *  # noqa: F403
from polyattn.contract.hookspecs import __all__ as __all__
from polyattn.moved import warn

warn("polyattn.hookspecs", "polyattn.contract")
