"""Attention names. transformers decides by their parts: "flash" turns on a 2-D mask and a hub kernel, "a/b" a download,
"paged|" is cut off, "sdpa" and "flex_attention" ask the model for permission."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ConfigError
from ...plugins import get_manager
from ...records import BackendInfo

__all__ = ["TAKEOVER", "check_name", "pinned_names"]

TAKEOVER = "sdpa"
"""The one built-in name that may be replaced: its mask and its promises to models are the ones polyattn keeps."""

_MEANINGS = {
    "flash": "transformers takes it for a flash_attn kernel and gives it no mask",
    "/": "transformers takes it for a kernel on the Hub and downloads it",
    "sdpa": f"transformers asks the model whether it supports SDPA (the whole name {TAKEOVER!r} is allowed)",
    "flex_attention": "transformers asks the model whether it supports FlexAttention",
}


def check_name(name: str) -> None:
    """Refuse a name that transformers would read as something else.

    Raises:
        ConfigError: saying which part of the name means what.
    """
    advice = "choose another name, for example 'polyattn'"
    if not isinstance(name, str) or not name or name != name.strip():
        raise ConfigError(f"install name {name!r} must be a string without blanks around it; {advice}")
    if name == "eager" or name.startswith("paged|"):
        raise ConfigError(f"install name {name!r} is transformers' own word for its eager attention; {advice}")
    for part, meaning in _MEANINGS.items():
        if part in name and name != TAKEOVER:
            raise ConfigError(f"install name {name!r} contains {part!r}: {meaning}; {advice}")


def pinned_names(name: str) -> dict[str, str]:
    """`name|backend` -> backend, for every name and alias under which some platform has a dense backend.

    Backends of other machines and planned ones are in it too: asking for one says what is missing. Names in which
    transformers would see one of its own kernels are left out; `use_backend` reaches those.
    """
    found = {f"{name}|{backend}": backend for info in get_manager().backends.values() for backend in _dense_names(info)}
    return {k: v for k, v in sorted(found.items()) if "flash" not in k and "/" not in k}


def _dense_names(info: BackendInfo) -> Iterator[str]:
    limits = [row.allows.get("family") or row.when.get("family") for p in info.providers for row in p.rows]
    if any(limit is not None and limit.reason("dense") is None for limit in limits):
        yield info.name
        yield from (a.name for a in info.aliases if not a.families or "dense" in a.families)
