"""This module puts polyattn behind the attention layers of SGLang's image and video models (`sglang.multimodal_gen`).

SGLang has a closed list of names and asks its platform for the class behind each. A hook on that question answers with
a class of this module, which goes by SGLang's own name: so models keep what they do for a name, such as the gate of
`video_sparse_attn`. Where a call is, each layer reads from SGLang's forward context.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from sglang.multimodal_gen.runtime.layers.attention.backends import attention_backend as theirs
from sglang.multimodal_gen.runtime.layers.attention.backends.skip_softmax import get_request_skip_softmax_params
from sglang.multimodal_gen.runtime.layers.attention.selector import get_component_attn_backend_name
from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context_or_none
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
from sglang.multimodal_gen.runtime.server_args import get_global_server_args
from sglang.multimodal_gen.runtime.utils.precision import get_compute_dtype
from torch import Tensor

from ...contract import AttentionRequest, Place
from ...dispatch.binding import device_facts, dtype_name
from ...dispatch.call_key import Static
from ...dispatch.placed import asked, at
from ...dispatch.varlen import varlen_attention
from ...epoch import EPOCH
from ...errors import UnsupportedRequestError
from ...registry.manager import get_manager
from ...selection.config.settings import backend_names
from ...selection.overrides import SCOPE, Scope, add_options, current_settings, restored
from ...video import Run, place
from ..common.capabilities import reasons_against
from ..common.names import backend_words
from . import NAME

__all__ = ["PolyattnDiffusionImpl", "choose"]

_AUTOMATIC = "auto_"
_RUN = "_polyattn_run"
"""Where a request keeps its run; what begins with _ is not sent to other processes."""
_BLOCK = re.compile(r"blocks\.(\d+)\b")


def choose(original: Callable[..., str], platform: Any, selected: Any, head_size: int, dtype: torch.dtype) -> str:
    """Answer for a platform of SGLang which class stands behind a name.

    Args:
        original: the platform's own answer. selected: the name, a member of SGLang's list; None = none was given.
        head_size, dtype: of the layer.

    Returns:
        The dotted path of a class of this module; SGLang's own where polyattn has no backend of that name.
    """
    if selected is None:
        # What models do by the name stays what they would do without polyattn.
        member = resolve_name(original(platform, None, head_size, dtype)).get_enum()
        return f"{__name__}.{_AUTOMATIC}{member.name}"
    if str(selected) not in backend_words():
        logging.getLogger(__name__).warning("%s: polyattn has no backend of this name, SGLang's own serves", selected)
        return original(platform, selected, head_size, dtype)
    return f"{__name__}.{selected.name}"


@functools.cache
def __getattr__(name: str) -> Any:
    """Make the class that SGLang finds by the path that `choose` gave."""
    word = name.removeprefix(_AUTOMATIC)
    if word not in AttentionBackendEnum.__members__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    member = AttentionBackendEnum[word]
    impl = type(
        f"Polyattn_{name}",
        (PolyattnDiffusionImpl,),
        {"backend": None if word != name else str(member), "__module__": __name__},
    )
    return type(name, (_Backend,), {"member": member, "impl": impl, "__module__": __name__})


class _Builder(theirs.AttentionMetadataBuilder):  # type: ignore[misc]
    """What SGLang asks for at each step; places are read from its forward context, which it builds in any case."""

    def build(self, **facts: Any) -> None:
        """Keep nothing."""


class _Backend(theirs.AttentionBackend):  # type: ignore[misc]
    member: Any
    impl: type

    @classmethod
    def get_enum(cls) -> Any:
        """SGLang's name for it."""
        return cls.member

    @classmethod
    def get_impl_cls(cls) -> type:
        """The class of a layer's calls."""
        return cls.impl

    @staticmethod
    def get_metadata_cls() -> type:
        """SGLang's own: there is nothing to add."""
        return theirs.AttentionMetadata  # type: ignore[no-any-return]

    @staticmethod
    def get_builder_cls() -> type:
        """The class that SGLang asks at each step."""
        return _Builder


