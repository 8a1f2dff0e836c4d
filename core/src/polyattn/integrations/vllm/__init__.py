"""vLLM as a host: `--attention-backend POLYATTN`, or POLYATTN_MLA for models of latent attention, routes every layer to
the backend that polyattn chooses.

vLLM finds it by itself where both are installed (its plugin group `vllm.general_plugins`). `backend.py` and
`mla.py` are what it then imports: capabilities answered from polyattn's rows, metadata, and a layer's calls.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ...errors import UnsupportedRequestError
from ..common.hosts import outdated

__all__ = ["MLA", "NAME", "device", "refused", "register"]

NAME, MLA = "POLYATTN", "POLYATTN_MLA"
_CLASSES = {NAME: f"{__name__}.backend.PolyattnBackend", MLA: f"{__name__}.mla.PolyattnMLABackend"}


def register() -> None:
    """Give vLLM the names. It is safe to call again, and in any process; what is in its way is warned of, since
    vLLM would end of an error of a plugin that nobody asked for."""
    if why := outdated("vllm"):
        warnings.warn(f"polyattn is not among vLLM's attention backends: {why}", RuntimeWarning, stacklevel=2)
        return
    for name in _CLASSES:
        _member(name)


def device() -> torch.device:
    """Return the device that vLLM's platform computes on."""
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type or "cpu")


def refused(name: str, value: Any, backend: str) -> UnsupportedRequestError:
    """Make the error of a property of a layer that a backend does not serve."""
    return UnsupportedRequestError(
        f"{name}={value!r} of a layer of vLLM is not served by {backend}; choose another --attention-backend",
        {backend: [f"{name} is not served"]},
    )


def _member(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name in AttentionBackendEnum.__members__:
        return AttentionBackendEnum[name]
    member = AttentionBackendEnum.register(name, _CLASSES[name])
    # A configuration is unpickled in new processes before their plugins run; by value the member would not be known.
    member.__reduce_ex__ = lambda protocol: (_member, (name,))
    return member
