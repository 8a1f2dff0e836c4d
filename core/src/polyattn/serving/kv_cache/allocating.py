"""Memory that is asked for and is not there: which sizes asked for it, in one typed error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...errors import InvalidInputError

__all__ = ["allocating"]


@contextlib.contextmanager
def allocating(what: str, instead: str) -> Iterator[None]:
    """Turn a lack of memory for what is allocated inside into an error that names sizes.

    Args:
        what: with its sizes, and a verb: "a pool of 5 pages needs". instead: the next step.

    Raises:
        InvalidInputError: there is not so much memory, on the host or on the device.
    """
    try:
        yield
    except (MemoryError, OverflowError, OSError, RuntimeError) as exc:
        # torch says it of a device by a RuntimeError, and of a CPU by one without a type of its own.
        if isinstance(exc, RuntimeError) and "memory" not in str(exc).lower():
            raise
        reason = (str(exc).splitlines() or [""])[0].rstrip(".")
        said = f" ({reason})" if reason else ""
        raise InvalidInputError(f"{what} more memory than can be had{said}: {instead}") from exc
