"""SGLang as a host: `--attention-backend polyattn` routes every layer to the backend that polyattn chooses.

SGLang finds it by itself where both are installed (its plugin group `sglang.srt.plugins`). `backend.py` is what it then
runs.
"""

from __future__ import annotations

import warnings
from typing import Any

from ..common.hosts import outdated

__all__ = ["NAME", "register"]

NAME = "polyattn"


def register() -> None:
    """Give SGLang the name polyattn, among the choices of its command and in its registry. It is safe to call again,
    in any process."""
    if why := outdated("sglang"):
        warnings.warn(f"polyattn is not among SGLang's attention backends: {why}", RuntimeWarning, stacklevel=2)
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
    attention_registry.register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    from .backend import PolyattnAttnBackend

    return PolyattnAttnBackend(runner)
