"""torch's symmetric memory for processes of a CPU: files that all of a group map, with the calls of the real one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Handle", "Shared"]


def _mapped(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class Handle:
    """What a rendezvous gives."""

    def __init__(self, group: Any, buffers: list[Tensor]) -> None:
        self._group, self._buffers = group, buffers

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """The memory of a rank as a tensor. storage_offset: in numbers of the dtype."""
        numbers = self._buffers[rank].view(dtype)
        assert storage_offset + math.prod(sizes) <= numbers.numel(), "past the end"
        return numbers[storage_offset : storage_offset + math.prod(sizes)].view(*sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Until all ranks have come."""
        assert timeout_ms > 0
        dist.barrier(self._group)


class Shared:
    """The module. made: how often ranks came together."""

    def __init__(self) -> None:
        self.made = 0
        self._paths: dict[int, str] = {}

    def empty(self, *size: int, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Memory that others can map."""
        assert (dtype, device) == (torch.uint8, torch.device("cpu"))
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.truncate(size[0])
        tensor = _mapped(file.name, size[0])
        self._paths[tensor.data_ptr()] = file.name
        return tensor

    def rendezvous(self, tensor: Tensor, group: Any) -> Handle:
        """Map the memory of the others."""
        self.made += 1
        members = dist.distributed_c10d._resolve_process_group(group)
        paths: list[Any] = [None] * dist.get_world_size(members)
        dist.all_gather_object(paths, (self._paths[tensor.data_ptr()], tensor.numel()), group=members)
        return Handle(members, [_mapped(*one) for one in paths])
