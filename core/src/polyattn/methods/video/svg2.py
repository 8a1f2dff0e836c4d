"""`sparse_video_gen_2_attn`: like tokens are clustered, and a cluster sees the clusters that matter to it (SVG2).

Queries and keys of a head are clustered apart, by k-means that goes on from one denoising step to the next. Centroids
say which clusters of keys hold most of the attention of a cluster of queries (arXiv 2505.18875).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import Inner, Like, Place
from ...errors import InvalidInputError
from ...semantics.block_maps import lists_of
from ...semantics.validation import has_shapes_only
from ..text import valid_of
from .grids import grid_of
from .rows import kernels_for
from .steps import first_shares, known

__all__ = ["SVG2", "Clusters", "cluster_map", "clustered_attention", "k_means"]

NAME = "sparse_video_gen_2_attn"
DENSITY = "density"
KEPT = "svg2_centroids"
_BLOCK = 64
"""Tokens of a block of keys, and of small blocks of queries, which clusters are filled up to."""
_LARGE = 4
"""Small blocks that a cluster of queries must have, on the average, for large ones."""
_STILL = 1e-4
_FEW = 4
"""Rounds of k-means that are run without asking whether centroids still move."""
_LONG = 1 << 26
"""Bytes of queries above which heads take turns: copies in the order of clusters are of some heads at a time."""
_TURNS = 2
_PLANES = 12
"""Planes that tell clusters apart: more than log2 of what is alike among a thousand of them."""
_DISTANCES = 1 << 26
"""Most distances of tokens to centroids that are computed at once."""


class _Plan(NamedTuple):
    """A plan says where the grid is in the sequence, and where k-means begins.

    Attributes:
        tokens: those of the grid. queries, keys: int64 [C], the tokens of the grid that k-means begins with.
        text: int64 [S], 0 of the grid, 1 of text, 2 of text that is padding.
    """

    tokens: slice
    queries: Tensor
    keys: Tensor
    text: Tensor


class Order(NamedTuple):
    """An `Order` has the tokens of each head cluster after cluster.

    Attributes:
        tokens, place: int64 [B, H, S], the tokens in this order, and where each token is. sizes: int64 [B, H, C].
    """

    tokens: Tensor
    place: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, labels: Tensor, clusters: int) -> Order:
        """labels: int64 [B, H, S]."""
        ops = kernels_for(labels)
        if ops is not None:
            return cls(*(t.long() for t in ops.in_order(labels, clusters)))
        counts = torch.zeros(*labels.shape[:2], clusters, dtype=torch.int64, device=labels.device)
        counts = counts.scatter_add(-1, labels, torch.ones_like(labels))
        order = labels.argsort(dim=-1, stable=True)
        numbers = torch.arange(labels.shape[2], device=labels.device)
        return cls(order, torch.empty_like(order).scatter(-1, order, numbers.expand_as(order)), counts)


class Clusters(NamedTuple):
    """`Clusters` group the tokens of one side. labels: int64 [B, H, S]. centroids: [B, H, C, D]. order: if known."""

    labels: Tensor
    centroids: Tensor
    order: Order | None = None

    def ordered(self, more: int = 0) -> Order:
        """more: clusters that have no centroid."""
        return self.order or Order.of(self.labels, self.centroids.shape[2] + more)


class SVG2:
    """`SVG2` lets clusters of queries see clusters of keys: a `polyattn.contract.Method`. Forward only.

    Text is never clustered: it sees all tokens but padding and is seen by all. Padding sees padding.

    Args:
        svg2_num_q_centroids, svg2_num_k_centroids: clusters of queries and keys; no more than there are tokens.
        svg2_top_p_kmeans: share of the attention that a cluster of queries keeps; 1 = all of it.
        svg2_min_kc_ratio: share of the clusters of keys that are kept whatever they hold.
        svg2_kmeans_iter_init, svg2_kmeans_iter_step: rounds of k-means where nothing is kept from a step before, and
            where something is.
        svg2_zero_step_kmeans_init: cluster at step 0 too, where this step runs dense.
        svg2_first_layers_fp, svg2_first_times_fp: share of the first layers and of the first steps that run dense.
    """

    plans_by_step = False

    def __init__(
        self,
        *,
        svg2_num_q_centroids: int,
        svg2_num_k_centroids: int,
        svg2_top_p_kmeans: float,
        svg2_min_kc_ratio: float,
        svg2_kmeans_iter_init: int,
        svg2_kmeans_iter_step: int,
        svg2_zero_step_kmeans_init: bool,
        svg2_first_layers_fp: float,
        svg2_first_times_fp: float,
    ) -> None:
        self.centroids = svg2_num_q_centroids, svg2_num_k_centroids
        self.top_p, self.least = svg2_top_p_kmeans, svg2_min_kc_ratio
        self.rounds, self.more_rounds = svg2_kmeans_iter_init, svg2_kmeans_iter_step
        self.from_zero = svg2_zero_step_kmeans_init
        self.layers, self.steps = svg2_first_layers_fp, svg2_first_times_fp

    def leaves_dense(self, place: Place) -> str:
        return self._dense(place) if not self._warms(place) else ""

    def _dense(self, place: Place, steps: bool = True) -> str:
        times = ("svg2_first_times_fp", self.steps if steps else 0.0)
        return first_shares(place, NAME, steps=times, layers=("svg2_first_layers_fp", self.layers))

    def _warms(self, place: Place) -> bool:
        """Tell whether a call is clustered for the steps after it, and attends densely itself."""
        if not self.from_zero or not self.steps or self._dense(place, steps=False):
            return False
        return known(place, "step", f"{NAME}: svg2_zero_step_kmeans_init") == 0

    def plan(self, place: Place, like: Like) -> _Plan:
        """
        Raises:
            InvalidInputError: the place has no grid.
        """
        T, H, W = grid_of(place, NAME)
        front, cells = place.text[0], T * H * W
        valid_front, valid_back = valid_of(place)
        text = torch.ones(like.tokens, dtype=torch.int64)
        text[front : front + cells] = 0
        text[valid_front:front] = 2
        text[front + cells + valid_back :] = 2
        generator = torch.Generator().manual_seed(0)
        first = [torch.randperm(cells, generator=generator)[:count].to(like.device) for count in self.centroids]
        return _Plan(slice(front, front + cells), first[0], first[1], text.to(like.device))

    def attend(
        self,
        plan: _Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        place: Place,
        kept: dict[str, Any],
        inner: Inner,
    ) -> Tensor:
        warms = self._warms(place)
        with torch.no_grad():
            rows, keys = self._clusters(plan, query, key, kept)
            if warms:
                kept[DENSITY] = 1.0
                out: Tensor = inner.dense(query, key, value)
                return out
            seen = cluster_map(rows, keys, self.top_p, self.least)
            rows, keys, seen = _with_text(plan, rows, keys, seen)
            more = seen.shape[2] - rows.centroids.shape[2]  # clusters of text
            orders = (rows.ordered(more), keys.ordered(more))
            if not has_shapes_only(query):
                kept[DENSITY] = _share(*orders, seen)
        return clustered_attention(query, key, value, rows.labels, keys.labels, seen, inner, orders=orders)

    def density(self, plan: _Plan, place: Place) -> Any:
        return (place.kept or {}).get(DENSITY)

    def _clusters(self, plan: _Plan, query: Tensor, key: Tensor, kept: dict[str, Any]) -> tuple[Clusters, Clusters]:
        video = [tensor[:, :, plan.tokens] for tensor in (query, key)]
        starts = [tensor[:, :, first] for tensor, first in zip(video, (plan.queries, plan.keys), strict=True)]
        if has_shapes_only(query):
            made = [
                Clusters(t.new_zeros(t.shape[:3], dtype=torch.int64), s) for t, s in zip(video, starts, strict=True)
            ]
            return made[0], made[1]
        before = kept.get(KEPT)
        if before is None:
            rounds = self.rounds
        else:
            found, needed = ([list(one.shape) for one in some] for some in (before, starts))
            if found != needed:
                raise InvalidInputError(
                    f"{NAME}: the place keeps centroids of another call, {found} instead of {needed}; what is kept "
                    "belongs to one layer and branch of one run: give each its own Place(kept={})"
                )
            rounds, starts = self.more_rounds, list(before)
        made = [k_means(tensor, start, rounds) for tensor, start in zip(video, starts, strict=True)]
        rows, keys = made
        # Keys of clusters that are alike lie together from the next step on: kernels load them as one.
        kept[KEPT] = (rows.centroids, keys.centroids if before is not None else _side_by_side(keys.centroids))
        return rows, keys


def k_means(points: Tensor, centroids: Tensor, rounds: int) -> Clusters:
    """Cluster by Euclidean distance. A round finds the nearest centroid of each point, and takes the means of these.

    Args:
        points: [B, H, S, D]. centroids: [B, H, C, D] to begin with. rounds: at most; fewer where no centroid moves by
            1e-4 any more. A cluster that nothing is nearest to keeps its centroid.

    Returns:
        The clusters of the last round, and their means, float32 or float64. Without a round, those of the centroids.
    """
    wide = torch.float64 if points.dtype == torch.float64 else torch.float32
    centroids = centroids.to(wide)
    labels, done = _nearest(points, centroids), torch.zeros((), dtype=torch.bool, device=points.device)
    order = Order.of(labels, centroids.shape[2])
    for number in range(rounds):
        if number:
            labels = _nearest(points, centroids)
            order = Order.of(labels, centroids.shape[2])
        moved = _means(points, labels, order, centroids)
        # Without a wait for the device, but where many rounds may be saved.
        still = (moved - centroids).norm(dim=-1).amax() < _STILL
        centroids = torch.where(done, centroids, moved)
        done = done | still
        if rounds > _FEW and bool(done):
            break
    return Clusters(labels, centroids, order)


def _side_by_side(centroids: Tensor) -> Tensor:
    """Sort centroids [B, H, C, D] so that neighbours are alike: by the sides of random planes that they are on."""
    draw = torch.Generator().manual_seed(0)
    planes = torch.randn(centroids.shape[3], _PLANES, generator=draw, dtype=centroids.dtype).to(centroids.device)
    sides = (centroids - centroids.mean(2, keepdim=True)) @ planes > 0
    number = (sides * 2 ** torch.arange(_PLANES, device=sides.device)).sum(-1)
    return centroids.gather(2, number.argsort(dim=-1, stable=True)[..., None].expand(centroids.shape))


def _means(points: Tensor, labels: Tensor, order: Order, centroids: Tensor) -> Tensor:
    """The mean of each cluster; of an empty one its centroid."""
    ops = kernels_for(points)
    if ops is not None:
        tokens, sizes = (t.to(torch.int32) for t in (order.tokens, order.sizes))
        return ops.cluster_means(points, tokens, sizes, centroids)
    where = labels[..., None].expand(points.shape)
    sums = torch.zeros_like(centroids).scatter_add(2, where, points.to(centroids.dtype))
    sizes = order.sizes[..., None]
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)


def _nearest(points: Tensor, centroids: Tensor) -> Tensor:
    ops = kernels_for(points)
    if ops is not None:
        return ops.nearest(points, centroids).long()
    B, H, S, _ = points.shape
    labels = torch.empty(B, H, S, dtype=torch.int64, device=points.device)
    size = max(1, _DISTANCES // (B * H * centroids.shape[2]))
    # |p - c|^2 without |p|^2, which all centroids share.
    offset = centroids.square().sum(-1)[:, :, None]
    for start in range(0, S, size):
        part = slice(start, start + size)
        labels[:, :, part] = (offset - 2 * points[:, :, part].to(centroids.dtype) @ centroids.mT).argmin(-1)
    return labels


def cluster_map(rows: Clusters, keys: Clusters, top_p: float, least: float) -> Tensor:
    """Choose the clusters of keys that each cluster of queries sees.

    The weight of a cluster is the softmax of the products of centroids, times its tokens. They are kept from the
    highest on, up to and including the first with which their share exceeds `top_p`.

    Args:
        rows: of H_q heads. keys: of H_kv heads. top_p: share of the weight; 1 and above = all clusters.
        least: share of the clusters of keys that are kept in any case, the highest first.

    Returns:
        bool [B, H_q, C_q, C_k].
    """
    group = rows.labels.shape[1] // keys.labels.shape[1]
    centroids, sizes = keys.centroids.repeat_interleave(group, 1), keys.ordered().sizes.repeat_interleave(group, 1)
    scores = rows.centroids @ centroids.mT / rows.centroids.shape[-1] ** 0.5
    if top_p >= 1:  # rounding of the sums below would lose clusters
        return torch.ones_like(scores, dtype=torch.bool)
    weights = (scores + sizes[:, :, None].to(scores.dtype).log()).softmax(-1)
    ordered, where = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    wanted = (before <= top_p) | (
        torch.arange(ordered.shape[-1], device=ordered.device) < int(least * ordered.shape[-1])
    )
    return torch.zeros_like(wanted).scatter(-1, where, wanted)


def _with_text(plan: _Plan, rows: Clusters, keys: Clusters, seen: Tensor) -> tuple[Clusters, Clusters, Tensor]:
    """Add two clusters to either side, text and padding, and their rows and columns to the map."""
    if plan.text.shape[0] == rows.labels.shape[2]:
        return rows, keys, seen
    sides = []
    for side in (rows, keys):
        B, H, _ = side.labels.shape
        clusters = side.centroids.shape[2]
        labels = (plan.text + clusters - 1).expand(B, H, -1).clone()
        labels[:, :, plan.tokens] = side.labels
        sides.append(Clusters(labels, side.centroids))
    seen = torch.nn.functional.pad(seen, (0, 2, 0, 2), value=True)
    seen[..., :-1, -1] = False
    seen[..., -1, :-1] = False
    return sides[0], sides[1], seen


class _Side(NamedTuple):
    """`_Side` puts the tokens of each head in the order of their clusters, and cuts each cluster into blocks.

    Attributes:
        block: the most tokens of a block. labels: int64 [B, H, S], the cluster of each token.
        order, place: int64 [B, H, S], tokens cluster after cluster, and where each token is there.
        cluster: int64 [B, H, number], of each block; `clusters` = of none, at the end.
        starts, sizes: int32 [B, H, number], the first place of each block and its tokens.
        first, ahead: int64 [B, H, clusters], the first block of each cluster, and the tokens of the clusters before.
    """

    block: int
    labels: Tensor
    order: Tensor
    place: Tensor
    cluster: Tensor
    starts: Tensor
    sizes: Tensor
    first: Tensor
    ahead: Tensor

    @classmethod
    def of(cls, labels: Tensor, clusters: int, block: int, known: Order | None = None, work: Any = None) -> _Side:
        """known: of the labels. work: [B, H, clusters], by which clusters have the first blocks; None = by number."""
        order, place, counts = known or Order.of(labels, clusters)
        filled = (counts + block - 1) // block
        turn = None if work is None else work.argsort(dim=-1, descending=True, stable=True)
        filled = filled if turn is None else filled.gather(-1, turn)
        ends = filled.cumsum(-1)
        first, ahead = ends - filled, counts.cumsum(-1) - counts
        # A cluster fills up at most one block: no size depends on the labels, and nothing waits for the device.
        number = labels.shape[2] // block + min(clusters, labels.shape[2])
        blocks = torch.arange(number, device=labels.device).expand(*labels.shape[:2], -1).contiguous()
        cluster = torch.searchsorted(ends, blocks, right=True)
        if turn is not None:
            first = torch.empty_like(first).scatter(-1, turn, first)
            cluster = torch.nn.functional.pad(turn, (0, 1), value=clusters).gather(-1, cluster)
        inside = cluster.clamp(max=clusters - 1)
        done = (blocks - first.gather(-1, inside)) * block
        sizes = (counts.gather(-1, inside) - done).clamp(0, block).masked_fill(cluster == clusters, 0)
        starts = (ahead.gather(-1, inside) + done).masked_fill(sizes == 0, 0)
        return cls(block, labels, order, place, cluster, starts.to(torch.int32), sizes.to(torch.int32), first, ahead)

    def packed(self, tensor: Tensor) -> Tensor:
        """Bring tokens into the order of clusters: [B, H, S, D] -> the same."""
        ops = kernels_for(tensor)
        if ops is None:
            return tensor.gather(2, self.order[..., None].expand(tensor.shape))
        tokens = tensor.shape[2]
        starts = torch.arange(0, tokens, _BLOCK, dtype=torch.int32, device=tensor.device)
        sizes = (tokens - starts).clamp(max=_BLOCK)
        own = [t.expand(*tensor.shape[:2], -1).contiguous() for t in (starts, sizes)]
        lists = (self.order.to(torch.int32), own[0], own[1])
        return ops.gather(tensor, lists, _BLOCK, filled=False, means=False)[0]

    def filled(self, tensor: Tensor) -> Tensor:
        """Bring tokens into whole blocks, with zeros where none is: [B, H, S, D] -> [B, H, number * block, D]."""
        ops = kernels_for(tensor)
        if ops is None:
            rows = tensor.new_zeros(*tensor.shape[:2], self.cluster.shape[2] * self.block, tensor.shape[3])
            return rows.scatter(2, self._rows()[..., None].expand(tensor.shape), tensor)
        lists = (self.order.to(torch.int32), self.starts, self.sizes)
        return ops.gather(tensor, lists, self.block, filled=True, means=False)[0]

    def back(self, rows: Tensor) -> Tensor:
        """Take tokens out of whole blocks: [B, H, number * block, D] -> [B, H, S, D]."""
        places, ops = self._rows(), kernels_for(rows)
        if ops is None:
            return rows.gather(2, places[..., None].expand(*places.shape, rows.shape[3]))
        return ops.scatter(rows.contiguous(), places.to(torch.int32)).transpose(1, 2)

    def _rows(self) -> Tensor:
        """The row of each token in whole blocks, int64 [B, H, S]."""
        first, ahead = (t.gather(-1, self.labels) for t in (self.first, self.ahead))
        return first * self.block + self.place - ahead


def clustered_attention(
    query: Tensor, key: Tensor, value: Tensor, row_labels: Tensor, key_labels: Tensor, seen: Tensor, inner: Inner,
    *, orders: Sequence[Order | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Attend from clusters to clusters, exactly. Where queries are long, heads take turns.

    Args:
        query: [B, H_q, S, D]; key: [B, H_kv, S, D]; value: [B, H_kv, S, D_v].
        row_labels: int64 [B, H_q, S]. key_labels: int64 [B, H_kv, S]. seen: bool [B, H_q, C_q, C_k].
        inner: the calls of families; each turn makes one of block_sparse, whose key blocks start where clusters do.
        orders: of the labels of rows and keys, where they are known.

    Returns:
        [B, H_q, S, D_v]. Queries that see no key are 0.
    """
    heads, group = key.shape[1], query.shape[1] // key.shape[1]
    if query.nbytes <= _LONG or heads == 1:
        return _clustered(query, key, value, row_labels, key_labels, seen, inner, orders)
    B, _, S, _ = query.shape
    out = query.new_empty(B, S, heads * group, value.shape[3]).transpose(1, 2)
    together = -(-heads // _TURNS)
    for first in range(0, heads, together):
        keys, rows = (slice(first * n, (first + together) * n) for n in (1, group))
        sides = zip(orders, (rows, keys), strict=True)
        some = [order and Order(*(t[:, own] for t in order)) for order, own in sides]
        own = (query[:, rows], key[:, keys], value[:, keys], row_labels[:, rows], key_labels[:, keys], seen[:, rows])
        out[:, rows] = _clustered(*own, inner, some)
    return out


def _clustered(
    query: Tensor, key: Tensor, value: Tensor, row_labels: Tensor, key_labels: Tensor, seen: Tensor, inner: Inner,
    orders: Sequence[Order | None],
) -> Tensor:  # fmt: skip
    """`clustered_attention` of heads that are computed together."""
    group, clusters = query.shape[1] // key.shape[1], seen.shape[2]
    # Larger blocks of queries load fewer keys; where clusters are small they would be mostly empty.
    block = 2 * _BLOCK if query.shape[2] >= _LARGE * _BLOCK * clusters else _BLOCK
    order = orders[1] or Order.of(key_labels, seen.shape[3])
    keys = _Side.of(key_labels, seen.shape[3], _BLOCK, order)
    # The longest lists first: programs that take turns with blocks have equal shares then.
    length = seen.float() @ order.sizes.repeat_interleave(group, 1).float()[..., None]
    rows = _Side.of(row_labels, clusters, block, orders[0], length[..., 0])
    columns = keys.cluster.repeat_interleave(group, 1)
    # Blocks of no cluster are seen by none. Lists are made for clusters, and are those of each of their blocks.
    block_map = torch.nn.functional.pad(seen, (0, 1), value=False)
    block_map = block_map.gather(3, columns[:, :, None].expand(-1, -1, clusters, -1))
    ops = kernels_for(query)
    counts, indices = lists_of(block_map) if ops is None else ops.listed(block_map)
    counts = torch.nn.functional.pad(counts, (0, 1)).gather(2, rows.cluster)
    own = rows.cluster.clamp(max=clusters - 1)[..., None].expand(-1, -1, -1, indices.shape[3])
    out = inner.block_sparse(
        *(rows.filled(query), keys.packed(key), keys.packed(value)),
        lists=(counts, indices.gather(2, own)),
        block_shape=(block, _BLOCK),
        block_valid=keys.sizes,
        block_starts=keys.starts,
    )
    return rows.back(out)


def _share(rows: Order, keys: Order, seen: Tensor) -> Tensor:
    """The share of the pairs of tokens that a map of clusters keeps, a number that stays on the device."""
    queries, tokens = rows.sizes.double(), keys.sizes.double()
    tokens = tokens.repeat_interleave(queries.shape[1] // tokens.shape[1], 1)
    pairs = (queries * (seen.double() @ tokens[..., None]).squeeze(-1)).sum(-1)
    return (pairs / (rows.tokens.shape[2] * keys.tokens.shape[2])).mean()
