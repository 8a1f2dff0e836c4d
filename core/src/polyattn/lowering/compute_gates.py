"""`compute_gates`: raw gates, and rows of any length, by a kernel that takes computed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import CALL, Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ComputeGates"]


class ComputeGates(Lowering):
    """Computes log decays and betas in float32, and divides queries and keys by their lengths first (S10)."""

    name = "compute_gates"
    summary = "gates are computed, and rows of queries and keys normalised, before the call"
    fields = frozenset({"raw_gates", "beta_range", "qk_norm"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.family != "linear" or request.transform or not (request.raw_gates or request.qk_norm):
            return
        plain: dict[str, Any] = {"raw_gates": "", "beta_range": 1}
        # One at a time where a kernel has the other, so that it is spared what it can do itself.
        if request.raw_gates:
            yield Rewrite((changed(request, **plain),), CALL, detail="gates computed")
        if request.qk_norm:
            yield Rewrite((changed(request, qk_norm=False),), CALL, detail="rows of length 1")
        if request.raw_gates and request.qk_norm:
            both = changed(request, **plain, qk_norm=False)
            yield Rewrite((both,), 2 * CALL, detail="gates computed, rows of length 1")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from ..semantics.linear_gates import computed_gates
        from ..semantics.reference import unit_rows

        (kernel,) = rewrite.inner
        run, computes, norms = inner[0].forward, not kernel.raw_gates, request.qk_norm and not kernel.qk_norm

        def forward(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
            if norms:
                query, key = unit_rows(query), unit_rows(key)
            if request.raw_gates and computes:
                raw = {name: given.pop(name, None) for name in ("gate", "beta", "a_log", "dt_bias")}
                bound = given.pop("gate_bound", 0.0)
                given["gate"], given["beta"] = computed_gates(**raw, gate_bound=bound, beta_range=request.beta_range)
            return run(query, key, value, **given)

        return Bound(forward)
