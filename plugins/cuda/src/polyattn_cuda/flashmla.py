"""Family `mla` by FlashMLA: its dense kernel over rows of bfloat16 and float16 (Hopper), its sparse one over FP8 rows.

Both take sequences of equally many queries, causal from the lower right corner, and return the natural-log LSE
[N, H_q, S_q], +inf for a query without keys. The sparse kernel reads the rows of 656 bytes that it is given the numbers
of, 64 at a time: here all that a query may see.

A schedule is made by the first call that is given it, from the lengths of that call, and holds for them only: one per
step, made anew where the step is recorded.

A step is several calls of the kernel where its numbers of queries differ so much that filling up would cost more, and
where it is too large for one: a schedule is made in shared memory, 5 ints for each sequence and one more, and a
process in which that is not enough ends (get_decoding_sched_meta.cu); offsets in the sparse kernel and in the one that
adds parts up are 32 bits wide; and the queries of a sequence are an axis of a grid.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from polyattn.adapters import align16, capturing, empty_result, finish_output, load
from polyattn.contract import AttentionRequest, Bound, PagedTables, Requirement, Slot, UnsupportedRequestError
from polyattn.semantics.packed import sequence_ids

from .records.serving import FLASH_MLA, PAGE, SGL_FLASH_MLA, VLLM_FLASH_MLA

__all__ = ["FlashMLA", "SglFlashMLA", "VllmFlashMLA"]

_NEEDS = {
    **dict.fromkeys(("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v"), "decoding"),
    **dict.fromkeys(("tile_scheduler_metadata", "softmax_scale", "causal"), "decoding"),
    **dict.fromkeys(("is_fp8_kvcache", "indices"), "a cache of FP8 rows"),
}

_SEQUENCES = (227 * 1024 // 4 - 1) // 5
"""Of a call: what a schedule has room for in the shared memory of a block."""
_ROWS = 65_535
"""Queries of a sequence in a call: blocks of the second axis of a grid."""
_NUMBERS = 2**31 - 160 * 64 * 512
"""Elements of an output, or of a list of places. The accumulators have more than outputs: by no more than a tile of 64
rows for each multiprocessor, of which the kernels know up to 160."""
_SPARE = 512
"""Rows that are filled up sooner than that another call is made: at 128 heads they take 280 MB."""


class FlashMLA:
    """Binds latent requests to DeepSeek's own build."""

    requirement: ClassVar[Requirement] = FLASH_MLA
    kernels: ClassVar[Mapping[str, Any]] = {}
    """Keywords that choose among the kernels of a build."""

    def bind(self, request: AttentionRequest) -> Bound:
        attention = _Attention(self.requirement, self.kernels, request)

        def session(slot: Slot) -> _Session:
            return _Session(attention, recorded=slot.recorded)

        return Bound(attention, session=session)


class SglFlashMLA(FlashMLA):
    """Binds them to SGLang's, where the kernels of Hopper and those of these rows are the legacy ones."""

    requirement = SGL_FLASH_MLA
    kernels: ClassVar[Mapping[str, Any]] = {"use_legacy": True}


class VllmFlashMLA(FlashMLA):
    """Binds them to the copy in vLLM."""

    requirement = VLLM_FLASH_MLA


@dataclasses.dataclass(frozen=True)
class _Rows:
    """T_q packed queries as N sequences of `count`: shorter ones are filled up in front, so that the last query of each
    stays at the lower right.

    Attributes:
        source: int64 [N, count], which query a row holds. sequence, row: int64 [T_q], where a query is. All None where
            every sequence has `count` queries already.
    """

    count: int
    source: Tensor | None = None
    sequence: Tensor | None = None
    row: Tensor | None = None

    @classmethod
    def of(cls, tokens: int, cu_seqlens_q: Tensor, max_seqlen_q: int) -> _Rows:
        ends = cu_seqlens_q[1:]
        if tokens == ends.shape[0] * max_seqlen_q:
            return cls(max_seqlen_q)
        first = ends - max_seqlen_q
        source = first[:, None] + torch.arange(max_seqlen_q, device=ends.device)
        token = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
        sequence = sequence_ids(tokens, cu_seqlens_q)
        return cls(max_seqlen_q, source.clamp(min=0), sequence, (token - first[sequence]).long())

    def padded(self, packed: Tensor) -> Tensor:
        """[T_q, ...] as [N, count, ...]; rows filled up hold any query."""
        return torch.unflatten(packed, 0, (-1, self.count)) if self.source is None else packed[self.source]

    def packed(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1) if self.row is None else padded[self.sequence, self.row]


