"""polyattn: one attention API and one plugin contract for every chip and every host engine.

Importing this package imports no torch and no plugin; names are resolved at first use.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "attention": "dispatch",
    "bind": "dispatch",
    "varlen_attention": "dispatch",
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
    "PolyattnError": "errors",
    "UnsupportedRequestError": "errors",
    "BackendUnavailableError": "errors",
    "PluginError": "errors",
    "ConfigError": "errors",
    "InvalidInputError": "errors",
    "register_plugin": "plugins",
}

__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from .dispatch import attention, bind, varlen_attention
    from .errors import (
        BackendUnavailableError,
        ConfigError,
        InvalidInputError,
        PluginError,
        PolyattnError,
        UnsupportedRequestError,
    )
    from .inspection import explain, list_backends, support_matrix, what_if
    from .merging import merge
    from .overrides import (
        check_components,
        checkpoint_context_fn,
        component,
        configure,
        force_backend,
        global_force_attn_backend,
        global_force_attn_backend_context_manager,
        use_backend,
    )
    from .plugins import register_plugin
    from .records import AttentionRequest
    from .sdpa import scaled_dot_product_attention
    from .selection import Selection
    from .serving_calls import mla_attention, paged_attention


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        if name in ("testing", "nn", "integrations"):
            return _import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
