"""What a plugin's classes of device ops look like: kernels of serving (`DeviceOps`) and of methods (`BlockOps`).

`DeviceOpsInfo.target` names such a class. Core's own torch operators do the same wherever nobody brings kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["WRITTEN", "BlockOps", "DeviceOps", "RowsWriter", "StepTables", "StepView", "StepWriter", "TailedConv"]
__all__ += ["TokenLister", "TokenScorer"]

WRITTEN = ("cu_seqlens_k", "page_counts", "kv_indptr", "kv_indices", "last_page_len")
"""Views of a `Step` that a `StepWriter` writes beside its page_table and seq_lens."""


class DeviceOps(Protocol):
    """Made once for a process, without arguments. Nothing in it waits for the device; all of it may be recorded."""

    name: str
    """For people: who writes."""

    def rows_writer(self, cache: Any, dtype: torch.dtype) -> RowsWriter | None:
        """What writes rows of `dtype` into a `polyattn.serving.LayerCache`, asked once for each; None: core does."""

    def merge(self, outs: Tensor, lses: Tensor, *, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
        """Merge the results of several ranks as `polyattn.merge` does. A class may lack it: core merges then.

        Args:
            outs: float32 [P, T, H, D_v]. lses: float32 [P, T, H], natural log, -inf for rows without keys. sinks: [H].
            out: [T, H, D_v] in any float dtype, written. lse: float32 [T, H], written, without sinks.
        """

    def merge_parts(self, outs: Sequence[Tensor], lses: Sequence[Tensor], *, out: Tensor, lse: Tensor) -> None:
        """Merge partial results that lie apart, as those of a ring's steps. A class may lack it: core merges then.

        Args:
            outs: 1 to 4 of [T, H, D_v], each in any float dtype, 0 where its LSE is -inf. lses: float32 [T, H] of each,
                natural log, any strides.
            out: [T, H, D_v] in any float dtype, written. lse: float32 [T, H], written. They may be the first of `outs`
                and of `lses`.
        """

    def dequantised(
        self, request: Any, cache: Tensor, scale: Tensor | None, page_table: Tensor, seq_lens: Tensor
    ) -> Tensor | None:
        """Copy the pages of a quantised cache that a step reads, as numbers. A class may lack it: core copies then.

        Args:
            request: paged or mla `AttentionRequest`, whose kv_dtype, kv_scales and kv_layout say what the cache holds,
                and whose dtype that of the result: a stored number times its scale in float32, rounded once, as
                `polyattn.semantics.kv_quant` does it.
            cache: of keys, of values or of latent rows, as the call has it, any strides. scale: as the call has it.
            page_table: int32 [N, columns]; past the end of a sequence it may hold anything. seq_lens: int32 [N].

        Returns:
            [N * columns, ...], the pages of the table one after another in the layout of the cache; anything behind
            the last token of a sequence. None: not of such a cache, core copies it.
        """


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


class TokenScorer(Protocol):
    """What `DeviceOps` may have beside writing rows, for indexers of DeepSeek sparse attention."""

    def index_scores(
        self, query: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
        max_seqlen_q: int,
    ) -> Tensor:  # fmt: skip
        """Scores all tokens for queries, as `polyattn.semantics.token_index.index_scores`.

        Args:
            query: [T_q, H_i, D_i], in 16 bits or float32. weights: [T_q, H_i].
            cache: [pages, page_size, D_i], or uint8 [pages, page_size, D_i + 4], rows of `token_index.pack_index`.
            page_table, seq_lens, cu_seqlens_q, max_seqlen_q: of the step, as `PagedTables`.

        Returns:
            float32 [T_q, max_pages * page_size]; anything for tokens that a query does not see.
        """


class TailedConv(Protocol):
    """What `DeviceOps` may have beside writing rows, for layers of linear attention."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, slots: Tensor, *,
        cu_seqlens: Tensor | None = None, parents: Tensor | None = None, drafted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes `polyattn.semantics.linear_conv.causal_conv` over tails in a pool, and writes the new tails there.

        Args:
            x: [B, S, C], in 16 bits or float32. weight: [C, W]. bias: [C].
            tails: [slots, C, W - 1]. slots: int [N], the tail of each sequence; below 0: zeros, and nothing is written.
            cu_seqlens: integers [N+1], with B = 1: sequences behind each other. None: N = B.
            drafted: [slots, most, C, W - 1], most >= S: the tokens are drafts, the tail after draft t goes to
                drafted[slot, t], and `tails` stays. parents: integers [B, S], see there.

        Returns:
            [B, S, C].
        """


class TokenLister(Protocol):
    """What `DeviceOps` may have beside writing rows, for lists of the tokens that an indexer scores highest."""

    def top_tokens(self, scores: Tensor, seen: Tensor, topk: int) -> Tensor:
        """Lists the tokens of the highest scores, as `polyattn.semantics.token_index.top_tokens`.

        Args:
            scores: float32 [T_q, S]. seen: int [T_q], tokens that each query sees, the first of S.

        Returns:
            int32 [T_q, topk], in any order; -1 where a query sees fewer tokens.
        """


class BlockOps(Protocol):
    """Moves tokens in blocks, for methods. Made once for a process; nothing in it waits for the device.

    `blocks` is (order, starts, sizes), int32 [N], [n] and [n], or all of them [B, H, ...] where heads differ: block i
    has the tokens order[starts[i] : starts[i] + sizes[i]], at most `block` of them; no token is in two. D is any width.
    """

    name: str

    def gather(
        self, tensor: Tensor, blocks: tuple[Tensor, Tensor, Tensor], block: int, *, filled: bool, means: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Brings tokens together.

        Args:
            tensor: [B, H, S, D], any strides. filled: each block takes `block` rows, zeros behind its own; else they
                lie where `starts` says. means: wanted.

        Returns:
            (rows, contiguous, [B, H, n * block, D] filled, else [B, H, N, D]; means float32 [B, H, n, D] or None).
        """

    def scatter(
        self, rows: Tensor, places: Tensor, *, gate: Tensor | None = None, coarse: Tensor | None = None,
        owners: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Brings rows back to their tokens, and adds what is one row for a block.

        Args:
            rows: [B, H, R, D], contiguous. places: int32 [S] or [B, H, S], the row of each token, -1 = zeros.
            coarse: float32 [B, H, n, D], contiguous. owners: int32 [S], the block of each token. gate: [B, H, S, D] of
                any strides, 0 too: its weight. All three or none.

        Returns:
            rows[places] + gate * coarse[owners], [B, S, H, D] of the rows' dtype.
        """

    def scored(self, query: Tensor, key: Tensor, value: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
        """Attention of one mean to all, with its scores.

        Args:
            query: float32 [B, H_q, n, D]; key: [B, H_kv, m, D]; value: [B, H_kv, m, D_v] or None; contiguous.

        Returns:
            (scale * query key^T, float32 [B, H_q, n, m]; softmax of it times value, float32 [B, H_q, n, D_v], or None).
            Products are off by 2**-15 of themselves at most.
        """

    def top(self, scores: Tensor, kept: int) -> Tensor | None:
        """int32 [..., kept]: where the highest of float32 [..., m] are, ascending; of equal ones the first. None: too
        many for this kernel."""

    def pooled(self, tensor: Tensor, block: int) -> Tensor | None:
        """float32 [B, H, ceil(S / block), D]: means of `block` tokens at a time, of fewer at the end, of [B, H, S, D].
        None: not for this size of blocks."""

    def linear_sums(self, key: Tensor, value: Tensor, feature_map: str) -> tuple[Tensor, Tensor]:
        """The sums of a linear branch.

        Args:
            key: [B, H_kv, S, D]; value: [B, H_kv, S, D_v]. feature_map: phi of a row: softmax, elu (+ 1) or relu.

        Returns:
            (sum of phi(key)^T value, float32 [B, H_kv, D, D_v]; sum of phi(key), float32 [B, H_kv, D]).
        """

    def linear_add(
        self, query: Tensor, state: Tensor, total: Tensor, bias: Tensor | None, base: Tensor, feature_map: str,
        epsilon: float,
    ) -> Tensor:  # fmt: skip
        """base + phi(query) state / (phi(query) total + epsilon) + bias, [B, H_q, S, D_v], like `base`.

        Args:
            query: [B, H_q, S, D]. state, total: as of `linear_sums`. bias: [D_v] or None. base: [B, H_q, S, D_v].
        """

    def nearest(self, points: Tensor, centroids: Tensor) -> Tensor:
        """int32 [B, H, S]: the centroid that each point is nearest to, the first of those that are equally near.

        Args:
            points: [B, H, S, D]. centroids: float32 [B, H, C, D], which may be rounded to the points' dtype first.
        """

    def in_order(self, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor, Tensor]:
        """(order, places, counts) of labels [B, H, S]: int32 [B, H, S], the tokens cluster after cluster, each in
        their own order; the place of each token there; int32 [B, H, clusters], the tokens of each cluster."""

    def cluster_means(self, points: Tensor, order: Tensor, counts: Tensor, centroids: Tensor) -> Tensor:
        """float32 [B, H, C, D]: the mean of each cluster; of an empty one its centroid.

        Args:
            points: [B, H, S, D]. order, counts: as of `in_order`. centroids: float32 [B, H, C, D].
        """

    def listed(self, flags: Tensor) -> tuple[Tensor, Tensor]:
        """(counts int32 [...], indices int32 [..., m]) of flags, bool [..., m]: the places of those that are set,
        ascending; anything behind them."""

    def choose(
        self, query: Tensor, means: Tensor, own: Tensor, kept: int, threshold: float | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The chunks that each query chooses: its own, and those whose means it scores highest. None: too many.

        Args:
            query: [B, H_q, S, D]. means: float32 [B, H_kv, C, D]. own: int [S], the chunk of each query.
            kept: chunks of each query. threshold: in its place, those are kept until the sum of their scores, scaled
                to 0 to 1 for each query, reaches this share of the sum of all.

        Returns:
            int32 (chosen [B, H_q, P], queries [B, H_q, P], firsts [B, H_q, S + 1]): pairs of a query and a chunk, query
            after query; those of query s are firsts[s] ... firsts[s + 1]. Behind the last one of a head: C, query 0.
        """

    def attend_chosen(
        self, query: Tensor, key: Tensor, value: Tensor, means: Tensor, chunks: tuple[Tensor, ...], longest: int,
        kept: int, threshold: float | None, scale: float, packed: Any) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Attention of each query to the chunks that it chooses, as `choose`. None: too many. With a threshold it waits
        for the device once.

        Args:
            query: [B, H_q, S, D]; key: [B, H_kv, S, D]; value: [B, H_kv, S, D_v], of any strides.
            chunks: int32 (order [S], starts [C], sizes [C], own [S]): the tokens chunk after chunk, where each chunk
                is, and the chunk of each token. longest: keys of the longest. scale: of the logits.
            packed: what attends where chunks are long, None = the kernel does. Of rows [B, h, P, D], gathered chunk
                after chunk for some heads, how many each chunk has, int32 [B, h, C], and the slice of the heads of keys
                it returns (outs [B, h, P, D_v], float32 lses [B, h, P]); rows behind a head's last pair may get
                anything.

        Returns:
            (out [B, S, H_q, D_v] of the query's dtype; int32 [B, H_q, C], how many queries chose each chunk).
        """

    def merge_chosen(self, outs: Tensor, lses: Tensor, places: Tensor, firsts: Tensor) -> Tensor:
        """[B, S, H, D]: partial results of each query, merged by their LSEs; 0 where all are empty.

        Args:
            outs: [B, H, P, D]. lses: float32 [B, H, P]. places: int32 [B, H, P], where the result of a pair is.
            firsts: int32 [B, H, S + 1], the pairs of each query.
        """