class _Piece(NamedTuple):
    """`rows` queries of a sequence, from the packed query `first` on; `later` ones of it come behind them."""

    sequence: int
    first: int
    rows: int
    later: int


class _Limits(NamedTuple):
    """What one call takes, where an output or a list of places has up to `width` elements for each query."""

    width: int

    @property
    def rows(self) -> int:
        """Queries of a sequence."""
        return min(_ROWS, _NUMBERS // self.width)

    def sequences(self, rows: int) -> int:
        """Sequences of so many queries."""
        return min(_SEQUENCES, _NUMBERS // (self.width * rows))


def _pieces(lengths: Sequence[int], most: int) -> Iterator[_Piece]:
    """The queries of sequences that have so many of them, cut into pieces of up to `most`."""
    start = 0
    for sequence, length in enumerate(lengths):
        for first in range(0, length, most):
            rows = min(most, length - first)
            yield _Piece(sequence, start + first, rows, length - first - rows)
        start += length


def _calls(lengths: Sequence[int], limits: _Limits) -> Iterator[list[_Piece]]:
    """The pieces of each call. None has twice as many queries as another of its call, so less than half of what the
    kernel is given is filled up."""
    alike: dict[int, list[_Piece]] = defaultdict(list)
    for piece in _pieces(lengths, limits.rows):
        alike[(piece.rows - 1).bit_length()].append(piece)
    for pieces in alike.values():
        most = limits.sequences(max(piece.rows for piece in pieces))
        yield from (pieces[at : at + most] for at in range(0, len(pieces), most))


def _index(numbers: Tensor, device: torch.device) -> slice | Tensor:
    """int64 [n] of the host as an index of tensors on a device: a slice where they follow each other."""
    first = int(numbers[0])
    if torch.equal(numbers, torch.arange(first, first + len(numbers), device="cpu")):
        return slice(first, first + len(numbers))
    return numbers.to(device)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One call of the kernel, and what the layers of a step share of it.

    Attributes:
        tokens: which packed queries it has, None = all. page_table: int32 [n, pages]. seq_lens: int32 [n].
        indices: int32 [n, rows, keys], places of FP8 rows in the cache, -1 = none.
    """

    rows: _Rows
    page_table: Tensor
    seq_lens: Tensor
    schedule: Any
    indices: Tensor | None
    tokens: slice | Tensor | None = None


class _Attention:
    """The forward of one request."""

    def __init__(self, requirement: Requirement, kernels: Mapping[str, Any], request: AttentionRequest) -> None:
        module = requirement.module
        needs = {**_NEEDS, **dict.fromkeys(kernels, f"{request.arch or 'this kernel'}")}
        self._kernel = load(requirement, f"{module}:flash_mla_with_kvcache", needs)
        self._new_schedule = load(requirement, f"{module}:get_mla_metadata")
        self._request, self._kernels = request, kernels
        self._causal = request.causal != "none"
        self._rows_of_bytes = request.kv_storage == "fp8_e4m3"
        scale = request.softmax_scale
        # The kernels take the largest unscaled logit: instead of the scale's the queries take the sign.
        self._scale = abs(scale) or 1.0
        self._sign = None if scale > 0 else -1.0 if scale < 0 else 0.0

    def step(
        self,
        query: Tensor,
        tables: PagedTables,
        *,
        lengths: Sequence[int] | None = None,
    ) -> tuple[_Part, ...]:
        """The calls of a step: one, unless it is too large or would be filled up to more than twice its size.

        Args:
            lengths: queries of each sequence, where the host has them; else the device is asked, if need be.

        Raises:
            UnsupportedRequestError: a step that is being recorded would have to be taken apart by its lengths.
        """
        page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[:5]
        tokens, sequences = query.shape[0], seq_lens.shape[0]
        limits = _Limits(max(query.shape[1] * self._request.dims[1], self._places_of_query(max_seqlen_k)))
        most = limits.sequences(min(max_seqlen_q, limits.rows))
        fits = max_seqlen_q <= limits.rows and sequences <= most
        full, recording = sequences * max_seqlen_q, capturing(query.device.type)
        if fits and (recording or full <= 2 * tokens + _SPARE):
            rows = _Rows.of(tokens, cu_seqlens_q, max_seqlen_q)
            return (self._part(rows, page_table, seq_lens, max_seqlen_k),)
        uniform = tokens == full
        if recording and not (uniform and max_seqlen_q <= limits.rows):
            raise UnsupportedRequestError(
                f"flashmla cannot record a call of {sequences} sequences of up to {max_seqlen_q} queries: its kernel "
                f"takes up to {limits.rows} queries of a sequence, and {most} sequences of so many; a recording cannot "
                f"read how long each is, to split it. Split the batch, make the call eagerly, or name another backend"
            )
        if uniform:
            lengths = [max_seqlen_q] * sequences
        elif lengths is None:
            ends = tables.listed("cu_seqlens_q")
            lengths = [end - start for start, end in itertools.pairwise(ends)]
        calls = _calls(lengths, limits)
        return tuple(self._part_of(pieces, page_table, seq_lens, max_seqlen_k) for pieces in calls)

    def _places_of_query(self, max_seqlen_k: int) -> int:
        """Keys that each query has a list of: whole pages, as many as the kernel reads at a time."""
        return -(-max_seqlen_k // PAGE) * PAGE if self._rows_of_bytes else 0

    def _part(
        self,
        rows: _Rows,
        page_table: Tensor,
        seq_lens: Tensor,
        max_seqlen_k: int,
        tokens: slice | Tensor | None = None,
    ) -> _Part:
        indices = None
        if keys := self._places_of_query(max_seqlen_k):
            indices = _places(page_table, seq_lens, rows.count, keys, causal=self._causal)
        return _Part(rows, page_table, seq_lens, self._new_schedule()[0], indices, tokens)

    def _part_of(self, pieces: list[_Piece], page_table: Tensor, seq_lens: Tensor, max_seqlen_k: int) -> _Part:
        device = seq_lens.device
        sequence, first, count, later = torch.tensor(pieces, device="cpu").unbind(1)
        ends, longest = count.cumsum(0), int(count.max())
        tokens = torch.arange(int(ends[-1]), device="cpu") + (first - ends + count).repeat_interleave(count)
        of = _index(sequence, device)
        table, lens = page_table[of], seq_lens[of]
        if self._causal and bool(later.any()):
            # The last query of a piece sees the keys before the later ones of its sequence.
            lens = (lens - later.to(device, lens.dtype)).clamp(min=0)
        rows = _Rows(longest)
        if len(tokens) != len(pieces) * longest:
            starts = torch.nn.functional.pad(ends, (1, 0)).to(device, torch.int32)
            rows = _Rows.of(len(tokens), starts, longest)
        return self._part(rows, table, lens, max_seqlen_k, _index(tokens, device))

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        tables: PagedTables,
        attn_mask: None = None,
        out: Tensor | None = None,
        step: tuple[_Part, ...] | None = None,
    ) -> Any:
        """A `contract.MLAForward`. step: of the session, None = of this call alone."""
        request = self._request
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(request, query, out)
        if step is None:
            step = self.step(query, tables)
        signed = query if self._sign is None else query * self._sign
        result, lse = self._together(step, signed, cache.unsqueeze(2))
        if lse is not None:
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        return finish_output(request, result, lse, None, out)

    def _together(self, step: tuple[_Part, ...], query: Tensor, cache: Tensor) -> tuple[Tensor, Tensor | None]:
        """(out [T_q, H_q, D_v], LSE [T_q, H_q] where it is wanted) of all parts."""
        if step[0].tokens is None:
            return self._attend(step[0], query, cache)
        out = query.new_empty(*query.shape[:2], self._request.dims[1])
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if self._request.lse else None
        for part in step:
            out[part.tokens], lse_of_part = self._attend(part, query[part.tokens], cache)
            if lse is not None and lse_of_part is not None:
                lse[part.tokens] = lse_of_part
        return out, lse

    def _attend(self, part: _Part, query: Tensor, cache: Tensor) -> tuple[Tensor, Tensor | None]:
        if part.indices is None:
            keys: dict[str, Any] = {"block_table": part.page_table, "cache_seqlens": part.seq_lens}
            keys["causal"] = self._causal
        else:
            keys = {"block_table": None, "cache_seqlens": None, "indices": part.indices}
        out, lse = self._kernel(
            q=align16(part.rows.padded(query)),
            k_cache=cache,
            head_dim_v=self._request.dims[1],
            tile_scheduler_metadata=part.schedule,
            softmax_scale=self._scale,
            is_fp8_kvcache=self._rows_of_bytes,
            **keys,
            **self._kernels,
        )
        packed = part.rows.packed
        return packed(out), packed(lse.transpose(1, 2)) if self._request.lse else None


def _places(page_table: Tensor, seq_lens: Tensor, rows: int, keys: int, *, causal: bool) -> Tensor:
    """int32 [N, rows, keys], the places of the keys each query sees, -1 from its last one on. keys: whole pages."""
    pages = page_table[:, : keys // PAGE]
    place = torch.arange(PAGE, device=pages.device, dtype=torch.int32)
    places = (pages[:, :, None] * PAGE + place).flatten(1)
    last = seq_lens[:, None]
    if causal:
        last = last - torch.arange(rows - 1, -1, -1, device=pages.device, dtype=torch.int32)
    key = torch.arange(places.shape[1], device=pages.device, dtype=torch.int32)
    return places[:, None, :].where(key < last[:, :, None], -1).expand(-1, rows, -1).contiguous()


class _Session:
    """The serving side in one slot: one schedule and one list of places for all layers of a step.

    A recording makes its own: in replays they follow the lengths. Those of a step that was run before it was recorded,
    to warm up, would stay what they were.
    """

    def __init__(self, attention: _Attention, *, recorded: bool) -> None:
        self._attention, self._recorded = attention, recorded
        self._step: tuple[_Part, ...] | None = None
        self._lengths: list[int] | None = None
        self._in_graph = False

    def plan(self, step: Any) -> None:
        """Remember the numbers of queries, which recorded steps do not depend on: the kernel plans on the device."""
        self._lengths = None if self._recorded else step.listed("query_lens")

    def prepare(self, step: Any) -> None:
        """Forget the step before. The first layer makes what this one needs, so that a recording holds it."""
        self._step = None

    def forward(
        self, query: Tensor, cache: Tensor, *, tables: PagedTables, attn_mask: None = None, out: Tensor | None = None
    ) -> Any:
        """A `contract.MLAForward` of the step."""
        in_graph = self._recorded and capturing(query.device.type)
        if (self._step is None or in_graph is not self._in_graph) and query.shape[0] and tables.max_seqlen_k:
            self._step = self._attention.step(query, tables, lengths=self._lengths)
            self._in_graph = in_graph
        return self._attention(query, cache, tables=tables, out=out, step=self._step)
