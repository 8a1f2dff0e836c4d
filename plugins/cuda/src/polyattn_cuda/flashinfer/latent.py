"""Family `mla` by FlashInfer's MLA wrapper: its fa3 template on Hopper, else fa2.

The cache is read as it is: compressed part and rope part side by side in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import empty_result, load
from polyattn.contract import AttentionRequest, Bound, KVPart, PagedTables, Session, Slot, UnsupportedRequestError

from ..records.flashinfer import FLASHINFER_MLA_LIBRARY
from .lengths import Lengths, Piece, cut, sighted
from .results import delivered, writable
from .scales import prepared, scale_of
from .sessions import PlannedSession
from .workbench import LENDER, Workbench, processors

__all__ = ["Latent"]

_MOST_WORK = 16384
"""Work items that a plan has room for (`max_total_num_works` of `MLAPlan` in scheduler.cuh). 0.7.0 checks nothing, and
writes what is more over the rest of the plan."""
_ROWS = 64
"""Rows (queries times heads) of a tile of one thread block; two of them work on tiles of twice as many."""
_CHUNKS = ((8, 32), (16, 64), (32, 128), (64, 192))
"""(keys of a cluster of thread blocks on average up to which, keys of a chunk); above, whole 256."""


class Latent:
    """Binds latent requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        call = _Call(request)
        return Bound(call.forward, session=call.session)


class _Call:
    """Everything of a request that is no tensor."""

    tables = ()

    def __init__(self, request: AttentionRequest) -> None:
        r = self.request = request
        self.make = load(FLASHINFER_MLA_LIBRARY, "flashinfer.mla:BatchMLAPagedAttentionWrapper")
        self.metadata: Any = load(FLASHINFER_MLA_LIBRARY, "flashinfer.mla:MLAPlanMetadata")
        self.scale, self.factor = scale_of(r)
        self.strides = (r.heads * r.head_dim, r.head_dim, 1)
        recent = not r.toolkit or r.toolkit >= (12, 3)
        self.backend = "fa3" if r.arch == "sm90" and recent else "fa2"
        width, compressed = r.dims
        dtype = getattr(torch, r.dtype)
        self.options: dict[str, Any] = {
            "num_heads": r.heads,
            "head_dim_ckv": compressed,
            "head_dim_kpe": width - compressed,
            "page_size": r.page_size,
            "causal": r.causal != "none",
            "sm_scale": self.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "query_layout": "packed",
            "kv_cache_layout": "packed",
            "lse_mode": "basee" if r.lse else "none",
        }

    def forward(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        tables: PagedTables,
        attn_mask: None = None,
        kv_parts: Sequence[KVPart] = (),
        out: Tensor | None = None,
    ) -> Any:
        """`polyattn.contract.MLAForward`."""
        r = self.request
        if not query.shape[0]:
            return empty_result(r, query, out)
        with LENDER.lend(query.device) as bench:
            lens = Lengths.read(tables, r.page_size)
            if not lens.pages:
                return empty_result(r, query, out)
            wrapper, alive = self.plan_step(
                bench, lens, lens.page_list(tables.page_table), self._nbytes(query.device), None, None
            )
            return self.run_step(wrapper, alive, query, (cache,), out, {})

    def session(self, slot: Slot) -> Session:
        """A serving side: one plan for all layers of a step."""
        return PlannedSession(self, slot, self._nbytes(slot.device))

    def _nbytes(self, device: torch.device) -> int:
        """Of partial outputs and LSEs, as `MLAPlan` in FlashInfer's scheduler.cuh takes them: two tiles of 64 rows for
        each multiprocessor, outputs in 16 bits."""
        return 2 * 64 * processors(device) * (2 * self.request.dims[1] + 4) + (1 << 20)

    def plan_step(
        self, bench: Workbench, lens: Lengths, pages: Tensor, nbytes: int, step: Any, fixed: dict[str, Tensor] | None
    ) -> tuple[Any, Tensor | None]:
        """A planned wrapper, or several behind one, and the queries that see a key or None = all.

        Raises:
            UnsupportedRequestError: a recorded step is more than one plan has room for.
        """
        pieces = self._pieces(lens, bench.device, recorded=fixed is not None)
        wrappers = [self._wrapper(bench, number, nbytes, fixed) for number in range(len(pieces))]
        with bench.planning(wrappers[0]):
            for wrapper, piece in zip(wrappers, pieces, strict=True):
                of = piece.lens
                metadata = self.metadata.csr(
                    qo_indptr=of.cu_seqlens_q,
                    kv_indptr=of.kv_indptr,
                    kv_indices=pages[piece.pages],
                    kv_len_arr=of.seq_lens,
                )
                wrapper.plan(metadata=metadata, **self.options)
        planned = wrappers[0] if len(pieces) == 1 else _Several(self.request, wrappers, pieces)
        # Of recorded steps only padding sees nothing, and its rows have no meaning.
        return planned, sighted(self.request, lens, bench.device) if fixed is None else None

    def _wrapper(self, bench: Workbench, number: int, nbytes: int, fixed: dict[str, Tensor] | None) -> Any:
        """That of a piece of a batch. Plans are in integer workspaces of their own; the other one they share, in which
        nothing is kept from one call to the next."""
        buffers = {} if fixed is None else {
            "qo_indptr": fixed["cu_seqlens_q"], "kv_indptr": fixed["kv_indptr"], "kv_indices": fixed["pages"],
            "kv_len_arr": fixed["seq_lens"],
        }  # fmt: skip

        def make(workspace: Tensor) -> Any:
            return self.make(
                float_workspace_buffer=workspace, use_cuda_graph=fixed is not None, backend=self.backend, **buffers
            )

        return bench.wrapper((self.make, self.backend, number), make, nbytes)

    def _pieces(self, lens: Lengths, device: torch.device, *, recorded: bool) -> list[Piece]:
        """The batch as pieces that a plan has room for: nearly always one."""
        whole, count = [Piece(slice(None), slice(None), lens)], processors(device)
        # Keys are cut in no more pieces than there are processors, and each sequence ends in one tile that is not full.
        if lens.tokens * self.request.heads // _ROWS + len(lens.listed("seq_lens")) + count <= _MOST_WORK:
            return whole
        work = _work(self.request, lens, count)
        if work <= _MOST_WORK:
            return whole
        if recorded:
            raise UnsupportedRequestError(
                f"FlashInfer's MLA planner has room for {_MOST_WORK} work items (tiles of {_ROWS} or {2 * _ROWS} rows, "
                f"queries times heads), and this recorded step of {lens.tokens} tokens with {self.request.heads} heads "
                f"needs {work}: record steps of fewer tokens, run this one without a graph, where it is planned in "
                f"several pieces, or name another backend"
            )
        return [piece for piece in cut(self.request, lens, _MOST_WORK - count, _ROWS) if piece.lens.pages]

    def run_step(
        self,
        wrapper: Any,
        alive: Tensor | None,
        query: Tensor,
        caches: tuple[Tensor, ...],
        out: Tensor | None,
        given: Mapping[str, Any],
    ) -> Any:
        """A call, or a layer of a step, that was planned."""
        r = self.request
        query, target = prepared(query, self.factor, self.strides), out if out is None else writable(out)
        found = wrapper.run(query=query, kv_cache=caches[0], out=target, return_lse=r.lse, return_lse_base_on_e=r.lse)
        if alive is None and not r.lse and target is out:
            return found
        found, lse = found if r.lse else (found, None)
        return delivered(r, found, lse, alive, None, out)


