"""Family `mla` by FlashMLA: its dense kernel over rows of bfloat16 and float16 (Hopper), its sparse one over FP8 rows.

Both take sequences of equally many queries, causal from the lower right corner, and return the natural-log LSE
[N, H_q, S_q], +inf for a query without keys. The sparse kernel reads the rows of 656 bytes that it is given the numbers
of, 64 at a time: here all that a query may see.

A schedule is made by the first call that is given it, from the lengths of that call, and holds for them only: one per
step, made anew where the step is recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyattn.adapters import load
from polyattn.backends.gathering import deliver, nothing
from polyattn.contract import Bound, Slot
from polyattn.packing import owners
from polyattn.placement import placed
from polyattn.records import AttentionRequest, Requirement
from polyattn.signature import capturing

from .records.serving import FLASH_MLA, PAGE, SGL_FLASH_MLA, VLLM_FLASH_MLA

__all__ = ["FlashMLA", "SglFlashMLA", "VllmFlashMLA"]

_NEEDS = {
    **dict.fromkeys(("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v"), "decoding"),
    **dict.fromkeys(("tile_scheduler_metadata", "softmax_scale", "causal"), "decoding"),
    **dict.fromkeys(("is_fp8_kvcache", "indices"), "a cache of FP8 rows"),
}


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
    def of(cls, query: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> _Rows:
        ends = cu_seqlens_q[1:]
        if query.shape[0] == ends.shape[0] * max_seqlen_q:
            return cls(max_seqlen_q)
        first = ends - max_seqlen_q
        source = first[:, None] + torch.arange(max_seqlen_q, device=query.device)
        token = torch.arange(query.shape[0], device=query.device, dtype=ends.dtype)
        sequence = owners(query.shape[0], cu_seqlens_q)
        return cls(max_seqlen_q, source.clamp(min=0), sequence, (token - first[sequence]).long())

    def padded(self, packed: Tensor) -> Tensor:
        """[T_q, ...] as [N, count, ...]; rows filled up hold any query."""
        return torch.unflatten(packed, 0, (-1, self.count)) if self.source is None else packed[self.source]

    def packed(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1) if self.row is None else padded[self.sequence, self.row]


@dataclasses.dataclass(frozen=True)
class _Step:
    """What the layers of a step share. indices: int32 [N, rows, keys], places of FP8 rows in the cache, -1 = none."""

    rows: _Rows
    schedule: Any
    indices: Tensor | None


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
        *,
        page_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> _Step:
        rows = _Rows.of(query, cu_seqlens_q, max_seqlen_q)
        indices = None
        if self._rows_of_bytes:
            indices = _places(page_table, seq_lens, rows.count, max_seqlen_k, causal=self._causal)
        return _Step(rows, self._new_schedule()[0], indices)

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        attn_mask: None = None,
        out: Tensor | None = None,
        step: _Step | None = None,
        **tables: Any,
    ) -> Any:
        """A `contract.MLAForward`. step: of the session, None = of this call alone."""
        request = self._request
        if not (query.shape[0] and tables["max_seqlen_k"]):
            return nothing(request, query, out)
        if step is None:
            step = self.step(query, **tables)
        signed = query if self._sign is None else query * self._sign
        result, lse = self._attend(step, placed(step.rows.padded(signed)), cache.unsqueeze(2), **tables)
        result = step.rows.packed(result)
        if not request.lse:
            return deliver(request, result, None, None, out)
        lse = step.rows.packed(lse.transpose(1, 2))
        return deliver(request, result, lse.masked_fill(lse == torch.inf, -torch.inf), None, out)

    def _attend(
        self, step: _Step, query: Tensor, cache: Tensor, *, page_table: Tensor, seq_lens: Tensor, **tables: Any
    ) -> tuple[Tensor, Tensor]:
        if step.indices is None:
            keys: dict[str, Any] = {"block_table": page_table, "cache_seqlens": seq_lens, "causal": self._causal}
        else:
            keys = {"block_table": None, "cache_seqlens": None, "indices": step.indices}
        found: tuple[Tensor, Tensor] = self._kernel(
            q=query,
            k_cache=cache,
            head_dim_v=self._request.dims[1],
            tile_scheduler_metadata=step.schedule,
            softmax_scale=self._scale,
            is_fp8_kvcache=self._rows_of_bytes,
            **keys,
            **self._kernels,
        )
        return found


def _places(page_table: Tensor, seq_lens: Tensor, rows: int, max_seqlen_k: int, *, causal: bool) -> Tensor:
    """int32 [N, rows, keys], the places of the keys that each query sees, -1 from its last one on; keys: `max_seqlen_k`
    up to a whole page, as many as the kernel reads at a time."""
    pages = page_table[:, : -(-max_seqlen_k // PAGE)]
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
        self._step: _Step | None = None
        self._in_graph = False

    def plan(self, step: Any) -> None:
        """Nothing to do on the host: the kernel plans on the device."""

    def prepare(self, step: Any) -> None:
        """Forget the step before. The first layer makes what this one needs, so that a recording holds it."""
        self._step = None

    def forward(
        self, query: Tensor, cache: Tensor, *, attn_mask: None = None, out: Tensor | None = None, **tables: Any
    ) -> Any:
        """A `contract.MLAForward` of the step."""
        in_graph = self._recorded and capturing(query.device.type)
        if (self._step is None or in_graph is not self._in_graph) and query.shape[0] and tables["max_seqlen_k"]:
            self._step, self._in_graph = self._attention.step(query, **tables), in_graph
        return self._attention(query, cache, out=out, step=self._step, **tables)
