"""Derivatives that one backward does not show: transforms, second ones, those of an input that changes before it.

What comes out is the reference's, in float64, or a typed error: of a changed input torch's own of versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..cases import Case

__all__ = ["CHANGED", "WAYS", "changed_before_backward", "derivable", "derived"]

_F = torch.func
_Loss = Callable[[Tensor], Tensor]


def _dual(loss: _Loss, query: Tensor) -> Tensor:
    forward: Any = forward_ad
    with forward.dual_level():
        tangent = forward.unpack_dual(loss(forward.make_dual(query, torch.ones_like(query)))).tangent
    return torch.full((), float("nan")) if tangent is None else tangent


def _second(loss: _Loss, query: Tensor) -> Tensor:
    query = query.detach().requires_grad_()
    (first,) = torch.autograd.grad(loss(query), query, create_graph=True)
    if not first.requires_grad:  # a derivative of 0, as of no keys
        return torch.zeros_like(query)
    (second,) = torch.autograd.grad(first.square().sum(), query, allow_unused=True)
    return torch.zeros_like(query) if second is None else second


WAYS: Mapping[str, Callable[[_Loss, Tensor], Tensor]] = {
    "vmap": lambda loss, query: _F.vmap(loss)(torch.stack([query, 2 * query])),
    "grad": lambda loss, query: _F.grad(loss)(query),
    "jvp": lambda loss, query: _F.jvp(loss, (query,), (torch.ones_like(query),))[1],
    "dual": _dual,
    "gradgrad": lambda loss, query: _F.grad(lambda q: _F.grad(loss)(q).square().sum())(query),
    "second": _second,
}
"""What is made of a loss and a query."""

CHANGED = "in-place"
"""The way that writes to an input between forward and backward."""


def derivable(case: Case) -> bool:
    """Return whether a call's derivatives are compared: of short calls that train, in float64."""
    request = case.request
    plain = case.storage == "contiguous" and not case.out and not case.far and not request.dropout
    plain = plain and case.mask_shape != "expanded"  # whose entries cannot be written to
    usual = request.family in ("dense", "varlen") and not request.zero_size and bool(case.lengths)
    return plain and usual and max(max(pair) for pair in case.lengths) <= 130


def changed_before_backward(call: Callable[..., Any], given: Mapping[str, Any]) -> Tensor:
    """The gradient of the query where the mask, or else the keys, are written to between forward and backward.

    Raises:
        RuntimeError: torch's, of versions.
    """
    query = given["query"].detach().requires_grad_()
    total = _total(call(**{**given, "query": query}))
    mask = given.get("attn_mask")
    with torch.no_grad():
        given["key"].mul_(-2) if mask is None else mask.logical_not_() if mask.dtype == torch.bool else mask.mul_(-2)
    found: Tensor = torch.autograd.grad(total, query)[0]
    return found


def _total(result: Any) -> Tensor:
    parts = result if isinstance(result, tuple) else (result,)
    # A row that sees no key has an LSE of -inf.
    total: Tensor = torch.stack([torch.where(part.isfinite(), part, 0.0).square().sum() for part in parts]).sum()
    return total


def derived(way: str, call: Callable[..., Any], given: Mapping[str, Any]) -> Tensor:
    """The result of `WAYS`, of the sum of squares of all that the call returns."""

    def loss(query: Tensor) -> Tensor:
        return _total(call(**{**given, "query": query}))

    return WAYS[way](loss, given["query"].detach()).detach()