def _work(request: AttentionRequest, lens: Lengths, count: int) -> int:
    """Work items of a plan, as `MLAPlan` counts them: tiles of rows times the chunks that their keys are cut into, and
    one for a tile without keys. Of more tiles than there is room for, those alone.

    Args:
        count: of multiprocessors.
    """
    heads, queries, keys = request.heads, lens.queries.long(), lens.seq_lens.long()
    blocks = 2 if lens.tokens * heads // queries.shape[0] > _ROWS else 1
    rows, clusters = _ROWS * blocks, max(count // blocks, 1)
    tiles = _ceil(queries * heads, rows)
    total = int(tiles.sum())
    if total > _MOST_WORK:
        return total
    sequence = torch.repeat_interleave(torch.arange(queries.shape[0], device="cpu"), tiles)
    after = torch.arange(1, total + 1, device="cpu") - (tiles.cumsum(0) - tiles)[sequence]
    seen = keys[sequence]
    if request.causal != "none":
        upto = (seen - queries[sequence] + _ceil(after * rows, heads)).minimum(seen).clamp(min=0)
        seen = torch.where(after == tiles[sequence], seen, upto)
    return int(_ceil(seen, _chunk(-(-int(seen.sum()) // clusters))).clamp(min=1).sum())


def _ceil(counts: Tensor, size: int) -> Tensor:
    return (counts + size - 1) // size


def _chunk(average: int) -> int:
    """Keys of a chunk at most, for so many keys of each cluster of thread blocks."""
    return next((keys for most, keys in _CHUNKS if average <= most), -(-average // 256) * 256)


class _Several:
    """Wrappers that are planned for the pieces of a batch, as one. Queries in no piece see no key."""

    def __init__(self, request: AttentionRequest, wrappers: Sequence[Any], pieces: Sequence[Piece]) -> None:
        self._width = request.dims[1]
        self._planned = [(wrapper, piece.tokens) for wrapper, piece in zip(wrappers, pieces, strict=True)]

    def run(
        self, *, query: Tensor, kv_cache: Tensor, out: Tensor | None, return_lse: bool, return_lse_base_on_e: bool
    ) -> Any:
        """As `BatchMLAPagedAttentionWrapper.run`."""
        T, H, _ = query.shape
        out = query.new_empty(T, H, self._width) if out is None else out
        lse = query.new_empty(T, H, dtype=torch.float32) if return_lse else None
        for wrapper, tokens in self._planned:
            wrapper.run(
                query=query[tokens],
                kv_cache=kv_cache,
                out=out[tokens],
                lse=None if lse is None else lse[tokens],
                return_lse=return_lse,
                return_lse_base_on_e=return_lse_base_on_e,
            )
        return out if lse is None else (out, lse)
