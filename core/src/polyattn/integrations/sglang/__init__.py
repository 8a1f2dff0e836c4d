"""SGLang as a host: `--attention-backend polyattn` routes every layer to the backend that polyattn chooses.

SGLang finds it by itself where both are installed (its plugin groups `sglang.srt.plugins` and
`sglang.multimodal_gen.plugins`). `backend.py` is what it then runs for language models, `diffusion.py` for images and
videos.
"""

from __future__ import annotations

import warnings
from typing import Any

from ... import envvars
from ..common.hosts import outdated

__all__ = ["NAME", "register", "register_diffusion"]

NAME = "polyattn"


def register() -> None:
    """Give SGLang the name polyattn, among the choices of its command and in its registry. It is safe to call again,
    in any process."""
    if _is_outdated():
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
    attention_registry.register_attention_backend(NAME)(_create)


def register_diffusion() -> None:
    """Put polyattn behind the names of SGLang's image and video models, where `POLYATTN_SGLANG_DIFFUSION` is 1: SGLang
    applies the hook before a model is built, in each process.

    Raises:
        ConfigError: the variable is neither 1 nor 0.
    """
    if not envvars.flag("POLYATTN_SGLANG_DIFFUSION") or _is_outdated():
        return
    from sglang.multimodal_gen.runtime import platforms
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    asked = f"{platforms.resolve_current_platform_cls_qualname()}.get_attn_backend_cls_str"
    HookRegistry.register(asked, _choose, HookType.AROUND)


def _choose(*given: Any) -> str:
    from .diffusion import choose  # imports layers, which processes of SGLang import after their hooks

    return choose(*given)


def _is_outdated() -> bool:
    if why := outdated("sglang"):
        warnings.warn(f"polyattn is not among SGLang's attention backends: {why}", RuntimeWarning, stacklevel=3)
    return bool(why)


def _create(runner: Any) -> Any:
    from .backend import PolyattnAttnBackend

    return PolyattnAttnBackend(runner)
