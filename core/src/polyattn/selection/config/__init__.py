"""Configuration: read options in any of their forms, check them against a backend's schema, merge the layers.

Nothing here keeps state, knows a backend by name or imports torch: backends arrive as records.
"""

from .options import check_options, resolve_options
from .reading import parse_backend_config, read_config_file
from .settings import (
    KV_CACHE_DTYPES,
    Settings,
    backend_names,
    check_settings,
    load_settings,
    named_backends,
    parse_components,
)

__all__ = [
    "KV_CACHE_DTYPES",
    "Settings",
    "backend_names",
    "check_options",
    "check_settings",
    "load_settings",
    "named_backends",
    "parse_backend_config",
    "parse_components",
    "read_config_file",
    "resolve_options",
]
