"""A dense call in two: the first S_k rows by one kernel, the others, which see every key, by another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contract import Bound, relation
from .lengths import RELATIONS, with_mask

__all__ = ["split_rows"]


def split_rows(s: int, kernels: Sequence[Bound]) -> Bound:
    """A call with more queries than keys.

    Args:
        s: the axis of positions.
        kernels: of one kind: for the first rows, then for the others in each relation of their number to S_k.
    """
    square, others = kernels[0], dict(zip(RELATIONS, kernels[1:], strict=True))
    traceable = all(kernel.traceable for kernel in kernels)

    def parts(query: Tensor, key: Tensor) -> Iterator[tuple[Bound, int, int]]:
        """(kernel, first row, rows)"""
        S_q, S_k = query.shape[s], key.shape[s]
        yield square, 0, S_k
        yield others[relation(S_q - S_k, S_k)], S_k, S_q - S_k

    def forward(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, **given: Any) -> Any:
        found = []
        for kernel, first, rows in parts(q, k):
            mine = dict(with_mask(partial(torch.narrow, dim=2, start=first, length=rows))(given))
            if out is not None:
                mine["out"] = out.narrow(s, first, rows)
            found.append(kernel.forward(q.narrow(s, first, rows), k, v, **mine))
        if not isinstance(found[0], tuple):
            return torch.cat(found, s) if out is None else out
        lse = torch.cat([part[1] for part in found], s)
        return torch.cat([part[0] for part in found], s) if out is None else out, lse

    if square.backward is None:
        return Bound(forward, traceable=traceable)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **given: Any) -> Any:
        found = []
        for kernel, first, rows in parts(q, k):
            mine = with_mask(partial(torch.narrow, dim=2, start=first, length=rows))(given)
            do, part, result, softmax = (t.narrow(s, first, rows) for t in (dout, q, out, lse))
            gradients: Any = kernel.backward
            found.append(gradients(do, part, k, v, result, softmax, **mine))
        (dq, dk, dv), (eq, ek, ev) = found
        return torch.cat([dq, eq], s), dk + ek, dv + ev

    return Bound(forward, backward, traceable)
