"""This module has what rewrites of lengths share: wrappers made at each call, masks, sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from ..contract import AttentionRequest, Bound
from ..contract.request import SRelation
from ..errors import UnsupportedRequestError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "RELATIONS",
    "check_size",
    "combined",
    "longer",
    "of_one_kind",
    "per_call",
    "position_axis",
    "with_mask",
]

RELATIONS: tuple[SRelation, ...] = get_args(SRelation)

_LARGE = 2**31


def position_axis(layout: str) -> int:
    """Return where S is in a dense tensor, and in its LSE."""
    return 1 if layout == "BSHD" else 2


def per_call(kernels: Sequence[Bound], around: Callable[[Tensor, Tensor, Mapping[str, Any]], Bound]) -> Bound:
    """Kernels wrapped anew at every call, for rewrites that depend on lengths.

    Args:
        kernels: all that may be called, of one kind.
        around: the one to call, wrapped, for a query, a key and the keyword arguments.
    """
    traceable = all(kernel.traceable for kernel in kernels)

    def forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        return around(q, k, given).forward(q, k, v, **given)

    if kernels[0].backward is None:
        return Bound(forward, traceable=traceable)

    def backward(dout: Tensor, q: Tensor, k: Tensor, *rest: Tensor, **given: Any) -> Any:
        gradients: Any = around(q, k, given).backward
        return gradients(dout, q, k, *rest, **given)

    return Bound(forward, backward, traceable)


def of_one_kind(inner: Sequence[Bound], requests: Sequence[AttentionRequest]) -> Sequence[Bound]:
    """The same kernels; where only some of them bring a backward, autograd goes through all of them."""
    if len({bound.backward is None for bound in inner}) == 1:
        return inner
    from ..semantics.autograd import differentiable

    kernels = []
    for bound, request in zip(inner, requests, strict=True):
        if bound.backward is not None:
            heads = 2 if request.layout == "BSHD" else 1
            forward = differentiable(bound, request.lse, heads) if request.grad else bound.forward
            bound = Bound(forward)
        kernels.append(bound)
    return kernels


def longer(tensor: Tensor, axis: int, *, front: int = 0, back: int = 0, value: float = 0.0) -> Tensor:
    """`tensor` with more entries along `axis`."""
    import torch.nn.functional as F

    # Padding may keep an order of axes in which the last one is not dense.
    return F.pad(tensor, (*[0, 0] * (tensor.ndim - 1 - axis), front, back), value=value).contiguous()


def combined(attn_mask: Tensor | None, seen: Tensor | None) -> Tensor | None:
    """The caller's mask together with a bool one [S_q, S_k] or [N, 1, S_q, S_k]: additive if the caller's is."""
    import torch

    if attn_mask is None:
        return seen if seen is None or seen.ndim == 4 else seen[None, None]
    if seen is None:
        return attn_mask
    return attn_mask & seen if attn_mask.dtype == torch.bool else torch.where(seen, attn_mask, -math.inf)


def with_mask(change: Callable[[Tensor], Tensor]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Keyword arguments of a kernel with `change` applied to attn_mask, where there is one."""

    def changed(given: Mapping[str, Any]) -> Mapping[str, Any]:
        mask = given.get("attn_mask")
        return given if mask is None else {**given, "attn_mask": change(mask)}

    return changed


def check_size(request: AttentionRequest, what: str, numel: int) -> None:
    """Refuse a tensor that the kernel was not chosen for: sizes are not known when the rewrite is planned.

    Raises:
        UnsupportedRequestError: it has 2**31 elements or more, and no tensor of the request has.
    """
    if numel >= _LARGE and not request.large:
        raise UnsupportedRequestError(
            f"{what} makes a tensor of {numel} elements, and the kernel was chosen for tensors below 2**31. Split the "
            "batch, or name another backend for this call (`polyattn explain` shows them)"
        )
