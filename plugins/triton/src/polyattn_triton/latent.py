"""Family `mla` by the kernels of `kernels/latent.py`: decode, extend and verification over a latent cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Bound, InvalidInputError, KVPart, PagedTables, Slot
from polyattn_triton import runtime
from polyattn_triton.hopper import latent as hopper
from polyattn_triton.kernels import latent
from polyattn_triton.kernels.merge import merge

__all__ = ["Latent"]


class Latent:
    """Binds latent requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        def session(slot: Slot) -> _Session:
            return _Session(request, slot)

        return Bound(_Attention(request), session=session)


class _Attention:
    """The forward of one request."""

    def __init__(self, request: AttentionRequest) -> None:
        self._request, self._dtype = request, getattr(torch, request.dtype)
        self._width = request.dims[1]
        self._stored = request.kv_scales or ("" if request.kv_dtype == "auto" else request.kv_dtype)
        self._widths = (self._width, request.head_dim - self._width)
        self._scale = request.softmax_scale
        self.rule: dict[str, Any] = {
            "causal": request.causal != "none",
            "window": request.window,
            "chunk": request.chunk,
        }

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        tables: PagedTables,
        attn_mask: Tensor | None = None,
        kv_parts: Sequence[KVPart] = (),
        out: Tensor | None = None,
        planned: Planned | None = None,
    ) -> Any:
        """A `contract.MLAForward`. planned: what a session has for the call's own keys."""
        runtime.check_device(query.device)
        T, heads, _ = query.shape
        if out is None:
            out = query.new_empty(T, heads, self._width)
        lse = query.new_empty(T, heads, dtype=torch.float32) if self._request.lse else None
        given = {
            "attn_mask": attn_mask,
            "tree": self._request.tree,
            "rule": self.rule,
            "planned": planned,
            "tables": tables,
        }
        if T and not kv_parts:
            self._attend(query, cache, out, lse, **given)
        elif T:
            outs = query.new_empty(1 + len(kv_parts), T, heads, self._width, dtype=torch.float32)
            lses = query.new_empty(1 + len(kv_parts), T, heads, dtype=torch.float32)
            self._attend(query, cache, outs[0], lses[0], **given)
            for n, part in enumerate(kv_parts, 1):
                pool = cache if part.cache is None else part.cache
                # Positions across parts mean nothing (S9).
                self._attend(query, pool, outs[n], lses[n], rule={"causal": False}, tables=part.tables)
            merge(outs, lses, out=out, lse=lse)
        return out if lse is None else (out, lse)

    def launch(self, device: torch.device, sequences: int, max_seqlen_q: int, max_seqlen_k: int) -> latent.Launch:
        r = self._request
        plain = r.mask == "none" and r.window == (-1, -1) and not r.chunk
        return latent.launch_for(
            device,
            self._dtype,
            self._request.heads,
            self._widths,
            sequences,
            max_seqlen_q,
            max_seqlen_k,
            self._request.batch_invariant,
            additive=self._request.mask == "additive",
            stored=self._stored,
            own=plain and hopper.likely(device, self._dtype, self._widths, r.page_size, self._stored),
        )

    def _attend(
        self,
        query: Tensor,
        cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        *,
        rule: dict[str, Any],
        tables: PagedTables,
        planned: Planned | None = None,
        **given: Any,
    ) -> None:
        seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[1:5]
        sequences = seq_lens.shape[0]
        if planned is None:
            launch = self.launch(query.device, sequences, max_seqlen_q, max_seqlen_k)
            shares = query.new_empty(launch.numbers(sequences), dtype=torch.int32)
            if launch.parts:
                latent.plan(launch, seq_lens, cu_seqlens_q, **rule, out=shares)
            rows = launch.pieces(sequences)
            planned = Planned(launch, shares, query.new_empty(rows * (self._width + 1), dtype=torch.float32))
        launch, shares, memory = planned
        rows = launch.pieces(sequences)
        pieces = (memory[: rows * self._width], memory[rows * self._width :])
        latent.attend(
            query,
            cache,
            tables=tables,
            scale=self._scale,
            out=out,
            lse=lse,
            launch=launch,
            shares=shares,
            pieces=pieces,
            **rule,
            **given,
        )


class Planned(NamedTuple):
    """What is launched, how the keys are dealt out (int32), and memory for pieces (float32)."""

    launch: latent.Launch
    shares: Tensor
    memory: Tensor


class _Session:
    """The serving side in one slot: the keys of a step are dealt out once for all layers."""

    def __init__(self, request: AttentionRequest, slot: Slot) -> None:
        self._attention, self._slot = _Attention(request), slot
        self._page_size = request.page_size
        pieces, numbers = latent.most(
            slot.device, request.heads, slot.max_sequences, slot.max_tokens, request.batch_invariant
        )
        self._memory = slot.workspace("pieces", 4 * pieces * (request.dims[1] + 1)).view(torch.float32)
        self._shares = slot.workspace("shares", 4 * max(numbers, 1)).view(torch.int32)
        self._launch: latent.Launch | None = None

    def plan(self, step: Any) -> None:
        """Choose the launch. What is recorded is that of the first step, and holds for any length."""
        if self._launch is None or not self._slot.recorded:
            longest = self._slot.max_pages * self._page_size if self._slot.recorded else step.max_seqlen_k
            self._launch = self._attention.launch(self._slot.device, step.sequences, step.max_seqlen_q, longest)

    def prepare(self, step: Any) -> None:
        """Deal out the keys."""
        if self._launch is not None and self._launch.parts:
            latent.plan(self._launch, step.seq_lens, step.cu_seqlens_q, **self._attention.rule, out=self._shares)

    def forward(self, *tensors: Tensor, **given: Any) -> Any:
        """A `contract.MLAForward` of the step."""
        if self._launch is None:
            raise InvalidInputError("forward() of a session follows plan() and prepare() of its step")
        return self._attention(*tensors, planned=Planned(self._launch, self._shares, self._memory), **given)
