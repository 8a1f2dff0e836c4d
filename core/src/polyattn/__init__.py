"""polyattn: one attention API and one plugin contract for every chip and every host engine.

Importing this package imports no torch and no plugin; names are resolved at first use.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from .dispatch.compile.registration import register as _register_ops

__version__ = "0.1.0"

_WHERE = {
    "attention": "dispatch.dense",
    "bind": "dispatch.dense",
    "bind_part": "dispatch.part",
    "varlen_attention": "dispatch.varlen",
    "block_sparse_attention": "dispatch.block_sparse",
    "linear_attention": "dispatch.linear",
    "paged_attention": "dispatch.paged",
    "mla_attention": "dispatch.paged",
    "scaled_dot_product_attention": "dispatch.sdpa",
    "merge": "semantics.merge_lse",
    "use_backend": "selection.overrides",
    "component": "selection.overrides",
    "check_components": "selection.overrides",
    "checkpoint_context_fn": "selection.overrides",
    "configure": "selection.overrides",
    "force_backend": "selection.overrides",
    "global_force_attn_backend": "selection.overrides",
    "global_force_attn_backend_context_manager": "selection.overrides",
    "explain": "selection.inspection",
    "what_if": "selection.inspection",
    "list_backends": "selection.inspection",
    "support_matrix": "selection.inspection",
    "Selection": "selection.select",
    "AttentionRequest": "contract",
    "KVPart": "contract",
    "PolyattnError": "errors",
    "UnsupportedRequestError": "errors",
    "BackendUnavailableError": "errors",
    "BusyError": "errors",
    "PluginError": "errors",
    "ConfigError": "errors",
    "GraphError": "errors",
    "InternalError": "errors",
    "InvalidInputError": "errors",
    "OutOfPagesError": "errors",
    "RankError": "errors",
    "register_plugin": "registry.manager",
}

_ROOMS = ("adapters", "contract", "distributed", "integrations", "nn", "serving", "testing", "tuning", "video")
"""Public modules that an attribute of the package is enough for: `polyattn.video.Run` needs no import of its own."""

__all__ = [*sorted(_WHERE), "__version__"]

if TYPE_CHECKING:
    from . import adapters as adapters
    from . import contract as contract
    from . import distributed as distributed
    from . import integrations as integrations
    from . import nn as nn
    from . import serving as serving
    from . import testing as testing
    from . import tuning as tuning
    from . import video as video
    from .contract import AttentionRequest as AttentionRequest
    from .contract import KVPart as KVPart
    from .dispatch.block_sparse import block_sparse_attention as block_sparse_attention
    from .dispatch.linear import linear_attention as linear_attention
    from .dispatch.part import bind_part as bind_part
    from .dispatch.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from .dispatch.typed_calls import attention as attention
    from .dispatch.typed_calls import bind as bind
    from .dispatch.typed_calls import mla_attention as mla_attention
    from .dispatch.typed_calls import paged_attention as paged_attention
    from .dispatch.typed_calls import varlen_attention as varlen_attention
    from .errors import BackendUnavailableError as BackendUnavailableError
    from .errors import BusyError as BusyError
    from .errors import ConfigError as ConfigError
    from .errors import GraphError as GraphError
    from .errors import InternalError as InternalError
    from .errors import InvalidInputError as InvalidInputError
    from .errors import OutOfPagesError as OutOfPagesError
    from .errors import PluginError as PluginError
    from .errors import PolyattnError as PolyattnError
    from .errors import RankError as RankError
    from .errors import UnsupportedRequestError as UnsupportedRequestError
    from .registry.manager import register_plugin as register_plugin
    from .selection.inspection import explain as explain
    from .selection.inspection import list_backends as list_backends
    from .selection.inspection import support_matrix as support_matrix
    from .selection.inspection import what_if as what_if
    from .selection.overrides import check_components as check_components
    from .selection.overrides import checkpoint_context_fn as checkpoint_context_fn
    from .selection.overrides import component as component
    from .selection.overrides import configure as configure
    from .selection.overrides import force_backend as force_backend
    from .selection.overrides import global_force_attn_backend as global_force_attn_backend
    from .selection.overrides import (
        global_force_attn_backend_context_manager as global_force_attn_backend_context_manager,
    )
    from .selection.overrides import use_backend as use_backend
    from .selection.select import Selection as Selection
    from .semantics.merge_lse import merge as merge


if not TYPE_CHECKING:  # a checker would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            if name in _ROOMS:
                return _import_module(f".{name}", __name__)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(_import_module(f".{_WHERE[name]}", __name__), name)
        except ModuleNotFoundError as exc:
            if exc.name != "torch":
                raise
            from .errors import BackendUnavailableError, without_torch

            raise BackendUnavailableError(without_torch(f"polyattn.{name}")) from exc
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])


__path__.append(f"{__path__[0]}/moved")
"""Modules keep their former names for one minor version: `polyattn.moved` lists them."""

_register_ops()
