"""Tokens clustered and put in the order of their clusters: the nearest centroids, ranks, means, and lists of flags.

The nearest of C centroids is 2 S C D operations. Points of 16 bits are compared with centroids of 16 bits: those are
rounded, and their distances are exact. Tokens are put in order without a sort: parts of the sequence are counted, and a
token's place is the tokens of lower clusters, those of its own in earlier parts, and those before it in its part.
Nothing is added by atomics, so that results are the same bits on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.block_sparse import head_at
from polyattn_triton.kernels.rules import dot

__all__ = ["cluster_means", "in_order", "listed", "nearest"]

_PART = 256
"""Tokens that are counted together."""


@triton.jit(do_not_specialize=["tokens", "clusters"])
def _nearest(
    points, centroids, offsets, labels, x_b, x_h, x_s, tokens, clusters, D: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """N tokens of one head. `offsets`: |centroid|^2; that of the token all distances share."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, d, c = tile * N + tl.arange(0, N), tl.arange(0, WIDTH), tl.arange(0, C)
    at = head_at(points, b, head, x_b, x_h) + s[:, None].to(tl.int64) * x_s + d[None, :]
    x = tl.load(at, mask=(s < tokens)[:, None] & (d < D)[None, :], other=0.0)
    row = (b.to(tl.int64) * tl.num_programs(1) + head) * clusters
    least = tl.full([N, C], float("inf"), tl.float32)
    number = tl.zeros([N, C], tl.int32)
    for first in range(0, clusters, C):
        k = first + c
        y_at = centroids + (row + k)[:, None] * D + d[None, :]
        y = tl.load(y_at, mask=(k < clusters)[:, None] & (d < D)[None, :], other=0.0)
        offset = tl.load(offsets + row + k, mask=k < clusters, other=float("inf"))
        far = offset[None, :] - 2 * dot(x, tl.trans(y))
        number = tl.where(far < least, k[None, :], number)
        least = tl.minimum(far, least)
    lowest = tl.min(least, 1)
    found = tl.min(tl.where(least == lowest[:, None], number, clusters), 1)
    out = (b.to(tl.int64) * tl.num_programs(1) + head) * tokens + s
    tl.store(labels + out, tl.minimum(found, clusters - 1), mask=s < tokens)


