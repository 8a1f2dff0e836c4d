"""What a plugin's class for serving on a device looks like: kernels that write rows of a cache, and a step's tables.

`DeviceOpsInfo.target` names such a class. Core's own torch operators do the same wherever nobody brings kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["WRITTEN", "DeviceOps", "RowsWriter", "StepTables", "StepView", "StepWriter"]

WRITTEN = ("cu_seqlens_k", "page_counts", "kv_indptr", "kv_indices", "last_page_len")
"""Views of a `Step` that a `StepWriter` writes beside its page_table and seq_lens."""


class DeviceOps(Protocol):
    """Made once for a process, without arguments. Nothing in it waits for the device; all of it may be recorded."""

    name: str
    """For people: who writes."""

    def rows_writer(self, cache: Any, dtype: torch.dtype) -> RowsWriter | None:
        """What writes rows of `dtype` into a `polyattn.serving.LayerCache`, asked once for each; None: core does."""


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
