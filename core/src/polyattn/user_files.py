"""Read files that a user names, in bounded time and memory: not a device, not a pipe that nobody writes to, not without
end."""

from __future__ import annotations

import os
import stat

__all__ = ["MEGABYTE", "read_bytes", "read_text"]

MEGABYTE = 2**20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_bytes(path: str | os.PathLike[str], most: int, *, head: int | None = None, pipes: bool = False) -> bytes:
    """What is in a file.

    Args:
        path: of the file; links are followed.
        most: bytes that it may have.
        head: read only so many bytes, of a file of any size. pipes: what a pipe brings is read too.

    Raises:
        OSError: there is none, it cannot be read, it is no regular file, or it has more than `most` bytes.
        ValueError: the path has a NUL.
    """
    # A pipe without a writer would be waited for before it is known to be one.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | (0 if pipes else getattr(os, "O_NONBLOCK", 0)))
    with os.fdopen(handle, "rb") as file:
        kind = stat.S_IFMT(os.fstat(handle).st_mode)
        if kind != stat.S_IFREG and not (pipes and kind == stat.S_IFIFO):
            raise OSError(f"it is {_KINDS.get(kind, 'something else')}; a regular file is needed")
        # Not by its size alone: a file may grow, and files of the kernel say 0.
        found = file.read(most + 1 if head is None else head)
    if head is None and len(found) > most:
        raise OSError(f"it has more than {most / MEGABYTE:g} MiB, the most that is read")
    return found


def read_text(path: str | os.PathLike[str], most: int, *, pipes: bool = False) -> str:
    """`read_bytes` of a text in UTF-8, with line ends as Python has them.

    Raises:
        OSError, ValueError: as `read_bytes`. UnicodeDecodeError: it is another encoding.
    """
    text = read_bytes(path, most, pipes=pipes).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