@triton.jit(do_not_specialize=["tokens", "clusters"])
def _count(labels, counts, tokens, clusters, PART: tl.constexpr, BINS: tl.constexpr):
    """How many tokens of one part of a head each cluster has."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    s, c = part * PART + tl.arange(0, PART), tl.arange(0, BINS)
    label = tl.load(labels + row * tokens + s, mask=s < tokens, other=BINS - 1)
    found = tl.histogram(label, BINS)
    tl.store(counts + (row * tl.num_programs(0) + part) * clusters + c, found, mask=c < clusters)


@triton.jit(do_not_specialize=["tokens", "clusters"])
def _order(labels, before, order, places, tokens, clusters, PART: tl.constexpr):
    """Where the tokens of one part go. `before`: of each cluster the tokens in front of the part's."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, PART)
    s = part * PART + i
    label = tl.load(labels + row * tokens + s, mask=s < tokens, other=-1)
    place = tl.zeros([PART], tl.int32)
    for first in range(0, PART, 32):
        j = first + tl.arange(0, 32)
        other = tl.load(labels + row * tokens + part * PART + j, mask=part * PART + j < tokens, other=-2)
        place += tl.sum(((label[:, None] == other[None, :]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    place += tl.load(before + (row * tl.num_programs(0) + part) * clusters + label, mask=s < tokens, other=0)
    tl.store(places + row * tokens + s, place, mask=s < tokens)
    tl.store(order + row * tokens + place, s, mask=s < tokens)


@triton.jit(do_not_specialize=["tokens", "clusters"])
def _means(
    points, order, starts, counts, centroids, means, x_b, x_h, x_s, tokens, clusters, D: tl.constexpr,
    WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The mean of one cluster; of an empty one its centroid."""
    cluster, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head_row = b.to(tl.int64) * tl.num_programs(1) + head
    row, d = head_row * clusters + cluster, tl.arange(0, WIDTH)
    start, count = tl.load(starts + row), tl.load(counts + row)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, count, N):
        i = first + tl.arange(0, N)
        token = tl.load(order + head_row * tokens + start + i, mask=i < count, other=0).to(tl.int64)
        at = head_at(points, b, head, x_b, x_h) + token[:, None] * x_s + d[None, :]
        x = tl.load(at, mask=(i < count)[:, None] & (d < D)[None, :], other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    old = tl.load(centroids + row * D + d, mask=d < D, other=0.0)
    tl.store(means + row * D + d, tl.where(count > 0, total / tl.maximum(count, 1), old), mask=d < D)


@triton.jit(do_not_specialize=["width"])
def _listed(flags, counts, indices, width, WIDE: tl.constexpr):
    """The places of the flags of one row that are set, ascending, and how many."""
    row = tl.program_id(0).to(tl.int64)
    found = tl.program_id(0) * 0
    for first in range(0, width, WIDE):
        i = first + tl.arange(0, WIDE)
        flag = tl.load(flags + row * width + i, mask=i < width, other=0).to(tl.int32)
        place = found + tl.cumsum(flag, 0) - flag
        tl.store(indices + row * width + place, i, mask=flag != 0)
        found += tl.sum(flag, 0)
    tl.store(counts + row, found)


@runtime.on_its_device
def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """See `polyattn.contract.BlockOps`."""
    points = points if points.stride(-1) == 1 else points.contiguous()
    (B, H, S, D), clusters = points.shape, centroids.shape[2]
    centroids = centroids.to(points.dtype).contiguous()
    offsets = centroids.float().square().sum(-1)
    labels = torch.empty(B, H, S, dtype=torch.int32, device=points.device)
    if labels.numel():
        _nearest[triton.cdiv(S, 128), H, B](
            points, centroids, offsets, labels, *points.stride()[:3], S, clusters, D=D,
            WIDTH=triton.next_power_of_2(D), N=128, C=64, num_warps=8, num_stages=3,
        )  # fmt: skip
    return labels


@runtime.on_its_device
def in_order(labels: Tensor, clusters: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `polyattn.contract.BlockOps`."""
    B, H, S = labels.shape
    labels = labels.to(torch.int32).contiguous()
    parts = max(triton.cdiv(S, _PART), 1)
    counts = torch.zeros(B, H, parts, clusters, dtype=torch.int32, device=labels.device)
    order, places = torch.empty_like(labels), torch.empty_like(labels)
    if labels.numel():
        bins = triton.next_power_of_2(clusters + 1)
        _count[parts, B * H](labels, counts, S, clusters, PART=_PART, BINS=bins, num_warps=4)
        so_far = counts.cumsum(2, dtype=torch.int32)
        totals = so_far[:, :, -1]
        before = so_far - counts + (totals.cumsum(-1, dtype=torch.int32) - totals)[:, :, None]
        _order[parts, B * H](labels, before, order, places, S, clusters, PART=_PART, num_warps=4)
        return order, places, totals.contiguous()
    return order, places, counts.sum(2, dtype=torch.int32)


@runtime.on_its_device
def cluster_means(points: Tensor, order: Tensor, counts: Tensor, centroids: Tensor) -> Tensor:
    """See `polyattn.contract.BlockOps`."""
    points = points if points.stride(-1) == 1 else points.contiguous()
    (B, H, S, D), clusters = points.shape, counts.shape[2]
    starts = counts.cumsum(-1, dtype=torch.int32) - counts
    means = torch.empty(B, H, clusters, D, dtype=torch.float32, device=points.device)
    if means.numel():
        _means[clusters, H, B](
            points, order, starts, counts, centroids.contiguous(), means, *points.stride()[:3], S, clusters, D=D,
            WIDTH=triton.next_power_of_2(D), N=64, num_warps=4,
        )  # fmt: skip
    return means


@runtime.on_its_device
def listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """See `polyattn.contract.BlockOps`."""
    flags = flags.contiguous()
    counts = torch.empty(flags.shape[:-1], dtype=torch.int32, device=flags.device)
    indices = torch.empty(flags.shape, dtype=torch.int32, device=flags.device)
    if flags.numel():
        _listed[counts.numel(),](flags.view(torch.uint8), counts, indices, flags.shape[-1], WIDE=1024, num_warps=4)
        return counts, indices
    return counts.zero_(), indices
