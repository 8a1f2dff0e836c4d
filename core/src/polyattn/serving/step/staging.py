"""Memory that steps are written into: on the device by name, at fixed addresses, and one staging copy from the host."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

__all__ = ["Memory", "Staging", "cells_of"]


def cells_of(host: Tensor) -> memoryview:
    """The numbers of an int32 tensor of the CPU, to be written by slices of an `array`; valid as long as the tensor."""
    return memoryview((ctypes.c_int32 * host.numel()).from_address(host.data_ptr())).cast("B").cast("i")


class Memory:
    """Device memory by name. It is allocated when a name is first taken and kept.

    Args:
        static: addresses never change, for graphs: every name gets room for `rows` at once. Else memory is taken twice
            as large as is needed, and again when that is too little.

    Attributes:
        staged: a step is planned and what is in this memory is not written yet.
        changed: counts what moved, and what is written since.
    """

    def __init__(self, device: torch.device, static: bool, rows: int) -> None:
        self.device, self.static, self._rows = device, static, rows
        self.staged = False
        self.changed = 0
        self._flat: dict[Hashable, Tensor] = {}
        self._taken: dict[Hashable, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def take(self, name: Hashable, dtype: torch.dtype, rows: int, *row: int) -> Tensor:
        """[rows, *row], contiguous, with what was there before; zeros at first. Of a `static` memory a name is taken
        with one shape of rows only."""
        taken = self._taken.get(name)
        if taken is not None and taken.shape == (rows, *row):
            return taken
        width = math.prod(row)
        flat, need = self._flat.get(name), rows * width
        if flat is None or flat.numel() < need:
            room = (self._rows + 1) * width if self.static else 2 * need
            with torch.inference_mode(False):  # written in any mode from here on
                flat = self._flat[name] = torch.zeros(max(room, need), dtype=dtype, device=self.device)
            self.changed += 1
        taken = self._taken[name] = flat[:need].view(rows, *row)
        return taken

    def counting(self, count: int) -> Tensor:
        """int32 0, 1, ..., count - 1; not to be written."""
        flat = self._flat.get("counting")
        if flat is None or flat.numel() < count:
            if flat is not None and self.static:
                self._outgrown.append(flat)  # a graph may read it
            room = max(count, 2 * flat.numel() if flat is not None else 64)
            flat = self._flat["counting"] = torch.arange(room, dtype=torch.int32, device=self.device)
        return flat[:count]


class Staging:
    """Host lists of int32 that travel to the device together, in one copy that nobody waits for."""

    def __init__(self, count: int, device: torch.device) -> None:
        # Pinned memory is read by the device later. With two in turn, the one that is written was sent a step before
        # the last, which is over unless the device is two steps behind.
        self._pinned = device.type in ("cuda", "xpu")
        self._device = torch.zeros(count, dtype=torch.int32, device=device)
        turns = 2 if self._pinned else 1
        self._hosts = [
            torch.zeros(count, dtype=torch.int32, device="cpu", pin_memory=self._pinned) for _ in range(turns)
        ]
        self._cells = [cells_of(host) for host in self._hosts]
        self._sent = [torch.Event(device) for _ in range(turns)] if self._pinned else []
        self._turn = 0

    @property
    def received(self) -> Tensor:
        """int32 [count] on the device; its address stays."""
        return self._device

    def send(self, lists: Iterable[tuple[int, list[int]]]) -> None:
        """Send lists, each with the place of its first number."""
        turn = self._turn = (self._turn + 1) % len(self._hosts)
        if self._pinned:
            self._sent[turn].synchronize()
        cells = self._cells[turn]
        for start, values in lists:
            cells[start : start + len(values)] = array("i", values)
        self._device.copy_(self._hosts[turn], non_blocking=True)
        if self._pinned:
            self._sent[turn].record(torch.accelerator.current_stream(self._device.device))
