"""What serving does on a device beside attention, by kernels that a package brings: writing rows of a cache, and the
tables of a step.

Core's own torch operators are the definition, and serve wherever nobody brings kernels. A plugin announces a class
(`polyattn_register_device_ops`); it is imported when a pool is made on such a device. Importing this imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ...contract import DeviceOpsInfo
from ...registry.distributions import distribution_version
from ...registry.manager import get_manager

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..kv_cache.pool import LayerCache

__all__ = [
    "CORE",
    "WRITTEN",
    "DeviceOps",
    "RowsWriter",
    "StepTables",
    "StepView",
    "StepWriter",
    "device_ops",
]

CORE = "polyattn"
"""Who writes where no package brings kernels."""

WRITTEN = ("cu_seqlens_k", "page_counts", "kv_indptr", "kv_indices", "last_page_len")
"""Views of a `Step` that a `StepWriter` writes beside its page_table and seq_lens."""


class DeviceOps(Protocol):
    """Made once for a process, without arguments. Nothing in it waits for the device; all of it may be recorded."""

    name: str
    """For people: who writes."""

    def rows_writer(self, cache: LayerCache, dtype: torch.dtype) -> RowsWriter | None:
        """What writes rows of `dtype` into a cache of a pool, asked once for each; None: core does."""


class RowsWriter(Protocol):
    """Stores new rows of one layer bit for bit as `KVPool.write` of core does."""

    def __call__(self, slots: Tensor, key: Tensor, value: Tensor | None = None, *, rows: bool = True) -> None:
        """
        Args:
            slots: int64 [T], page * page_size + place; tokens of padding share slots.
            key, value: [T, H_kv, D], [T, H_kv, D_v], any strides; of a latent layer rows [T, D_c + D_r] and None. They
                are of the dtype asked for, on the device of the cache, and fit it: the caller has looked.
            rows: False where scales belong to tokens: only those are made and stored.
        """


@dataclasses.dataclass(frozen=True)
class StepView:
    """A step in pages of one size, in a window or not, as `Step.windowed(window).at(page_size)` has it.

    Attributes:
        columns: of its page_table. tensors: what is to be written, by the names of `Step`: page_table, contiguous, and
            of `WRITTEN` and seq_lens some.
    """

    page_size: int
    window: int
    columns: int
    tensors: Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class StepTables:
    """What is to be written of a step, and from what. N rows, T_q new tokens.

    Attributes:
        table: int32 [requests, max_pages] of a group, in pages of `page_size`. columns: how many of it are read.
        rows, seq_lens: int32 [N]. cu_seqlens_q: int32 [N+1]. tokens: T_q.
        live: int32 [N], 0 for rows of padding, whose pages are all page 0; None = there are none.
        lag: int32 [T_q], how far drafts of a tree are past their positions; None = no tree.
        positions, slots: int64 [T_q], to be written; None = not.
    """

    table: Tensor
    page_size: int
    columns: int
    rows: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    tokens: int
    live: Tensor | None
    lag: Tensor | None
    positions: Tensor | None
    slots: Tensor | None
    views: tuple[StepView, ...]


class StepWriter(Protocol):
    """What `DeviceOps` may have beside writing rows."""

    def writer(self, tables: StepTables) -> Callable[[], None]:
        """Writes all of it on the current stream, at every call: the tensors stay where they are, what is in them
        changes."""


def device_ops(device_type: str) -> DeviceOps | None:
    """The kernels for a kind of device; None: core's operators serve. What cannot be imported is warned about."""
    here = (one for one in get_manager().device_ops if one.device_type == device_type)
    return _first(device_type, tuple(sorted(here, key=lambda one: (one.rank, one.target))))


@functools.cache
def _first(device_type: str, announced: tuple[DeviceOpsInfo, ...]) -> DeviceOps | None:
    """The first of what plugins announce that can be used."""
    for one in announced:
        if any(distribution_version(name) is None for name in one.requires):
            continue
        module, _, name = one.target.partition(":")
        try:
            found: Any = getattr(importlib.import_module(module), name)()
        except Exception as exc:  # noqa: BLE001 - a stranger's module may raise anything; core serves instead, and says so
            warnings.warn(
                f"{one.target}: its kernels for serving on {device_type} cannot be used ({type(exc).__name__}: {exc}); "
                f"polyattn's own operators write the caches, which is slow where these are quantised",
                RuntimeWarning,
                stacklevel=4,
            )
            continue
        ops: DeviceOps = found
        return ops
    return None
