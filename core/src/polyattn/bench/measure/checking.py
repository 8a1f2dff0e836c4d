"""This module checks whether a result is right, at any size: some queries of it against float64, held to the gates of
conformance.

A result is looked at where its kernels differ: in the first and last sequence, in the first and last head, at the
start, in the middle and at the end of the queries. Everything else must be finite; or, where the `whole` is asked for,
near plain torch math, block by block, and held to float64 in the same way where it is not: of single queries plain math
in half precision may be the one that is off.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import AttentionRequest
from ...semantics import reference
from ...semantics.block_maps import visible_keys
from ...testing.checks.one_call import GRAD_ROUNDINGS, OUT_ROUNDINGS
from ...testing.families import DTYPES
from ...testing.plain import Method, plain_attention, reference_attention
from ...testing.tolerances import RELATIVE_L2, Finding, Kind, compare
from .cached import slots_of
from .inputs import Inputs
from .workload import CACHED

__all__ = ["Verdict", "check"]

_SLICE = 64
"""Queries that are looked at in each place."""
_BLOCK = 512
"""Queries whose scores are held at once where all of them are needed."""
_ROWS, _NEAR = 128, 4
"""Queries of a head whose errors are added up where the whole is compared, and how many times the bound of a relative
L2 error they may be from plain torch: both have errors of their own, which in a block are no averages."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """reason: what is wrong, "" = nothing. margin: how much of the allowance was used, 1 is all of it."""

    reason: str = ""
    margin: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.reason


class _Part(NamedTuple):
    """Holds one key head of one sequence, and the query heads that share it.

    query: [1, G, S_q, D]; key: [1, 1, S_k, D]; value: [1, 1, S_k, D_v], twice: real in float64, and in the dtype of
    the query. mask: [1, 1, S_q, S_k] of what the call was given. heads: of the query.
    """

    query: Tensor
    exact: tuple[Tensor, Tensor]
    plain: tuple[Tensor, Tensor]
    mask: Tensor | None
    sinks: Tensor | None
    heads: slice


class _Place(NamedTuple):
    """Some queries of some heads of sequence n: (out, lse) in float64 and in their dtype, and the floor of errors."""

    n: int
    heads: slice
    rows: slice
    right: tuple[Tensor, Tensor]
    plain: tuple[Tensor, Tensor]
    size: float


def check(inputs: Inputs, result: Any, *, whole: bool = False) -> Verdict:
    """Check a result. The right one is computed at the first check of these inputs, and kept.

    Args:
        result: of set 0: out or (out, lse) as the contract has it; for training the gradients in the order of
            `request.grad`, without "lse".
        whole: of a forward result, everything is compared, not only where kernels differ.
    """
    found = _gradients(inputs, result) if inputs.workload.training else _forward(inputs, result)
    if whole and not inputs.workload.training:
        found = itertools.chain(found, _everywhere(inputs, result[0] if isinstance(result, tuple) else result))
    margin = 0.0
    for finding, used in found:
        margin = max(margin, used)
        if finding is not None:
            return Verdict(str(finding), margin)
    return Verdict("", margin)


def _forward(inputs: Inputs, result: Any) -> Iterator[tuple[Finding | None, float]]:
    request = inputs.workload.request
    out, lse = result if isinstance(result, tuple) else (result, None)
    yield _form(inputs, "out", out)
    if request.lse and lse is None:
        yield Finding("lse", "it is not there"), float("inf")
        return
    for n, heads, rows, right, plain, size in inputs.remembered("forward", lambda: list(_looked_at(inputs))):
        mine = _heads_first(inputs, n, out)
        yield _compare(request, "out", mine[heads, rows], right[0][0], plain[0][0], "out", size)
        if lse is not None:
            logs = _heads_first(inputs, n, lse.unsqueeze(-1))[..., 0]
            yield _compare(request, "lse", logs[heads, rows], right[1][0], plain[1][0], "lse")


def _looked_at(inputs: Inputs) -> Iterator[_Place]:
    """Yield the places at which a forward result is checked, with what is right there."""
    for n in sorted({0, inputs.workload.batch - 1}):
        for kv in sorted({0, inputs.workload.request.kv_heads - 1}):
            part = _part(inputs, n, kv)
            yield from (_place(inputs, n, part, rows) for rows in _places(part.query.shape[2]))


def _place(inputs: Inputs, n: int, part: _Part, rows: slice) -> _Place:
    """Return the right result of some queries of a key head."""
    request = inputs.workload.request
    right = _solve(request, part, rows, reference_attention, exact=True)
    plain = _solve(request, part, rows, plain_attention, exact=False)
    return _Place(n, part.heads, rows, right, plain, OUT_ROUNDINGS * _eps(request) * float(part.exact[1].abs().max()))


def _everywhere(inputs: Inputs, out: Tensor) -> Iterator[tuple[Finding | None, float]]:
    """Check each block of queries of each head: near plain torch math, or right by the gates of conformance."""
    request = inputs.workload.request
    allowed = _NEAR * RELATIVE_L2[DTYPES[request.dtype]]
    plain = inputs.remembered("whole", lambda: list(_plain_whole(inputs)))
    for n, near in enumerate(plain):
        mine = _heads_first(inputs, n, out)
        error, size = _sizes(mine.float() - near.float()), _sizes(near.float())
        known = size[size.isfinite()]
        # Rows that see nothing are zeros: theirs is compared with what others have.
        least = float(known.mean()) * 1e-3 if known.numel() else 0.0
        # Where plain math overflows, it is no help.
        far = (error / size.clamp(min=least or 1.0)).nan_to_num(nan=torch.inf)
        # The farthest first: where that is wrong, nobody asks for the others.
        order = far.flatten().argsort(descending=True)[: int((far > allowed).sum())]
        for head, block in (divmod(index, far.shape[1]) for index in order.tolist()):
            start = block * _ROWS
            place = _right_at(inputs, n, head // request.group, slice(start, min(start + _ROWS, mine.shape[1])))
            mates = head - place.heads.start
            finding, used = _compare(
                request, "out", mine[head, place.rows], place.right[0][0, mates], place.plain[0][0, mates], "out",
                place.size,
            )  # fmt: skip
            if finding is not None:
                where = f"at sequence {n}, head {head}, queries from {start}"
                finding = dataclasses.replace(finding, message=f"{finding.message}, {where}")
            yield finding, used


def _right_at(inputs: Inputs, n: int, kv: int, rows: slice) -> _Place:
    """Return the right result of a block of queries, for all heads that share a key head."""
    return inputs.remembered(f"{n}/{kv}/{rows.start}", lambda: _place(inputs, n, _part(inputs, n, kv), rows))


def _sizes(rows: Tensor) -> Tensor:
    """L2 of blocks of queries [H, blocks], of [H, S, D]."""
    squares = rows.square().sum(-1)
    padded = torch.nn.functional.pad(squares, (0, -squares.shape[1] % _ROWS))
    return torch.unflatten(padded, 1, (-1, _ROWS)).sum(-1).sqrt()


def _plain_whole(inputs: Inputs) -> Iterator[Tensor]:
    """[H, S_q, D_v] of each sequence, by plain torch math in the dtype of the query."""
    request = inputs.workload.request
    for n in range(inputs.workload.batch):
        heads = []
        for kv in range(request.kv_heads):
            part = _part(inputs, n, kv, exact=False)
            starts = range(0, part.query.shape[2], _BLOCK)
            blocks = (slice(start, min(start + _BLOCK, part.query.shape[2])) for start in starts)
            heads.append(torch.cat([_solve(request, part, b, plain_attention, exact=False)[0][0] for b in blocks], 1))
        yield torch.cat(heads)


def _gradients(inputs: Inputs, result: Sequence[Tensor]) -> Iterator[tuple[Finding | None, float]]:
    """Check the gradients of the last key head of the last sequence; of masks and sinks, sums over everything, only
    that they are finite."""
    request, n = inputs.workload.request, inputs.workload.batch - 1
    grads = dict(zip((name for name in request.grad if name != "lse"), result, strict=True))
    for name, grad in grads.items():
        if not bool(grad.isfinite().all()):
            yield Finding(f"grad {name}", "it has values that are not finite"), float("inf")
    right, plain = inputs.remembered("gradients", lambda: _solved(inputs, n))
    for name in right:
        heads = slice(-request.group, None) if name == "query" else slice(-1, None)
        mine = _heads_first(inputs, n, grads[name], keys=name != "query")[heads]
        floor = GRAD_ROUNDINGS * _eps(request) * float(right[name].abs().max())
        yield _compare(request, f"grad {name}", mine, right[name], plain[name], "grad", floor)


def _solved(inputs: Inputs, n: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of a sequence's last key head, in float64 and in the dtype of the query."""
    request = inputs.workload.request
    part = _part(inputs, n, request.kv_heads - 1)
    names = [name for name in ("query", "key", "value") if name in request.grad]
    dout = _heads_first(inputs, n, inputs.dout[0])[part.heads]
    dlse = _heads_first(inputs, n, inputs.dlse[0].unsqueeze(-1))[part.heads, :, 0] if inputs.dlse else None
    right = _trained(request, part, dout, dlse, names, reference_attention, exact=True)
    return right, _trained(request, part, dout, dlse, names, plain_attention, exact=False)


