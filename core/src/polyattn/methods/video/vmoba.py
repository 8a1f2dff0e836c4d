"""`vmoba_attn`: each query attends to the chunks of a video that it scores highest, its own among them (V-MoBA).

Layers take turns between three ways to cut the grid: along time, over the picture, and both. A chunk is scored by the
mean of its keys (arXiv 2506.23858). Queries are gathered by chunk, so that work follows what each of them chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import BlockOps, Inner, Like, Place
from ...errors import ConfigError, InvalidInputError
from ...semantics.merge_lse import merge_rows
from ...semantics.validation import has_shapes_only
from .grids import grid_of
from .rows import kernels_for, kernels_on, wants_grad
from .steps import first_ones, known
from .tiles import scale_of

__all__ = ["Chunks", "VMoBA", "chunk_means", "chunk_scores", "chunks_of", "select_chunks", "vmoba_mask"]

NAME = "vmoba_attn"
DENSITY = "density"
_MOVED = 64
"""Rows that a kernel moves together."""
_LONG = 512
"""Keys of chunks for which a copy of queries costs less than the kernels of packed sequences save."""


class Chunks(NamedTuple):
    """`Chunks` hold the tokens of a grid, each in one of them.

    Attributes:
        order: int64 [S], the tokens chunk after chunk. own: int64 [S], the chunk of each token.
        sizes: tokens of each chunk. starts, lengths: int32 [C], where a chunk is in `order`, and `sizes` on the device.
    """

    order: Tensor
    own: Tensor
    sizes: tuple[int, ...]
    starts: Tensor
    lengths: Tensor


class _Cut(NamedTuple):
    """A cut divides the grid: the option that says so, tokens of a chunk, chunks that a query keeps in topk mode."""

    option: str
    chunk: tuple[int, ...]
    kept: int
    layers: int


class VMoBA:
    """`VMoBA` lets each query see the chunks that it scores highest: a `polyattn.contract.Method`.

    Args:
        temporal_chunk_size: frames of a chunk; the last may hold fewer. spatial_chunk_size: (H, W) of a chunk, over all
            frames; st_chunk_size: (T, H, W) of one. These must divide the grid.
        temporal_topk, spatial_topk, st_topk: chunks that a query keeps in topk mode, its own among them.
        moba_select_mode: topk = a number of chunks; threshold = the highest scores until their share is reached.
        moba_threshold: the share of the scores, scaled to 0 to 1, that is kept. 1 and above keep all.
        moba_threshold_type: among which scores a choice is made: query_head = of one query; block = of one chunk;
            head_global = of one head; overall = all. Samples of a batch never share one.
        first_full_step, first_full_layer: how many of the first steps and layers run dense.
        temporal_layer, spatial_layer, st_layer: how many layers in turn cut the grid so.

    Raises:
        ConfigError: no layer of a cycle cuts the grid, or the scores of a chunk are to be ranked by number.
    """

    plans_by_step = False

    def __init__(
        self,
        *,
        temporal_chunk_size: int,
        temporal_topk: int,
        spatial_chunk_size: Sequence[int],
        spatial_topk: int,
        st_chunk_size: Sequence[int],
        st_topk: int,
        moba_select_mode: str,
        moba_threshold: float,
        moba_threshold_type: str,
        first_full_step: int,
        first_full_layer: int,
        temporal_layer: int,
        spatial_layer: int,
        st_layer: int,
    ) -> None:
        self.cuts = (
            _Cut("temporal_chunk_size", (temporal_chunk_size,), temporal_topk, temporal_layer),
            _Cut("spatial_chunk_size", tuple(spatial_chunk_size), spatial_topk, spatial_layer),
            _Cut("st_chunk_size", tuple(st_chunk_size), st_topk, st_layer),
        )
        if not sum(cut.layers for cut in self.cuts):
            raise ConfigError(
                f"{NAME}: temporal_layer, spatial_layer and st_layer are all 0, so no layer has chunks; set one of them"
            )
        by_number, self.scope = moba_select_mode == "topk", moba_threshold_type
        if by_number and self.scope == "block":
            raise ConfigError(
                f"{NAME}: moba_threshold_type='block' ranks the queries of a chunk, and a number of chunks for each "
                "query says nothing of them; with moba_select_mode='topk' choose query_head, head_global or overall"
            )
        self.threshold = None if by_number else moba_threshold
        self.steps, self.layers = first_full_step, first_full_layer

    def leaves_dense(self, place: Place) -> str:
        return first_ones(place, NAME, steps=self.steps, layers=self.layers)

    def plan(self, place: Place, like: Like) -> dict[str, Chunks]:
        """Return the cuts that layers take turns with, by option.

        Raises:
            InvalidInputError: the place has no grid or has text, or chunks do not divide the grid.
        """
        grid = grid_of(place, NAME)
        if any(place.text):
            raise InvalidInputError(
                f"{NAME}: the place has text={place.text}, and text is in no chunk of a grid; give text=(0, 0), and "
                "let text attend by cross-attention, as in the models that this method is published for"
            )
        return {cut.option: chunks_of(grid, cut.chunk, like.device, cut.option) for cut in self.cuts if cut.layers}

    def attend(
        self,
        plan: dict[str, Chunks],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        place: Place,
        kept: dict[str, Any],
        inner: Inner,
    ) -> Tensor:
        cut = self.cut_of(place)
        chunks = plan[cut.option]
        found = self._by_kernels(cut, chunks, query, key, value, inner, kept)
        if found is not None:
            return found
        group, (B, H, S) = query.shape[1] // key.shape[1], query.shape[:3]
        if has_shapes_only(query):  # how many queries choose a chunk is not known: as if each chose its own
            index = query.new_zeros(B * H * S, dtype=torch.int64)
            counts = query.new_zeros(B * H * len(chunks.sizes), dtype=torch.int32)
            rows, longest = index, S
        else:
            with torch.no_grad():
                seen = select_chunks(chunk_scores(query, key, chunks), chunks.own, cut.kept, self.threshold, self.scope)
                by_chunk = seen.transpose(2, 3)  # [B, H, C, S]
                counts = by_chunk.sum(-1, dtype=torch.int32).flatten()
                index = by_chunk.flatten().nonzero().squeeze(1)
                # The query of each entry: its number in [B, H, S].
                rows, longest = index // (S * len(chunks.sizes)) * S + index % S, int(counts.max())
                kept[DENSITY] = _share(counts, chunks, S)
        out, lse = inner.varlen(
            query.flatten(0, 2).index_select(0, rows).unsqueeze(1),
            *(_packed(_in_chunks(tensor, chunks), group) for tensor in (key, value)),
            cu_seqlens_q=_cumulative(counts),
            cu_seqlens_k=_cumulative(chunks.lengths.repeat(B * H)),
            max_seqlen_q=longest,
            max_seqlen_k=max(chunks.sizes),
            return_lse=True,
        )
        merged, _ = merge_rows(out.squeeze(1), lse.squeeze(1), rows, B * H * S)
        return merged.view(B, H, S, -1)

    def _by_kernels(
        self, cut: _Cut, chunks: Chunks, query: Tensor, key: Tensor, value: Tensor, inner: Inner, kept: dict[str, Any]
    ) -> Tensor | None:
        """Attend with what kernels choose and merge; None: there are none for this choice, or gradients are wanted."""
        ops = self._kernels(query.device, query.dtype, trained=wants_grad(query, key, value))
        if ops is None:
            return None
        (B, H, S), group = query.shape[:3], query.shape[1] // key.shape[1]
        longest = max(chunks.sizes)
        if has_shapes_only(query):
            return None if longest >= _LONG else query.new_empty(B, H, S, value.shape[3])

        def packed(rows: Tensor, counts: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
            """What is behind the last pair of a head is for a chunk without keys."""
            number, P = rows.shape[1:3]
            rest = P - counts.sum(-1, keepdim=True, dtype=torch.int32)
            sizes = torch.nn.functional.pad(chunks.lengths, (0, 1)).repeat(B * number)
            sides = [_packed(_in_chunks(t[:, keys], chunks), group) for t in (key, value)]
            out, lse = inner.varlen(
                rows.flatten(0, 2).unsqueeze(1),
                *sides,
                cu_seqlens_q=_cumulative(torch.cat([counts, rest], -1).flatten()),
                cu_seqlens_k=_cumulative(sizes),
                # Of a threshold it is known that some head has as many pairs, of a number of chunks that all have.
                max_seqlen_q=S if self.threshold is None else max(S, P),
                max_seqlen_k=longest,
                return_lse=True,
            )
            return out.view(B, number, P, -1), lse.view(B, number, P)

        found = ops.attend_chosen(
            query, key, value, chunk_means(key, chunks),
            (chunks.order.to(torch.int32), chunks.starts, chunks.lengths, chunks.own.to(torch.int32)),
            longest, cut.kept, self.threshold, scale_of(inner, query),
            packed if longest >= _LONG else None,
        )  # fmt: skip
        if found is None:
            return None
        kept[DENSITY] = _share(found[1], chunks, S)
        return found[0].transpose(1, 2)

    def _kernels(self, device: torch.device, dtype: torch.dtype, *, trained: bool) -> BlockOps | None:
        """Those of the device, if they make choices like these. They have no gradients."""
        if self.scope != "query_head" or (self.threshold or 0) >= 1 or trained:
            return None
        return kernels_on(device, dtype)

    def own_kernels(self, place: Place, like: Like, trained: bool) -> tuple[str, ...]:
        """Return what a run is told of kernels that are no calls of families."""
        ops = self._kernels(like.device, like.dtype, trained=trained)
        cut = self.cut_of(place)
        sizes = chunks_of(grid_of(place, NAME), cut.chunk, torch.device("cpu"), cut.option).sizes
        return () if ops is None or max(sizes) >= _LONG else (f"chosen chunks: {ops.name}",)

    def density(self, plan: dict[str, Chunks], place: Place) -> Any:
        return (place.kept or {}).get(DENSITY)

    def cut_of(self, place: Place) -> _Cut:
        """Return the cut of a layer.

        Raises:
            InvalidInputError: the place does not say its layer.
        """
        turns = [cut for cut in self.cuts for _ in range(cut.layers)]
        if len({cut.option for cut in turns}) == 1:
            return turns[0]
        layer = known(place, "layer", f"{NAME}: layers take turns with {len(turns)} cuts of the grid, so it")
        return turns[(layer - self.layers) % len(turns)]


def chunks_of(grid: Sequence[int], chunk: Sequence[int], device: torch.device, option: str = "chunk") -> Chunks:
    """Cut a grid.

    Args:
        grid: (T, H, W). chunk: (t,), (h, w) or (t, h, w), tokens of a chunk; what is not said is whole. (t,) need not
            divide T. option: the name of `chunk`, for messages.

    Raises:
        InvalidInputError: chunks that do not divide the grid.
    """
    T, H, W = grid
    t, h, w = {1: (*chunk, H, W), 2: (T, *chunk), 3: tuple(chunk)}[len(chunk)]
    for size, part, axis in ((T, t if len(chunk) == 3 else T, "T"), (H, h, "H"), (W, w, "W")):
        if size % part:
            raise InvalidInputError(
                f"{NAME}: {option}={list(chunk)} does not divide the grid {tuple(grid)}: {axis}={size} is no multiple "
                f"of {part}; choose a chunk that divides it, or another size of the video"
            )
    cells = torch.cartesian_prod(torch.arange(T) // t, torch.arange(H) // h, torch.arange(W) // w)
    own = (cells[:, 0] * (H // h) + cells[:, 1]) * (W // w) + cells[:, 2]
    counts = own.bincount()
    lists = (t.to(torch.int32).to(device) for t in (counts.cumsum(0) - counts, counts))
    return Chunks(own.argsort(stable=True).to(device), own.to(device), tuple(counts.tolist()), *lists)


def chunk_scores(query: Tensor, key: Tensor, chunks: Chunks) -> Tensor:
    """Score each chunk for each query: the product of the query with the mean of the chunk's keys, not scaled.

    Args:
        query: [B, H_q, S, D]; key: [B, H_kv, S, D].

    Returns:
        [B, H_q, S, chunks], float32, or float64 of such tensors.
    """
    means = chunk_means(key, chunks)
    return query.to(means.dtype) @ means.repeat_interleave(query.shape[1] // key.shape[1], 1).mT


def chunk_means(key: Tensor, chunks: Chunks) -> Tensor:
    """Take the mean of the keys of each chunk, [B, H_kv, S, D] -> [B, H_kv, chunks, D]: float32, float64 of float64."""
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    B, H_kv, _, D = key.shape
    sizes = chunks.lengths
    ops = None if wants_grad(key) else kernels_for(key)
    if ops is not None:
        order, counts = (t.to(torch.int32).expand(B, H_kv, -1).contiguous() for t in (chunks.order, sizes))
        return ops.cluster_means(key, order, counts, key.new_zeros(B, H_kv, len(sizes), D, dtype=wide))
    sums = torch.zeros(B, H_kv, len(chunks.sizes), D, dtype=wide, device=key.device)
    sums = sums.index_add(2, chunks.own, key.to(wide))
    return sums / sizes[:, None]


# Scores [B, H, S, C] -> [B, scopes, scores of a scope], and back from the same of flags.
_INTO: Mapping[str, Callable[[Tensor], Tensor]] = {
    "query_head": lambda x: x.flatten(1, 2),
    "head_global": lambda x: x.flatten(2),
    "overall": lambda x: x.flatten(1).unsqueeze(1),
    "block": lambda x: x.permute(0, 3, 1, 2).flatten(2),
}


def select_chunks(scores: Tensor, own: Tensor, kept: int, threshold: float | None, scope: str) -> Tensor:
    """Choose chunks for each query. Its own is always one of them.

    Args:
        scores: [B, H, S, C]. own: int64 [S]. scope: as `VMoBA`, among which scores the choice is made.
        kept: chunks for each query, on the average of a scope. threshold: share of the scores instead; None = `kept`.

    Returns:
        bool [B, H, S, C].
    """
    B, H, S, C = scores.shape
    mine = torch.nn.functional.one_hot(own, C).bool().expand(B, H, S, C)
    flat, fixed = _INTO[scope](scores), _INTO[scope](mine)
    if threshold is None:
        most = min(kept * {"query_head": 1, "head_global": S, "overall": H * S}[scope], flat.shape[-1])
        found = flat.masked_fill(fixed, float("inf")).topk(most, -1).indices
        seen = torch.zeros_like(fixed).scatter(-1, found, True)
    elif threshold >= 1:
        seen = torch.ones_like(fixed)
    else:
        low, high = flat.aminmax(dim=-1, keepdim=True)
        # Scores that are all alike weigh alike.
        weights = torch.where(high > low, (flat - low) / (high - low), 1.0)
        others, where = weights.masked_fill(fixed, -1.0).sort(-1, descending=True)
        reached = (weights * fixed).sum(-1, keepdim=True) + others.cumsum(-1) - others  # before each is added
        wanted = (reached < threshold * weights.sum(-1, keepdim=True)) & (others >= 0)
        seen = fixed | torch.zeros_like(fixed).scatter(-1, where, wanted)
    return seen.view(B, C, H, S).permute(0, 2, 3, 1) if scope == "block" else seen.view(B, H, S, C)


def vmoba_mask(seen: Tensor, own: Tensor) -> Tensor:
    """Return the mask that a choice of chunks stands for: bool [B, H, S, C] and int64 [S] -> bool [B, H, S, S]."""
    return seen[..., own]


def _share(counts: Tensor, chunks: Chunks, tokens: int) -> Tensor:
    """The share of the pairs of tokens that a choice keeps, a number that stays on the device.

    Args:
        counts: how many queries chose each chunk, C numbers for each head.
    """
    return (counts.reshape(-1, len(chunks.sizes)).double() @ chunks.lengths.double()).mean() / tokens**2


def _in_chunks(tensor: Tensor, chunks: Chunks) -> Tensor:
    """Put tokens chunk after chunk: [B, H, S, D] -> the same."""
    ops, tokens = None if wants_grad(tensor) else kernels_for(tensor), tensor.shape[2]
    if ops is None:
        return tensor.index_select(2, chunks.order)
    starts = torch.arange(0, tokens, _MOVED, dtype=torch.int32, device=tensor.device)
    lists = (chunks.order.to(torch.int32), starts, (tokens - starts).clamp(max=_MOVED))
    return ops.gather(tensor, lists, _MOVED, filled=False, means=False)[0]


def _packed(tensor: Tensor, group: int) -> Tensor:
    """Pack the tokens of each head of each sample, for all query heads: [B, H_kv, S, D] -> [B * H_q * S, 1, D]."""
    return (tensor.repeat_interleave(group, 1) if group > 1 else tensor).flatten(0, 2).unsqueeze(1)


def _cumulative(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
