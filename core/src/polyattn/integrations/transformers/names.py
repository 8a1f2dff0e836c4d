"""This module checks the attention names that are given to transformers, which decides by their parts.

"flash" turns on a 2-D mask and a hub kernel, "a/b" a download, "paged|" is cut off, "sdpa" and "flex_attention" ask the
model for permission.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..common.names import backend_words, pinned

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
    """Map `name|backend` to the backend, for every name and alias of every backend (`common.names.backend_words`).

    Names in which transformers would see one of its own kernels are left out; `use_backend` reaches those.
    """
    return pinned(name, (word for word in backend_words() if "flash" not in word and "/" not in word))
