"""This module calls a layer of dual chunk attention: three calls over the pages of a step, merged by their LSE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ...registry.device_ops import device_ops
from ...semantics.merge_lse import merge
from .layer_calls import LayerCall

__all__ = ["ChunkCalls"]


class ChunkCalls:
    """A layer's call in three parts (`dual_chunk.PARTS`); a part without keys in any row of the step is left out.

    Args:
        calls: of each part; the first writes the new keys and values.
    """

    __slots__ = ("_calls", "by", "layer")

    def __init__(self, calls: Sequence[LayerCall]) -> None:
        self.layer, self._calls = calls[0].layer, calls
        self.by = " and ".join(dict.fromkeys(call.by for call in calls))

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Tensor:
        """q: [T_q, 3, H_q, D], one for each part."""
        if q.ndim != 4 or q.shape[1] != len(self._calls):
            self._refuse(
                f"a query {list(q.shape)}; one for each of its parts is needed, [T_q, 3, H_q, D], as "
                "DualChunk.turns says"
            )
        if k is not None and not save:
            self._refuse("save_kv_cache=False with new keys; its parts are attended from the cache")
        own: Any = self._calls[0](q[:, 0], k, v, save)
        found = [own]
        for n, call in enumerate(self._calls):
            if n and not call.step.empty:
                part: Any = call(q[:, n], None, None, False)
                found.append(part)
        if len(found) == 1:
            out: Tensor = own[0]
            return out
        return _merged([out for out, _ in found], [lse for _, lse in found])

    def _refuse(self, what: str) -> None:
        raise InvalidInputError(f"attention layer {self.layer.layer_id} (dual chunk) is given {what}")


def _merged(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """The parts [T, H, D] as one, by the kernel of a package where it has one: core's operators are 40 launches."""
    kernel = getattr(device_ops(outs[0].device.type), "merge_parts", None) if lses[0].dtype == torch.float32 else None
    if kernel is None:
        return merge(outs, lses, layout="THD")[0]
    kernel(outs, lses, out=outs[0], lse=lses[0])
    return outs[0]
