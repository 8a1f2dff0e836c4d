"""Rounds: ranks tell each other, by the host, what they are about to do, before any of them waits for a device.

A rank that may not go on, or goes elsewhere, is known to all before a collective hangs. A round costs two requests to
the key-value store of torch.distributed, tens of microseconds on one host; nothing waits for a device.
"""

from __future__ import annotations

import collections
import datetime
import json
from typing import Any

from torch import distributed as dist

from ..errors import RankError
from .ranks import MeshRanks

__all__ = ["tell"]

_rounds: collections.Counter[str] = collections.Counter()


def tell(mesh: MeshRanks, said: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Tell the other ranks of a mesh something, and hear what they have to say.

    Args:
        said: what JSON holds. timeout: seconds until a rank that does not come is an error.

    Returns:
        What each rank said, in the order of the mesh.

    Raises:
        RankError: a rank did not come.
    """
    if len(mesh.ranks) == 1:
        return [json.loads(json.dumps(said))]
    store = dist.distributed_c10d._get_default_store()
    number = _rounds[mesh.name]
    _rounds[mesh.name] += 1
    keys = [f"polyattn/round/{mesh.name}/{number}/{index}" for index in range(len(mesh.ranks))]
    store.set(keys[mesh.index], json.dumps(said))
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError as error:  # of the store: each kind has another one
        missing = [rank for rank, key in zip(mesh.ranks, keys, strict=True) if not store.check([key])]
        if not missing:
            raise
        absent = f"of the ranks {list(mesh.ranks)}, {missing} did not come to a call of attention within {timeout:g} s"
        # Who comes later is told, and does not go on alone.
        store.set(keys[mesh.index], json.dumps({"wrong": f"it gave up, since {absent}"}))
        raise RankError(
            f"{absent}: they ended, or make other calls. Look at what they print; timeout= of the layer sets how long "
            "it waits"
        ) from error
    found = [json.loads(text) for text in store.multi_get(keys)]
    if number:  # all have come to this round, so all have read the last one
        store.delete_key(f"polyattn/round/{mesh.name}/{number - 1}/{mesh.index}")
    return found