class PolyattnDiffusionImpl(theirs.AttentionImpl):  # type: ignore[misc]
    """A layer's calls.

    Args:
        num_heads: H_q. head_size: D. softmax_scale: of the logits. causal: aligned to the last key. num_kv_heads: H_kv,
            None = H_q. prefix: the layer's name in its model, with its block's number.
        extra: is_cross_attention; of the rest, what changes the result is refused.

    Raises:
        UnsupportedRequestError: the backend that is named cannot serve the layer, with its reasons; or the layer has
            what is not served through this class.
    """

    backend: str | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **extra: Any,
    ) -> None:
        if extra.get("dropout_p"):
            raise _refused(f"dropout_p={extra['dropout_p']}")
        self.heads, self.causal = num_heads, bool(causal)
        self.scale = None if softmax_scale == head_size**-0.5 else softmax_scale
        self.role = "cross" if extra.get("is_cross_attention") else "self"
        self.component = get_component_attn_backend_name() or ""
        found = _BLOCK.search(prefix)
        self.layer = None if found is None else int(found[1])
        self._before_text = -1
        if self.backend is not None:
            _hand_over_options(self.backend)
            self._judge(self.backend, head_size, num_kv_heads or num_heads)

    def _judge(self, backend: str, head_size: int, kv_heads: int) -> None:
        request = AttentionRequest(
            **device_facts(torch.device(current_platform.device_type or "cpu")), dtype=dtype_name(get_compute_dtype()),
            head_dim=head_size, heads=self.heads, kv_heads=kv_heads, scale=self.scale,
            causal="bottom_right" if self.causal else "none", place=asked(backend, self._scope(), EPOCH.value),
        )  # fmt: skip
        if reasons := reasons_against([request], backend):
            raise UnsupportedRequestError(
                f"{backend} of SGLang is polyattn's here, and it does not serve this layer: {'; '.join(reasons)}",
                {backend: list(reasons)},
            )

    def preprocess_qkv(self, qkv: Tensor, attn_metadata: Any) -> Tensor:
        """Note how many tokens come before the text, which SGLang appends after this. qkv: [3 or 4 * B, S, H, D]."""
        self._before_text = qkv.shape[1]
        return qkv

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None, gate_compress: Tensor | None = None
    ) -> Tensor:
        """Attend.

        Args:
            query: [B, S_q, H_q, D]. key, value: [B, S_k, H_kv, D]. attn_metadata: not read.
            gate_compress: [B, S_q, H_q, D], what a model learned for `video_sparse_attn`.

        Returns:
            [B, S_q, H_q, D]

        Raises:
            UnsupportedRequestError: what a request or parallelism asks is not served, by its name.
        """
        before, self._before_text = self._before_text, -1
        self._check_request()
        scope = self._scope()
        tensors = query, key, value, None, None, None
        static = Static("bottom_right" if self.causal else False, scale=self.scale, layout="BSHD")
        where = None
        if asked(self.backend, scope, EPOCH.value):
            if query.shape[2] != self.heads:
                raise _refused(f"a sparse method on {query.shape[2]} of {self.heads} heads, as ranks have them")
            where = self._place(query.shape[1], before, gate_compress)
        found: Tensor = at(tensors, static, self.backend, scope, where)
        return found

    def forward_varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cu_seqlens_host: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Attend sequences that lie one after the other. query: [T, H_q, D]. key, value: [T, H_kv, D]. cu_seqlens:
        int32 [N+1]. max_seqlen: at least the longest. Returns [T, H_q, D]."""
        self._check_request()
        with restored(self._scope()):
            found: Tensor = varlen_attention(
                query, key, value, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen,
                max_seqlen_k=max_seqlen, causal=self.causal, scale=self.scale, backend=self.backend,
            )  # fmt: skip
        return found

    def _check_request(self) -> None:
        if self.role == "self" and get_request_skip_softmax_params() is not None:
            raise _refused("skip_softmax_params of a request")

    def _scope(self) -> Scope:
        backend, name, role = SCOPE.get()
        return (backend, self.component, self.role) if self.component else (backend, name, role)

    def _place(self, tokens: int, before: int, gate: Tensor | None) -> Place | None:
        """Say where a call is; None outside of denoising, where calls have no place."""
        context = get_forward_context_or_none()
        batch = None if context is None else context.forward_batch
        if context is None or batch is None:
            return None
        model = get_global_server_args().pipeline_config.dit_config
        grid = _grid(batch.raw_latent_shape, model)
        text = 0
        if grid is not None and self.role == "self":
            text = max(tokens - grid[0] * grid[1] * grid[2], 0)
            if text and tokens - text != before:
                raise _refused(f"a sparse method over {text} tokens beside the grid {grid}, of text or padding")
        run = batch.extra.get(_RUN)
        if run is None:
            steps = None if batch.timesteps is None else len(batch.timesteps)
            layers = getattr(model, "num_layers", None)
            more = getattr(model, "num_single_layers", None) or 0
            run = batch.extra[_RUN] = Run(steps=steps, layers=None if layers is None else layers + more)
        branch = "uncond" if batch.is_cfg_negative else "cond"
        with run.at(grid=grid, text=(0, text), step=context.current_timestep, branch=branch):
            return place(layer=self.layer, gate=gate, role=self.role)


def _grid(latent: Any, model: Any) -> tuple[int, int, int] | None:
    """Return how many tokens a video has along time, height and width; None where SGLang says no shape of that kind.

    Args:
        latent: [B, C, T, H, W]. model: the configuration that has the sizes of a patch.
    """
    size = getattr(model, "patch_size", None)
    if latent is None or len(latent) != 5 or size is None:
        return None
    patch = (getattr(model, "patch_size_t", None) or size, size, size) if isinstance(size, int) else tuple(size)
    t, h, w = (int(cells) // int(edge) for cells, edge in zip(latent[2:5], patch, strict=True))
    return t, h, w


def _hand_over_options(backend: str) -> None:
    """Give polyattn the options of SGLang's command, once, for a backend that has any."""
    given = getattr(get_global_server_args(), "attention_backend_config", None)
    if not given or not any(info.config for info in backend_names(get_manager().backends.values())[backend]):
        return
    options = {str(key): value for key, value in given.items()}
    known = current_settings().attention_backend_config.get(backend, {})
    if any(known.get(key, ...) != value for key, value in options.items()):
        add_options("--attention-backend-config", {backend: options})


def _refused(what: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{what}: not served by polyattn inside SGLang's diffusion; leave it out, or choose a dense backend or unset "
        f"POLYATTN_SGLANG_DIFFUSION",
        {NAME: [f"{what}: not served"]},
    )
