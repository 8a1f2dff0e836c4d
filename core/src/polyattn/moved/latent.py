"""The former name of `polyattn.serving.mla`."""

from __future__ import annotations

from polyattn.moved import warn
from polyattn.serving.mla import *  # noqa: F403
from polyattn.serving.mla import __all__ as __all__

warn("polyattn.latent", "polyattn.serving.mla")
