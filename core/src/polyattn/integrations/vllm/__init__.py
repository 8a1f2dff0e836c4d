"""vLLM as a host: `--attention-backend POLYATTN` routes every layer to the backend that polyattn chooses.

vLLM finds it by itself where both are installed (its plugin group `vllm.general_plugins`). `backend.py` is what it then
imports: capabilities answered from polyattn's rows, metadata, and a layer's calls.
"""

from __future__ import annotations

import warnings
from typing import Any

from ..common.hosts import outdated

__all__ = ["NAME", "register"]

NAME = "POLYATTN"
_BACKEND = f"{__name__}.backend.PolyattnBackend"


def register() -> None:
    """Give vLLM the name POLYATTN. It is safe to call again, and in any process; what is in its way is warned of, since
    vLLM would end of an error of a plugin that nobody asked for."""
    if why := outdated("vllm"):
        warnings.warn(f"polyattn is not among vLLM's attention backends: {why}", RuntimeWarning, stacklevel=2)
        return
    _member()


def _member() -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if NAME in AttentionBackendEnum.__members__:
        return AttentionBackendEnum[NAME]
    member = AttentionBackendEnum.register(NAME, _BACKEND)
    # A configuration is unpickled in new processes before their plugins run; by value the member would not be known.
    member.__reduce_ex__ = lambda protocol: (_member, ())
    return member
