"""Names of backends as people write them: `NAME/KIND` means the kernels of one library, such as "fa/fa4"."""

from __future__ import annotations

__all__ = ["parts"]


def parts(name: str) -> tuple[str, str]:
    """(backend, kind) of a name without a platform; "fa" has no kind."""
    backend, _, kind = name.partition("/")
    return backend, kind
