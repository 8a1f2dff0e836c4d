"""Decoding requests whose keys lie on several ranks: each rank attends to its own, and the results are merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...distributed.ranks import MeshRanks, ranks_of
from ...distributed.ring import merge_over
from ...distributed.rounds import tell
from ...errors import InvalidInputError, RankError, UnsupportedRequestError
from ..layer import AttentionLayer
from ..step.batch import ForwardBatch, ForwardMode
from .layer_calls import Run

__all__ = ["OverRanks", "RanksOfKeys"]

_TIMEOUT = 300.0


class OverRanks:
    """A layer's call on this rank's keys, merged with those of the other ranks; sinks come in with the last merge."""

    __slots__ = ("_ranks", "_run", "by", "layer")

    def __init__(self, run: Run, ranks: MeshRanks) -> None:
        self._run, self._ranks, self.layer, self.by = run, ranks, run.layer, run.by

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, save: bool) -> Tensor:
        result: Any = self._run(q, k, v, save)
        out, lse = result
        return merge_over(self._ranks.ring, out, lse, sinks=self.layer.sinks)[0]


class RanksOfKeys:
    """The ranks that hold the keys of the requests.

    Args:
        mesh: as `RingAttention`. layers: of the model, equal on all ranks.

    Raises:
        InvalidInputError: a mesh that is none, or layers that differ between ranks. RankError: a rank did not come.
        UnsupportedRequestError: a layer whose keys cannot lie on several ranks.
    """

    def __init__(self, mesh: Any, layers: Sequence[AttentionLayer]) -> None:
        self._mesh = ranks_of(mesh, "ring")
        wrong = next((layer for layer in layers if layer.window >= 0 or layer.kind != "decoder"), None)
        said = {"layers": repr([(*_shape(layer), layer.sinks is not None) for layer in layers])}
        if wrong is not None:
            what = f"window={wrong.window}" if wrong.window >= 0 else f"kind={wrong.kind!r}"
            said["wrong"] = f"layer {wrong.layer_id} has {what}"
        heard = tell(self._mesh, said, _TIMEOUT)
        if wrong is not None:
            raise UnsupportedRequestError(
                f"{said['wrong']}, and keys on several ranks have no distance to a query there: keep all keys of such "
                "a layer on one rank"
            )
        for rank, one in zip(self._mesh.ranks, heard, strict=True):
            if "wrong" in one:
                raise RankError(f"rank {rank} cannot decode over ranks: {one['wrong']}")
            if one != heard[0]:
                raise InvalidInputError(
                    f"rank {self._mesh.ranks[0]} has the layers {heard[0]['layers']}, rank {rank} {one['layers']}: "
                    "build the same model on all ranks of the mesh"
                )

    def check(self, batch: ForwardBatch) -> None:
        """
        Raises:
            UnsupportedRequestError: a step of more than a new token for each row.
        """
        if batch.mode not in (ForwardMode.DECODE, ForwardMode.IDLE):
            raise UnsupportedRequestError(
                f"a step of mode {batch.mode.name} where keys lie on several ranks: new tokens see each other on one "
                "rank only. Fill the caches of ranks by KVPool.write, with the keys that each rank has, and decode"
            )

    def around(self, run: Run) -> OverRanks:
        """A layer's call over all ranks."""
        return OverRanks(run, self._mesh)


def _shape(layer: AttentionLayer) -> tuple[Any, ...]:
    return layer.layer_id, layer.heads, layer.kv_heads, *layer.dims, layer.scale, layer.softcap, layer.latent
