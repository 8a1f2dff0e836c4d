"""`expand_block_map`: block maps by a kernel for dense calls with masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ExpandBlockMap"]

_LISTS = ("block_counts", "block_indices", "block_valid", "block_starts")


class ExpandBlockMap(Lowering):
    """The map is written out as the bool mask that it stands for (S8): one byte for each query and key.

    The kernel computes what the mask hides too. It is for machines where no block-sparse kernel is installed, and for
    shapes that those refuse.
    """

    name = "expand_block_map"
    summary = "a block map becomes the bool mask that it stands for"
    fields = frozenset({"family"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.family != "block_sparse" or not request.block_map or request.mask != "none" or request.method:
            return
        none = {"block_map": False, "block_sizes": False, "block_starts": False, "block_shape": (0, 0)}
        dense = changed(request, family="dense", mask="bool", **none)
        # The mask of all queries and keys is written and read: for long sequences far more than any input.
        yield Rewrite((dense,), 30.0, detail="bool [B|1, H_q|1, S_q, S_k], and every key is computed")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from ..semantics.block_maps import visible_keys
        from .lengths import check_size

        kernel = inner[0]

        def masked(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
            lists = {name: given[name] for name in _LISTS if given.get(name) is not None}
            S_q, S_k = query.shape[2], key.shape[2]
            check_size(request, "writing a block map out as a mask", lists["block_counts"][..., 0].numel() * S_q * S_k)
            rest = {name: value for name, value in given.items() if name not in _LISTS}
            return {**rest, "attn_mask": visible_keys(request.block_shape, S_q, S_k, group=request.group, **lists)}

        def forward(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
            return kernel.forward(query, key, value, **masked(query, key, given))

        backward = kernel.backward
        if backward is None:
            return Bound(forward)

        def gradients(
            dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **given: Any
        ) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = backward(dout, query, key, value, out, lse, **masked(query, key, given))
            return dq, dk, dv

        return Bound(forward, gradients)
