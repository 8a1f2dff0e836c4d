"""Room: the shared memory that a program needs and may have, and the next smaller configuration where it has less.

What is needed is computed from the tiles that are there at a time. Compilers add little to that, and not all of it can
be foreseen: a configuration that the launch itself refuses is remembered, and the next smaller one takes its place.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from polyattn.adapters import bump
from polyattn.contract import Kernel, Key, UnsupportedRequestError
from polyattn_triton import runtime  # first: it decides how Triton is imported

from triton.runtime.errors import OutOfResources, PTXASError  # isort: skip

__all__ = [
    "TOO_LARGE",
    "Loop",
    "Room",
    "accepted",
    "fitting",
    "refuse",
    "refused",
    "shared_memory",
    "smaller",
    "too_large",
]

_C = TypeVar("_C", bound=Any)
"""A `Config` of some kernel: a named tuple."""

TOO_LARGE = (OutOfResources, PTXASError)
"""What a launch raises of a configuration that does not fit the device."""


@functools.cache
def shared_memory(device: torch.device) -> int | None:
    """Bytes that a program may have there; None where nobody says: the interpreter, and chips that are no GPUs."""
    if runtime.INTERPRETED or device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block if torch.version.hip else properties.shared_memory_per_block_optin)


class Loop(NamedTuple):
    """A loop that multiplies a tile of `rows`, which stays, with one of `columns` after the other.

    Attributes:
        rows, columns: of the tile of logits. warps, stages: of the program and its pipeline.
        held, step: bytes of what stays, and of what each step loads.
        once: of the latter, what is there at a time where nothing is loaded ahead.
        itemsize: bytes of a number that is multiplied. mask: bytes of a mask's number, 0 = there is none.
        stored: bits of a loaded number, 0 = they are multiplied as they are.
        spare: bytes of `once` that are free again by the time that weights are exchanged.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    held: int
    step: int
    once: int
    itemsize: int
    mask: int = 0
    stored: int = 0
    spare: int = 0

    def needs(self, where: str) -> int:
        """Bytes of shared memory. `where`: see `choices.architecture`."""
        logits, ahead = self.rows * self.columns, self.stages - 1
        # `wgmma` reads both operands where they were left; elsewhere a step that is computed with is in registers.
        shared = where in ("hopper", "blackwell") and self.itemsize == 2 and self.rows >= 64
        loaded = self.once if not ahead else self.step * (self.stages if shared and not self.stored else ahead)
        # What is made of other numbers is in registers only where `mma.sync` takes bytes from there.
        if self.stored and ahead and (shared or self.itemsize == 4 or self.stored == 4):
            loaded += self.once
        # AMD's operands that stay are in registers.
        held = 0 if where == "other" else self.held
        # An instruction has 16 rows: where warps share them, the weights go from one to the other.
        exchanged = logits * self.itemsize if not shared or 16 * self.warps > self.rows else 0
        if not ahead:
            exchanged = max(exchanged - self.spare, 0)
        # A mask is turned into halves on its way, or, one of larger numbers than bytes, loaded ahead.
        halves = self.mask == 1 or where == "other"
        masks = 2 * logits * (self.mask > 0) if halves else max(ahead, 1) * logits * self.mask
        return held + loaded + exchanged + masks


class Room(NamedTuple):
    """One of the launches that a configuration is for.

    Attributes:
        loop: what it makes of a configuration. shrinks: names of what may be smaller, and down to what, in this order:
            stages by one, tiles by half.
    """

    loop: Callable[[Any], Loop]
    shrinks: Sequence[tuple[str, int]]


def smaller(config: _C, shrinks: Sequence[tuple[str, int]]) -> _C | None:
    """The next smaller configuration, None if there is none."""
    for name, least in shrinks:
        value = getattr(config, name)
        if value > least:
            return config._replace(**{name: value - 1 if name.endswith("stages") else value // 2})  # type: ignore[no-any-return]
    return None


def fitting(config: _C, rooms: Sequence[Room], where: str, limit: int | None) -> _C:
    """`config`, or the first smaller one whose launches need no more than `limit`; the smallest, if none does."""
    for room in rooms if limit is not None else ():
        while room.loop(config).needs(where) > limit:
            less = smaller(config, room.shrinks)
            if less is None:
                break
            config = less
    return config


# ----------------------------------------------------------------------------- what was not foreseen, and the end of it

_Asked = tuple[str, Key, Any, torch.device]
"""Kernel, key, what else its needs depend on, device."""
_refused: dict[_Asked, dict[Any, tuple[int, str]]] = {}
"""Configurations that a launch refused: which of its rooms, and why."""


def refuse(
    kernel: Kernel, key: Key, extra: Any, device: torch.device, config: Any, error: Exception, room: int = 0,
    last: bool = False,
) -> None:  # fmt: skip
    """Remember that `config` did not fit: whoever asks again for such a launch is given a smaller one.

    Args:
        key, extra: as `choices.chosen` was given. room: which launch it was. last: there is no other configuration.

    Raises:
        UnsupportedRequestError: it was the last. The error itself, if it is none of size.
    """
    if isinstance(error, PTXASError) and not any(word in str(error).lower() for word in ("shared", "regist")):
        raise error
    if last:
        raise too_large(kernel, key, device, error) from error
    # Another thread may have been first to learn it.
    _refused.setdefault((kernel.name, key, extra, device), {})[config] = (room, _why(error))
    bump(traced=False)


def refused(kernel: Kernel, key: Key, extra: Any, device: torch.device) -> Mapping[Any, tuple[int, str]]:
    """What `refuse` was told of such launches."""
    return _refused.get((kernel.name, key, extra, device), {})


def accepted(config: _C, rooms: Sequence[Room], kernel: Kernel, key: Key, extra: Any, device: torch.device) -> _C:
    """`config`, or the first smaller one that no launch refused.

    Raises:
        UnsupportedRequestError: there is none left.
    """
    known = refused(kernel, key, extra, device)
    while config in known:
        room, why = known[config]
        less = smaller(config, rooms[room].shrinks)
        if less is None:
            raise too_large(kernel, key, device, why)
        config = less
    return config


def _why(error: Exception) -> str:
    """In words: an exception that is kept keeps the tensors of its frames."""
    if isinstance(error, OutOfResources):
        return f"needs {error.required:,} bytes of {error.name}, and a program may have {error.limit:,} there"
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # Triton quotes the assembler after a line that says so, and ends with a command.
    quoted = [after for before, after in itertools.pairwise(said) if before.endswith("stderr:")]
    return f"does not compile there: {(quoted or said[-1:])[0]}"


def too_large(kernel: Kernel, key: Key, device: torch.device, error: Exception | str) -> UnsupportedRequestError:
    """What a caller is told where no configuration is left. `error`: of the last one's launch, or its `_why`."""
    named = kernel.named(key)
    d = named.get("head_dim", 0) or named["latent_dim"] + named["rope_dim"]
    d_v = named.get("v_dim") or named.get("latent_dim") or d
    why = error if isinstance(error, str) else _why(error)
    reason = f"kernel {kernel.name} at D={d}, D_v={d_v} in {named['dtype']} on {_name(device)} {why}"
    text = f"triton: {reason}. Choose another backend: polyattn.explain lists those that can serve this call"
    return UnsupportedRequestError(text, {"triton": [reason]})


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    arch = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm{properties.major}{properties.minor}"
    return f"{arch} ({properties.name})"
