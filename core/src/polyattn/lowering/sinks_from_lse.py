"""`sinks_from_lse`: sinks by a kernel that knows none, from its LSE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SinksFromLSE"]


class SinksFromLSE(Lowering):
    """A sink s makes the denominator exp(lse) + exp(s): the output is that without it times sigmoid(lse - s) (S5)."""

    name = "sinks_from_lse"
    summary = "the output is scaled by sigmoid(lse - sink)"
    fields = frozenset({"sinks", "grad"})  # a gradient of the sinks is asked of nobody then

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.sinks and request.family in ("dense", "varlen", "paged"):
            grad = tuple(name for name in request.grad if name not in ("sinks", "lse"))
            # The LSE depends on Q, K and the mask: their gradients flow through it too.
            if grad and ("lse" in request.grad or not {"query", "key", "mask"}.isdisjoint(grad)):
                grad = (*grad, "lse")
            yield Rewrite((changed(request, sinks=False, lse=True, grad=grad),), 2.0)

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch
        from torch.nn.functional import logsigmoid

        kernel = inner[0]
        # With gradients of the sinks alone nothing flows into the kernel: autograd does the rest.
        backward = kernel.backward if rewrite.inner[0].grad else None
        keep = request.lse or (backward is not None and bool(request.grad))
        heads_second = request.layout == "BHSD"

        def forward(*tensors: Tensor, sinks: Tensor, out: Tensor | None = None, **given: Any) -> Any:
            plain, lse = kernel.forward(*tensors, **given)
            sink = sinks.to(lse.dtype)
            # A row without keys has out = 0 whatever its share is; -inf would meet a sink of -inf and give NaN.
            finite = lse.masked_fill(lse == float("-inf"), 0.0)
            # By its logarithm: the gradient of sigmoid, s (1 - s), loses its digits where a sink is far below.
            share = torch.exp(logsigmoid(finite - (sink.unsqueeze(-1) if heads_second else sink)))
            result = (plain * share.unsqueeze(-1)).to(plain.dtype)
            result = result if out is None else out.copy_(result)
            return (result, lse) if keep else result

        # The kernel's own backward takes the substituted (out, lse) as it is (see polyattn.semantics.autograd).
        return Bound(forward, backward, kernel.traceable)
