"""The former name of `polyattn.dispatch.compile.op_plans`."""

from __future__ import annotations

from polyattn.dispatch.compile.op_plans import *  # noqa: F403
from polyattn.dispatch.compile.op_plans import __all__ as __all__
from polyattn.moved import warn

warn("polyattn.op_plans", "polyattn.dispatch.compile.op_plans")