def _trained(
    request: AttentionRequest,
    part: _Part,
    dout: Tensor,
    dlse: Tensor | None,
    names: Sequence[str],
    method: Method,
    *,
    exact: bool,
) -> dict[str, Tensor]:
    """The gradients of a part, [heads, S, D], added up over blocks of queries: rows do not know each other."""
    if not names:
        return {}  # of sinks or a mask alone: those gradients are held to be finite, and autograd takes no empty list
    key, value = ((part.exact if exact else part.plain)[i].detach().requires_grad_() for i in range(2))
    query = part.query.detach().to(key.dtype).requires_grad_()
    leaves = {"query": query, "key": key, "value": value}
    found = {name: torch.zeros_like(leaves[name]) for name in names}
    part = part._replace(query=query, exact=(key, value), plain=(key, value))
    for start in range(0, query.shape[2], _BLOCK):
        rows = slice(start, start + _BLOCK)
        out, lse = _solve(request, part, rows, method, exact=exact)
        outputs, upstream = [out], [dout[None, :, rows].to(out.dtype)]
        if dlse is not None:
            outputs.append(lse)
            upstream.append(dlse[None, :, rows].to(lse.dtype))
        grads = torch.autograd.grad(outputs, [leaves[n] for n in names], upstream, materialize_grads=True)
        for name, grad in zip(names, grads, strict=True):
            found[name] += grad
    return {name: grad[0] for name, grad in found.items()}


