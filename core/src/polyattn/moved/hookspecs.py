"""The former name of `polyattn.contract`, which packages of contract 1 import: it stays, and warns of nothing."""

from __future__ import annotations

from polyattn.contract.hookspecs import *  # noqa: F403
from polyattn.contract.hookspecs import __all__ as __all__
