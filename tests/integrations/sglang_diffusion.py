"""Stand-ins of the few modules of `sglang.multimodal_gen` that polyattn names. Their signatures are in `SIGNATURES`,
and are compared with SGLang's where it is installed."""

from __future__ import annotations

import abc
import enum
from types import ModuleType, SimpleNamespace
from typing import Any

ROOM = "sglang.multimodal_gen.runtime"
VERSION = "0.5.23"
SIGNATURES: dict[str, dict[str, list[str]]] = {
    "layers/attention/backends/attention_backend.py": {
        "AttentionImpl.__init__": [
            "self",
            "num_heads",
            "head_size",
            "softmax_scale",
            "causal",
            "num_kv_heads",
            "prefix",
        ],
        "AttentionImpl.preprocess_qkv": ["self", "qkv", "attn_metadata"],
        "AttentionImpl.forward": ["self", "query", "key", "value", "attn_metadata"],
        "AttentionImpl.forward_varlen": [
            *("self", "query", "key", "value", "cu_seqlens", "max_seqlen", "cu_seqlens_host"),
        ],
        "AttentionBackend.get_enum": [],
        "AttentionBackend.get_impl_cls": [],
        "AttentionBackend.get_metadata_cls": [],
        "AttentionBackend.get_builder_cls": [],
        "AttentionMetadataBuilder.build": ["self"],
    },
    "layers/attention/backends/video_sparse_attn.py": {
        "VideoSparseAttentionImpl.forward": ["self", "query", "key", "value", "gate_compress", "attn_metadata"],
    },
    "platforms/cpu.py": {"CpuPlatform.get_attn_backend_cls_str": ["cls", "selected_backend", "head_size", "dtype"]},
    "platforms/cuda.py": {
        "CudaPlatformBase.get_attn_backend_cls_str": ["cls", "selected_backend", "head_size", "dtype"],
    },
    "platforms/__init__.py": {"resolve_current_platform_cls_qualname": []},
    "managers/forward_context.py": {
        "get_forward_context_or_none": [],
        "set_forward_context": ["current_timestep", "attn_metadata", "forward_batch"],
    },
    "layers/attention/selector.py": {"get_component_attn_backend_name": []},
    "layers/attention/backends/skip_softmax.py": {"get_request_skip_softmax_params": []},
    "utils/precision.py": {"get_compute_dtype": []},
}
"""Of version `VERSION`: file -> function -> its parameters without *args and **kwargs."""
FIELDS = {
    "managers/forward_context.py": {"ForwardContext": {"current_timestep", "forward_batch"}},
    "pipelines_core/schedule_batch.py": {"Req": {"raw_latent_shape", "timesteps", "extra", "is_cfg_negative"}},
}
"""File -> class -> what polyattn reads of its objects."""


class Names(enum.Enum):
    """As `AttentionBackendEnum`."""

    FA, SLIDING_TILE_ATTN, TORCH_SDPA, VIDEO_SPARSE_ATTN, SAGE_ATTN, LASER_ATTN = range(6)

    def __str__(self) -> str:
        return self.name.lower()


class Own:
    """SGLang's own class behind what it chooses without a name."""

    @staticmethod
    def get_enum() -> Names:
        return Names.TORCH_SDPA


class CpuPlatform:
    """As a platform of SGLang, with the question that is hooked."""

    device_type = "cpu"

    @classmethod
    def get_attn_backend_cls_str(cls, selected_backend: Any, head_size: int, dtype: Any) -> str:
        return f"{__name__}.Own"


class _Hooks:
    """As `HookRegistry`, for hooks around a method of a class."""

    registered: list[tuple[str, Any, str]]

    def __init__(self) -> None:
        self.registered = []

    def register(self, target: str, hook: Any, hook_type: str) -> None:
        self.registered.append((target, hook, hook_type))


class _Impl(abc.ABC):  # noqa: B024 - as theirs
    def postprocess_output(self, output: Any, attn_metadata: Any) -> Any:
        return output


def stand_ins(state: SimpleNamespace) -> dict[str, ModuleType]:
    """Modules by name. state: what they answer (args, context, component, skip, dtype)."""
    attention, backends = f"{ROOM}.layers.attention", f"{ROOM}.layers.attention.backends"
    contents: dict[str, dict[str, Any]] = {
        f"{backends}.attention_backend": {
            name: type(name, (abc.ABC,), {})
            for name in ("AttentionBackend", "AttentionMetadata", "AttentionMetadataBuilder")
        },
        f"{backends}.skip_softmax": {"get_request_skip_softmax_params": lambda: state.skip},
        f"{attention}.selector": {"get_component_attn_backend_name": lambda: state.component},
        f"{ROOM}.managers.forward_context": {"get_forward_context_or_none": lambda: state.context},
        f"{ROOM}.platforms": {
            "AttentionBackendEnum": Names,
            "current_platform": CpuPlatform(),
            "resolve_current_platform_cls_qualname": lambda: f"{__name__}.CpuPlatform",
        },
        f"{ROOM}.platforms.plugins": {"HookRegistry": _Hooks(), "HookType": SimpleNamespace(AROUND="around")},
        f"{ROOM}.server_args": {"get_global_server_args": lambda: state.args},
        f"{ROOM}.utils.precision": {"get_compute_dtype": lambda: state.dtype},
    }
    contents[f"{backends}.attention_backend"]["AttentionImpl"] = _Impl
    modules: dict[str, ModuleType] = {}
    for name, content in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            modules.setdefault(path, ModuleType(path)).__path__ = []  # type: ignore[attr-defined]
            if end > 1:
                setattr(modules[".".join(parts[: end - 1])], parts[end - 1], modules[path])
        vars(modules[name]).update(content)
    return modules