def _solve(
    request: AttentionRequest, part: _Part, rows: slice, method: Method, *, exact: bool
) -> tuple[Tensor, Tensor]:
    """(out [1, G, R, D_v], lse [1, G, R]) of some queries. Who sees whom is in a mask, so that rows can stand alone."""
    query = part.query[:, :, rows]
    key, value = part.exact if exact else part.plain
    mask = _seen(request, part, rows, query.shape[2], key.shape[2])
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(key.dtype)
    sinks = None if part.sinks is None else part.sinks.to(key.dtype)
    alone = dataclasses.replace(request, causal="none", window=(-1, -1), chunk=0)
    return method(query.to(key.dtype), key, value, mask, sinks, alone)


def _seen(request: AttentionRequest, part: _Part, rows: slice, count: int, keys: int) -> Tensor | None:
    start = 0 if request.causal == "top_left" else keys - part.query.shape[2]
    seen = reference.visible(
        count,
        keys,
        causal=request.causal,
        window=request.window,
        chunk=request.chunk,
        device=part.query.device,
        q_offset=start + rows.start,
    )
    if part.mask is None:
        return seen if seen is None else seen[None, None]
    mask = part.mask[:, :, rows]
    if seen is None:
        return mask
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


# --------------------------------------------------------------------------------------------------- parts of a problem


