"""The serving side of FlashInfer's wrappers: one plan for all layers of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from polyattn.adapters import empty_result
from polyattn.contract import AttentionRequest, Slot

from .lengths import Lengths
from .saving import Places
from .workbench import Workbench

__all__ = ["PlannedSession", "Planner"]


class Planner(Protocol):
    """What a family's adapter does for a session."""

    request: AttentionRequest
    tables: tuple[str, ...]
    """Of a step, those that recorded steps read and that a plan may leave to `prepare`."""

    def plan_step(
        self, bench: Workbench, lens: Lengths, pages: Tensor, nbytes: int, step: Any, fixed: dict[str, Tensor] | None
    ) -> tuple[Any, Tensor | None]:
        """A planned wrapper, and the queries that see a key or None = all."""
        ...

    def run_step(
        self,
        wrapper: Any,
        alive: Tensor | None,
        query: Tensor,
        caches: tuple[Tensor, ...],
        out: Tensor | None,
        given: Mapping[str, Any],
    ) -> Any:
        """A layer of a planned step. given: tensors and tables."""
        ...

    @property
    def forward(self) -> Callable[..., Any]:
        """The family's forward, for calls that plan for themselves."""


class PlannedSession:
    """`polyattn.contract.Session`. It plans from the host's lengths, so that nothing waits for the device; the list of
    pages, which only the kernels read, is filled when the step is prepared.

    Args:
        nbytes: of the workspace. mask_bytes: of the packed masks of a recorded step, 0 = none.
    """

    def __init__(self, planner: Planner, slot: Slot, nbytes: int, mask_bytes: int = 0) -> None:
        self._planner, self._nbytes, self._recorded = planner, nbytes, slot.recorded
        self._bench = bench = Workbench.of(slot)
        bench.workspace(nbytes)
        N = slot.max_sequences
        self._fixed: dict[str, Tensor] | None = None
        if slot.recorded:
            counts = {"cu_seqlens_q": N + 1, "kv_indptr": N + 1, "seq_lens": N, "last_page_len": N}
            self._fixed = {name: bench.indices(name, count) for name, count in counts.items()}
            self._fixed["pages"] = bench.indices("pages", N * slot.max_pages)
            if mask_bytes:
                self._fixed["mask"] = slot.workspace("flashinfer mask", mask_bytes)
                self._fixed["mask_indptr"] = bench.indices("mask_indptr", N + 1)
        self._places = Places.of(planner.request, slot)
        self._wrapper: Any = None
        self._alive: Tensor | None = None

    def plan(self, step: Any) -> None:
        lens = Lengths.of(step)
        self._wrapper = self._alive = None
        if not step.tokens or not (lens.pages or self._recorded):
            return
        # Memory of the step, which nothing may take while a graph is recorded.
        pages = step.kv_indices
        if self._fixed is not None:
            pages = self._fixed["pages"][: lens.pages]
            for name in self._planner.tables:
                getattr(step, name)
        planned = self._planner.plan_step(self._bench, lens, pages, self._nbytes, step, self._fixed)
        self._wrapper, self._alive = planned

    def prepare(self, step: Any) -> None:
        if self._wrapper is not None and self._fixed is not None:
            fixed = self._fixed["pages"]
            pages = step.kv_indices[: fixed.shape[0]]
            fixed[: pages.shape[0]].copy_(pages)
            for name in self._planner.tables:
                self._fixed[name].copy_(getattr(step, name))
        if self._places is not None:
            self._places.take(step)

    def forward(
        self,
        query: Tensor,
        *caches: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        out: Tensor | None = None,
        **given: Any,
    ) -> Any:
        if key is not None:
            if self._places is None:
                # Rows that the cache is not to hold: this call reads other pages than those that were planned.
                return self._planner.forward(query, *caches, key=key, value=value, out=out, **given)
            self._places.write(caches, (key, value), (given.get("k_scale"), given.get("v_scale")))
        if self._wrapper is None:
            return empty_result(self._planner.request, query, out)
        return self._planner.run_step(self._wrapper, self._alive, query, caches, out, given)
