"""Family `paged` by TensorRT-LLM's kernels, which FlashInfer carries: trtllm-gen on data-centre Blackwell, and XQA,
which decodes and verifies, on Hopper and SM120.

No plan: they read page tables and lengths on the device. Their scale is one number with the cache's in it.

XQA launches on the current device. What a kernel of its needs of a device it asks for once, where it is loaded, of the
device that is current then (`hostSmemSize` of mha.cu): on any other its launches fail, so a process has one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import aligned, append_new_kv, empty_result, load
from polyattn.contract import AttentionRequest, Bound, PagedTables, Session, Slot, UnsupportedRequestError
from polyattn.semantics.packed import sequence_ids

from .. import devices
from ..records.flashinfer import FLASHINFER
from .memory import SEMAPHORES, TILE, WORKSPACE, counters, lse_bytes, scratch_bytes, workspace_of
from .results import delivered, natural, writable
from .saving import Places
from .scales import readable, scale_of, unscaled
from .workbench import processors

__all__ = ["TRTLLM", "drafts_mask"]


class TRTLLM:
    """Binds paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        call = _Generated(request) if request.arch in ("sm100", "sm103") else _XQA(request)
        return Bound(call.forward, session=call.session)


"""Keywords of every call under a plan."""


class _Call:
    """Everything of a request that is no tensor."""

    decode: Callable[..., Any]

    def __init__(self, request: AttentionRequest) -> None:
        r = self.request = request
        self.scale, self.factor = scale_of(r)
        self.causal = r.causal != "none"
        self.fixed = {
            "bmm1_scale": self.scale,
            "bmm2_scale": 1.0,
            "window_left": r.window[0],
            "kv_layout": r.kv_layout or "NHD",
        }

    def forward(
        self,
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
        memory: _Memory | None = None,
    ) -> Any:
        """`polyattn.contract.PagedForward`; `memory`: of a session."""
        r = self.request
        if not (query.shape[0] and tables.page_table.shape[1] and tables.max_seqlen_k):
            return empty_result(r, query, out)
        if key is not None:
            new = (unscaled(key, k_scale), unscaled(value, v_scale))
            caches, tables = append_new_kv(r, query, caches, tables, *new)
        query = readable(query, self.factor)
        # The kernels know no strides of tables and lengths, nor of sinks.
        page_table, seq_lens, cu_seqlens_q = (table.contiguous() for table in tables[:3])
        tables = tables._replace(page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
        given: dict[str, Any] = {
            **self.fixed,
            "query": query,
            "kv_cache": caches,
            "workspace_buffer": workspace_of(query.device) if memory is None else memory.workspace,
            "block_tables": page_table,
            "seq_lens": tables.seq_lens,
        }
        if k_scale is not None:
            given["bmm1_scale"] = (k_scale.float() * self.scale).reshape(1)
        if v_scale is not None:
            given["bmm2_scale"] = v_scale.float().reshape(1)
        if sinks is not None:
            given["sinks"] = sinks.float().contiguous()
        if out is not None:
            given["out"] = writable(out)
        found, lse = self.run(given, tables, memory)
        # Of recorded steps only padding sees nothing, and of others the plan knows whether something does.
        alive = None if memory is not None and not memory.blind else _seeing(tables, query)
        if alive is lse is out is None:
            return found
        return delivered(r, found, natural(lse), alive, None, out)

    def run(self, given: dict[str, Any], tables: PagedTables, memory: _Memory | None) -> tuple[Tensor, Tensor | None]:
        """(out, LSE of base 2 or None)."""
        raise NotImplementedError

    def ready(self, step: Any, device: torch.device) -> None:
        """Make what a step needs before it is recorded, and refuse one that cannot be served."""

    def planned(self, step: Any, memory: _Memory) -> dict[str, Any] | None:
        """What `decode` is given in every layer of a step beside queries and caches, None = `forward` finds out."""
        return None

    def session(self, slot: Slot) -> Session:
        """A serving side: it has nothing to plan, and memory of its own."""
        return _Session(self, slot)


def _uniform(tables: PagedTables, query: Tensor) -> bool:
    """Whether every sequence has `max_seqlen_q` queries."""
    return query.shape[0] == tables.seq_lens.shape[0] * tables.max_seqlen_q


def _seeing(tables: PagedTables, query: Tensor) -> Tensor:
    """bool [T_q], the queries of sequences that have keys."""
    if _uniform(tables, query):
        return (tables.seq_lens > 0).repeat_interleave(tables.max_seqlen_q, output_size=query.shape[0])
    return tables.seq_lens[sequence_ids(query.shape[0], tables.cu_seqlens_q)] > 0


class _Generated(_Call):
    """trtllm-gen."""

    def __init__(self, request: AttentionRequest) -> None:
        super().__init__(request)
        self.decode = load(
            FLASHINFER,
            "flashinfer.decode:trtllm_batch_decode_with_kv_cache",
            {"return_lse": "an LSE", "cum_seq_lens_q": "drafts", "multi_ctas_kv_counter_buffer": "a recorded step"},
        )
        self.context = load(
            FLASHINFER,
            "flashinfer.prefill:trtllm_batch_context_with_kv_cache",
            {"return_lse": "an LSE", "causal": "attention without a diagonal"},
        )

    def run(self, given: dict[str, Any], tables: PagedTables, memory: _Memory | None) -> tuple[Tensor, Tensor | None]:
        r = self.request
        # It makes its result with the strides of the queries, and writes it as if these were packed.
        given |= {"query": given["query"].contiguous(), "kv_cache": _alike(given["kv_cache"])}
        wanted = lse_bytes(r.heads, tables.seq_lens.shape[0], tables.max_seqlen_q) if r.lse else 0
        if wanted > WORKSPACE // 2:
            given["workspace_buffer"] = workspace_of(given["query"].device, WORKSPACE + wanted)
        if memory is not None:
            given["multi_ctas_kv_counter_buffer"] = memory.counters
        if r.phase in ("decode", "verify"):
            drafts: dict[str, Any] = {"q_len_per_req": tables.max_seqlen_q}
            if not _uniform(tables, given["query"]):
                drafts = {
                    "q_len_per_req": None,
                    "max_q_len": tables.max_seqlen_q,
                    "cum_seq_lens_q": tables.cu_seqlens_q,
                }
            found = self.decode(
                max_seq_len=tables.max_seqlen_k, backend="trtllm-gen", return_lse=r.lse, **drafts, **given
            )
        else:
            found = self.context(
                max_q_len=tables.max_seqlen_q,
                max_kv_len=tables.max_seqlen_k,
                batch_size=tables.seq_lens.shape[0],
                cum_seq_lens_q=tables.cu_seqlens_q,
                cum_seq_lens_kv=torch.nn.functional.pad(tables.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
                causal=self.causal,
                return_lse=r.lse,
                **given,
            )
        return found if r.lse else (found, None)


def _alike(caches: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Caches as trtllm-gen finds its way in them: V by the strides of K, both by TMA. Others it reads wrong or not."""
    key, value = caches
    if key.stride() == value.stride() and aligned(key, value):
        return caches
    return tuple(cache.clone(memory_format=torch.contiguous_format) for cache in caches)


_MOST = 65_535
"""Sequences of a call of XQA: the third axis of a grid (dimGrid of mha.cu)."""
_processors = functools.cache(processors)
_first: dict[str, int] = {}
"""The "device" of XQA's first call in this process."""


def _servable(sequences: int, place: Tensor) -> None:
    """Whether XQA can serve a call of so many sequences where `place` is.

    Raises:
        UnsupportedRequestError: it cannot.
    """
    if sequences > _MOST:
        raise UnsupportedRequestError(
            f"trtllm_mha takes up to {_MOST} sequences in a call on this device (XQA), and this one has {sequences}: "
            f"split the batch, or name another backend"
        )
    index = place.get_device()
    if index >= 0 and (first := _first.setdefault("device", index)) != index:
        raise UnsupportedRequestError(
            f"trtllm_mha (XQA) serves one device of a process, and this one has called it on cuda:{first}: a call on "
            f"cuda:{index} needs a process of its own, or another backend"
        )


class _XQA(_Call):
    """XQA. Drafts of a sequence see the prefix and, among themselves, what a packed mask says."""

    def __init__(self, request: AttentionRequest) -> None:
        super().__init__(request)
        needs = {"q_cu_seq_lens": "sequences with numbers of queries of their own"}
        self.decode = load(FLASHINFER, "flashinfer.decode:xqa_batch_decode_with_kv_cache", needs)
        self._masks: dict[tuple[int, torch.device], Tensor] = {}

    def ready(self, step: Any, device: torch.device) -> None:
        _servable(step.sequences, step.seq_lens)
        if step.max_seqlen_q > 1:
            self._mask(step.max_seqlen_q, device)

    def planned(self, step: Any, memory: _Memory) -> dict[str, Any] | None:
        plain = self.factor is None and not memory.blind and step.max_seqlen_q == 1 and step.tokens == step.sequences
        if not (plain and step.sequences and step.page_table.shape[1] and step.max_seqlen_k):
            return None
        return {
            **self.fixed,
            "workspace_buffer": memory.workspace,
            "block_tables": step.page_table.contiguous(),
            "seq_lens": step.seq_lens,
            "max_seq_len": step.max_seqlen_k,
        }

    def run(self, given: dict[str, Any], tables: PagedTables, memory: _Memory | None) -> tuple[Tensor, Tensor | None]:
        query, longest = given["query"].contiguous(), tables.max_seqlen_q
        _servable(tables.seq_lens.shape[0], query)
        given |= {"query": query, "kv_cache": _in_rows(given["kv_cache"])}
        drafts: dict[str, Any] = {}
        if not _uniform(tables, query):
            # Packed queries are drafts to it, also where no sequence has two.
            longest = max(longest, 2)
            token = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
            starts = tables.cu_seqlens_q
            row = token - starts[sequence_ids(query.shape[0], starts)]
            # Not every version of torch indexes unsigned numbers on a GPU.
            mask = self._mask(longest, query.device).view(torch.int16)[row].view(torch.uint16)
            drafts = {"q_len_per_req": longest, "mask": mask, "q_cu_seq_lens": starts}
        elif longest > 1:
            mask = self._mask(longest, query.device).expand(tables.seq_lens.shape[0], -1, -1).contiguous()
            drafts = {"q_len_per_req": longest, "mask": mask}
            # It makes an axis of the drafts, and wants it in `out` too.
            given["out"] = None
        group = filled = self.request.group
        if longest > 1 and "sinks" in given and longest * group > TILE:
            # The head of a sink is the row in its tile, modulo the group: true where groups divide a tile.
            filled = 1 << (group - 1).bit_length()
        if filled != group:
            query, sinks = _filled(query, 1, group, filled), _filled(given["sinks"], 0, group, filled)
            given |= {"query": query, "sinks": sinks, "out": None}
        if longest > 1:
            given["workspace_buffer"] = self._roomy(given["workspace_buffer"], tables, longest * filled)
        with devices.current_for(query):
            found: Tensor = self.decode(max_seq_len=tables.max_seqlen_k, **drafts, **given)
        found = found if longest == 1 else found.flatten(0, -3)
        return found if filled == group else found.unflatten(1, (-1, filled))[:, :, :group].flatten(1, 2), None

    def _roomy(self, workspace: Tensor, tables: PagedTables, rows: int) -> Tensor:
        """`workspace`, or a larger one where so many rows of drafts need it."""
        r, lens = self.request, tables.seq_lens
        wanted = SEMAPHORES + scratch_bytes(lens.shape[0], r.kv_heads, rows, r.head_dim, _processors(lens.device))
        return workspace if wanted <= workspace.numel() else workspace_of(lens.device, wanted)

    def _mask(self, drafts: int, device: torch.device) -> Tensor:
        """`drafts_mask`, kept; one that is made while a graph is recorded belongs to that graph."""
        key = (drafts, device)
        if key in self._masks:
            return self._masks[key]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return drafts_mask(drafts, self.causal, device)
        # Copied, which waits: the next call may come on another stream.
        made = self._masks[key] = drafts_mask(drafts, self.causal, torch.device("cpu")).to(device)
        return made


def drafts_mask(drafts: int, causal: bool, device: torch.device) -> Tensor:
    """uint16 [drafts, 2 * ceil(drafts / 32)]: of each draft a bit for each draft that it sees, the first in the lowest
    bit. Made on the device, so that it may be recorded."""
    words = -(-drafts // 32) * 2
    column = torch.arange(16 * words, dtype=torch.int32, device=device)
    row = torch.arange(drafts, dtype=torch.int32, device=device)[:, None]
    seen = (column < drafts) & (row >= (column if causal else 0))
    bits = seen.expand(drafts, -1).int().view(drafts, words, 16) << column[:16]
    return bits.sum(-1, dtype=torch.int32).to(torch.uint16)


def _filled(heads: Tensor, axis: int, group: int, filled: int) -> Tensor:
    """`heads`, [H_q] at `axis`, with groups of `filled` heads: the further ones are zeros."""
    further = (0, 0) * (heads.ndim - axis - 1) + (0, filled - group)
    return torch.nn.functional.pad(heads.unflatten(axis, (-1, group)), further).flatten(axis, axis + 1)


def _in_rows(caches: Sequence[Tensor]) -> Sequence[Tensor]:
    """Caches as XQA finds its way in them: by the keys' strides alone, in whole rows. Others it reads wrong."""
    key, value = caches
    if key.is_contiguous() and value.is_contiguous():
        return caches
    if key.stride() == value.stride() and not any(stride % key.shape[-1] for stride in key.stride()[:-1]):
        return caches
    return key.contiguous(), value.contiguous()


class _Memory:
    """What a session keeps: memory that no other session sees, and whether some query of the step sees nothing."""

    def __init__(self, call: _Call, slot: Slot) -> None:
        self.workspace = slot.workspace("trtllm", WORKSPACE).zero_()
        self.counters = counters(slot.workspace, slot.max_sequences, call.request.heads, processors(slot.device))
        self.blind = False


class _Session:
    """`polyattn.contract.Session`."""

    def __init__(self, call: _Call, slot: Slot) -> None:
        self._call, self._recorded, self._memory = call, slot.recorded, _Memory(call, slot)
        self._places, self._device = Places.of(call.request, slot), slot.device
        self._table: Tensor | None = None
        self._planned: dict[str, Any] | None = None
        self.forward: Callable[..., Any] = self._reading if self._places is None else self._writing

    def plan(self, step: Any) -> None:
        # Of recorded steps only padding sees nothing, and its rows have no meaning.
        self._memory.blind = not self._recorded and 0 in step.listed("seq_lens")
        self._call.ready(step, self._device)

    def prepare(self, step: Any) -> None:
        # The kernels read the step's own tensors.
        self._table, self._planned = step.page_table, self._call.planned(step, self._memory)
        if self._places is not None:
            self._places.take(step)

    def _reading(self, query: Tensor, *caches: Tensor, tables: PagedTables, **given: Any) -> Any:
        planned = self._planned
        whole = query.is_contiguous() and not query.data_ptr() & 15
        # `devices.is_current`, of which the call alone would be a good part of what is spent here.
        here = (index := query.get_device()) < 0 or index == devices.current_device()
        # With the tables of a step and nothing beside, whole queries go straight to the library.
        if here and whole and planned is not None and not given and tables.page_table is self._table:
            return self._call.decode(query=query, kv_cache=_in_rows(caches), **planned)
        return self._call.forward(query, *caches, tables=tables, memory=self._memory, **given)

    def _writing(
        self, query: Tensor, *caches: Tensor, key: Tensor | None = None, value: Tensor | None = None, **given: Any
    ) -> Any:
        if self._places is not None:
            self._places.write(caches, (key, value), (given.get("k_scale"), given.get("v_scale")))
            key = value = None
        return self._call.forward(query, *caches, key=key, value=value, memory=self._memory, **given)