def _part(inputs: Inputs, n: int, kv: int, *, exact: bool = True) -> _Part:
    """Key head `kv` of sequence n of set 0. Not `exact`: nothing of it is made in float64."""
    request, given = inputs.workload.request, inputs.tensors[0]
    heads = slice(kv * request.group, (kv + 1) * request.group)
    query = _heads_first(inputs, n, given["query"])[None, heads]
    sinks = given["sinks"][heads] if "sinks" in given else None
    if request.family in CACHED:
        plain = _cached_rows(inputs, n, kv, query.dtype)
        real = _cached_rows(inputs, n, kv, torch.float64) if exact else plain
    else:
        key, value = (_heads_first(inputs, n, given[name], keys=True)[None, kv : kv + 1] for name in ("key", "value"))
        plain = key, value
        real = (key.double(), value.double()) if exact else plain
    return _Part(query, real, plain, _mask(inputs, n, heads.start), sinks, heads)


def _mask(inputs: Inputs, n: int, head: int) -> Tensor | None:
    """[1, 1, S_q, S_k] of a sequence."""
    request, (s_q, s_k) = inputs.workload.request, inputs.workload.lengths[n]
    if request.family == "block_sparse":
        own = ("block_counts", "block_indices")
        lists = {name: t[n : n + 1, head : head + 1] if name in own else t for name, t in inputs.extra.items()}
        return visible_keys(request.block_shape, s_q, s_k, **lists)
    if request.tree:
        assert inputs.step is not None
        assert inputs.step.tree_mask is not None
        tree = inputs.step.tree_mask[n]
        return torch.cat([tree.new_ones(s_q, s_k - s_q), tree], 1)[None, None]
    given = inputs.tensors[0].get("attn_mask")
    return None if given is None else given[n : n + 1, :1, :s_q, :s_k]


def _cached_rows(inputs: Inputs, n: int, kv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Real keys and values [1, 1, S_k, D | D_v] of a sequence, a shared prefix before them."""
    request, size = inputs.workload.request, inputs.workload.request.page_size
    assert inputs.pool is not None
    assert inputs.step is not None
    places = [slots_of(inputs.step.page_table[n], inputs.workload.lengths[n][1], size)]
    for part in inputs.extra.get("kv_parts", ()):
        places.insert(0, slots_of(part.page_table[0], inputs.workload.shared, size))
    rows = inputs.pool.read(inputs.layer, torch.cat(places), dtype)
    if request.family == "mla":
        return rows[None, None], rows[None, None, :, : request.dims[1]]
    key, value = rows
    return key[None, None, :, kv], value[None, None, :, kv]


def _heads_first(inputs: Inputs, n: int, tensor: Tensor, *, keys: bool = False) -> Tensor:
    """[H, S, D] of a sequence, of queries or what is shaped like them, or of `keys`."""
    request, workload = inputs.workload.request, inputs.workload
    if request.layout in ("BSHD", "BHSD") and tensor.dim() == 4:
        return tensor[n].transpose(0, 1) if request.layout == "BSHD" else tensor[n]
    lengths = [pair[1 if keys else 0] for pair in workload.lengths]
    start = sum(lengths[:n])
    return tensor[start : start + lengths[n]].transpose(0, 1)


def _places(rows: int) -> Iterator[slice]:
    starts = {0, max(rows // 2 - _SLICE // 2, 0), max(rows - _SLICE, 0)}
    return (slice(start, min(start + _SLICE, rows)) for start in sorted(starts))


def _form(inputs: Inputs, name: str, out: Tensor) -> tuple[Finding | None, float]:
    request, query = inputs.workload.request, inputs.tensors[0]["query"]
    shape = (*query.shape[:-1], request.dims[1])
    if out.dtype != query.dtype or tuple(out.shape) != shape:
        message = f"{out.dtype} {tuple(out.shape)}, {query.dtype} {shape} is expected"
        return Finding(name, message), float("inf")
    if not bool(out.isfinite().all()):
        return Finding(name, "it has values that are not finite"), float("inf")
    return None, 0.0


def _eps(request: AttentionRequest) -> float:
    return torch.finfo(torch.promote_types(DTYPES[request.dtype], torch.float32)).eps


def _compare(
    request: AttentionRequest, name: str, mine: Tensor, right: Tensor, plain: Tensor, kind: Kind, floor: float = 0.0
) -> tuple[Finding | None, float]:
    return compare(name, mine, right.double(), plain, DTYPES[request.dtype], request.softcap > 0, kind, floor)
