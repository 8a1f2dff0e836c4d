"""polyattn: one attention API and one plugin contract for every chip and every host engine.

Importing this package imports no torch and no plugin; names are resolved at first use.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from .op_registration import register as _register_ops

__version__ = "0.1.0"

_WHERE = {
    "attention": "dispatch",
    "bind": "dispatch",
    "varlen_attention": "varlen",
    "block_sparse_attention": "block_sparse_calls",
    "linear_attention": "linear_calls",
    "paged_attention": "serving_calls",
    "mla_attention": "serving_calls",
    "scaled_dot_product_attention": "sdpa",
    "merge": "merging",
    "use_backend": "overrides",
    "component": "overrides",
    "check_components": "overrides",
    "checkpoint_context_fn": "overrides",
    "configure": "overrides",
    "force_backend": "overrides",
    "global_force_attn_backend": "overrides",
    "global_force_attn_backend_context_manager": "overrides",
    "explain": "inspection",
    "what_if": "inspection",
    "list_backends": "inspection",
    "support_matrix": "inspection",
    "Selection": "selection",
    "AttentionRequest": "records",
    "KVPart": "contract",
    "PolyattnError": "errors",
    "UnsupportedRequestError": "errors",
    "BackendUnavailableError": "errors",
    "PluginError": "errors",
    "ConfigError": "errors",
    "GraphError": "errors",
    "InternalError": "errors",
    "InvalidInputError": "errors",
    "OutOfPagesError": "errors",
    "register_plugin": "plugins",
}

__all__ = [*sorted(_WHERE), "__version__"]

if TYPE_CHECKING:
    from . import integrations as integrations
    from . import nn as nn
    from . import serving as serving
    from . import testing as testing
    from . import tuning as tuning
    from .block_sparse_calls import block_sparse_attention as block_sparse_attention
    from .contract import KVPart as KVPart
    from .errors import BackendUnavailableError as BackendUnavailableError
    from .errors import ConfigError as ConfigError
    from .errors import GraphError as GraphError
    from .errors import InternalError as InternalError
    from .errors import InvalidInputError as InvalidInputError
    from .errors import OutOfPagesError as OutOfPagesError
    from .errors import PluginError as PluginError
    from .errors import PolyattnError as PolyattnError
    from .errors import UnsupportedRequestError as UnsupportedRequestError
    from .inspection import explain as explain
    from .inspection import list_backends as list_backends
    from .inspection import support_matrix as support_matrix
    from .inspection import what_if as what_if
    from .linear_calls import linear_attention as linear_attention
    from .merging import merge as merge
    from .overrides import check_components as check_components
    from .overrides import checkpoint_context_fn as checkpoint_context_fn
    from .overrides import component as component
    from .overrides import configure as configure
    from .overrides import force_backend as force_backend
    from .overrides import global_force_attn_backend as global_force_attn_backend
    from .overrides import global_force_attn_backend_context_manager as global_force_attn_backend_context_manager
    from .overrides import use_backend as use_backend
    from .plugins import register_plugin as register_plugin
    from .records import AttentionRequest as AttentionRequest
    from .sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from .selection import Selection as Selection
    from .typed_calls import attention as attention
    from .typed_calls import bind as bind
    from .typed_calls import mla_attention as mla_attention
    from .typed_calls import paged_attention as paged_attention
    from .typed_calls import varlen_attention as varlen_attention


if not TYPE_CHECKING:  # a checker would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            if name in ("testing", "nn", "integrations", "serving", "tuning"):
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


_register_ops()
