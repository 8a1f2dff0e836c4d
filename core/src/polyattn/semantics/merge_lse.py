"""Merging partial attention results by their LSE: the algebra under ring, cascade, chunked prefix and tree verify.

A partial is (out, lse) of the same queries over some of the keys. With L = log(sum_i exp(lse_i)),

    out = sum_i exp(lse_i - L) * out_i,    lse = L

is the result over all keys (FlashInfer, arXiv 2501.01005, section 2.2). The operation is associative and
commutative; its identity is an empty partial, lse = -inf. Numbers S5 to S7 refer to docs/semantics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..contract.scalars import shown
from ..errors import InvalidInputError, did_you_mean
from .validation import check_plain

__all__ = ["merge", "merge_rows", "merge_shares"]

_HEAD_AXIS = {"BSHD": -2, "THD": -2, "BHSD": -3}
"""Where H is in an output."""


def merge(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    sinks: Tensor | None = None,
    layout: Literal["BSHD", "BHSD", "THD"] = "BSHD",
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint sets of keys into the result over all of them.

    Sinks belong to the whole, not to a part: compute every part without them and give them to the *last* merge. A part
    that already contains its sink cannot be told from its tensors, and merging it counts the sink more than once.
    Keep the (out, lse) of a merge without sinks for as long as more parts may come.

    Gradients flow through both out and lse. Most kernels return an LSE without a gradient; merging it would drop the
    part of the gradient that goes through the weights, often half of it, without a sign. So while gradients are
    recorded, an out that requires a gradient must come with an lse that does. To merge without gradients, work under
    `torch.no_grad()` or detach the outs too.

    Args:
        outs: partial outputs of one shape: [B, S, H, D_v] (BSHD), [B, H, S, D_v] (BHSD) or [T, H, D_v] (THD, which
            the default accepts too). Where lse is -inf the out is not read.
        lses: their LSEs, shaped like the outs without the last axis; float32 or float64, natural log, without sink.
        sinks: natural-log logits, applied once, after the merge: [H], or one for each row and head, shaped like an lse.
            Of one part, `merge([out], [lse], sinks=...)` gives attention its sinks: those of rows, which no call takes.
        layout: where the heads are.

    Returns:
        (out, lse): out in the dtype of outs[0]; lse float32 (float64 if an input is), without the sink. Where every
        part is empty, out = 0, lse = -inf and all gradients are zero (S7). The arithmetic is that of lse.

    Raises:
        InvalidInputError: no partials, what is no dense tensor, shapes, dtypes or devices that do not fit, or a
            detached LSE (see above).
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    _check(outs, lses, sinks, layout)
    wide = any(t.dtype == torch.float64 for t in (*outs, *lses))
    dtype = torch.float64 if wide else torch.float32
    parts = [lse.to(dtype) for lse in lses]

    # As in the definition (reference.py): the maximum carries no gradient, and rows that are empty everywhere get 0
    # and 1 in place of -inf and 0 so that no intermediate is infinite.
    top = torch.stack([lse.detach() for lse in parts]).amax(0)
    empty = top == float("-inf")
    top = top.masked_fill(empty, 0.0)
    weights = [torch.exp(lse - top) for lse in parts]
    total = torch.stack(weights).sum(0).masked_fill(empty, 1.0)
    lse = top + torch.log(total)
    share = 1.0 / total
    if sinks is not None:
        # By its logarithm: the gradient of sigmoid, s (1 - s), loses its digits where a sink is far below.
        share = share * torch.exp(logsigmoid(lse - _along_heads(sinks.to(dtype), layout)))

    merged = torch.zeros_like(outs[0], dtype=dtype)
    for out, weight, part in zip(outs, weights, parts, strict=True):
        seen = (part != float("-inf")).unsqueeze(-1)
        merged = merged + torch.where(seen, out.to(dtype), 0.0) * (weight * share).unsqueeze(-1)
    return merged.to(outs[0].dtype), lse.masked_fill(empty, float("-inf"))


def merge_shares(lses: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The share of each part in the merged result, and its LSE; no gradient.

    With outs that are 0 wherever their lse is -inf, as those of calls are (S7), `merge` is their sum by these: two
    passes over memory for two parts, which may have any dtype.

    Args:
        lses: of the parts, as `merge`.
    """
    total = lses[0]
    for lse in lses[1:]:
        total = torch.logaddexp(total, lse)
    base = total.masked_fill(total == float("-inf"), 0.0)
    return [torch.exp(lse - base) for lse in lses], total


def merge_rows(out: Tensor, lse: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Merge partial results of which each row may have another number, as packed calls give them.

    Args:
        out: [P, D_v]. lse: [P], float32 or float64, as `merge`. rows: int64 [P], the row that each part belongs to.
        count: of rows.

    Returns:
        (out [count, D_v] in its dtype, lse [count] in its own). Rows without a part, or with empty ones only, are 0 and
        -inf. Sums are taken in no fixed order on a device.

    Raises:
        InvalidInputError: as `merge`.
    """
    _check_part(0, out, lse, out)
    top = lse.new_full((count,), float("-inf")).scatter_reduce(0, rows, lse.detach(), "amax")
    empty = top == float("-inf")
    top = top.masked_fill(empty, 0.0)
    weights = torch.exp(lse - top.index_select(0, rows))
    total = torch.zeros_like(top).index_add(0, rows, weights).masked_fill(empty, 1.0)
    seen = torch.where((lse == float("-inf"))[:, None], 0.0, out.to(lse.dtype))
    merged = lse.new_zeros(count, out.shape[-1]).index_add(0, rows, seen * weights[:, None]) / total[:, None]
    return merged.to(out.dtype), (top + torch.log(total)).masked_fill(empty, float("-inf"))


def _parts(name: str, given: Any) -> tuple[Tensor, ...]:
    """Partial results as a tuple; one tensor is taken apart along its first axis."""
    if isinstance(given, Tensor):
        check_plain(name, given)
    try:
        parts = tuple(given)
    except TypeError as exc:
        raise InvalidInputError(
            f"{name} is {shown(given)}; a sequence of tensors is needed, one for each part"
        ) from exc
    for i, part in enumerate(parts):
        _tensor(f"{name}[{i}]", part)
    return parts


def _tensor(name: str, given: Any) -> None:
    if not isinstance(given, Tensor):
        step = f"torch.as_tensor({name})" if type(given).__module__ == "numpy" else "a torch tensor"
        raise InvalidInputError(f"{name} is a {type(given).__name__}, a tensor is needed: pass {step}")
    check_plain(name, given)


def _along_heads(sinks: Tensor, layout: str) -> Tensor:
    """[H] made to broadcast against an lse; those of rows are as they are."""
    return sinks.unsqueeze(-1) if layout == "BHSD" and sinks.dim() == 1 else sinks


def _check(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...], sinks: Tensor | None, layout: str) -> None:
    if not isinstance(layout, str) or layout not in _HEAD_AXIS:
        known = ", ".join(_HEAD_AXIS)
        raise InvalidInputError(f"layout={shown(layout)} is not one of {known}.{did_you_mean(str(layout), _HEAD_AXIS)}")
    if not outs:
        raise InvalidInputError("merge got no partial results; pass at least one out and its lse")
    if len(outs) != len(lses):
        raise InvalidInputError(f"merge got {len(outs)} outs and {len(lses)} lses; pass one lse for each out")
    first = outs[0]
    least = 3 if layout == "BHSD" else 2
    if first.dim() < least:
        raise InvalidInputError(
            f"outs[0] has shape {list(first.shape)}; layout {layout} needs at least {least} axes, the heads and D_v "
            "among them"
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        _check_part(i, out, lse, first)
    if sinks is not None:
        _tensor("sinks", sinks)
        heads = first.shape[_HEAD_AXIS[layout]]
        if tuple(sinks.shape) not in ((heads,), tuple(first.shape[:-1])):
            raise InvalidInputError(
                f"sinks has shape {list(sinks.shape)}; outs have {heads} heads in layout {layout}: pass [{heads}], one "
                f"for each row, {list(first.shape[:-1])}, or the layout the outs really have"
            )
        if not sinks.is_floating_point():
            raise InvalidInputError(f"sinks has dtype {sinks.dtype}; sinks are natural-log logits: pass a float dtype")
        if sinks.device != first.device:
            raise InvalidInputError(f"sinks is on {sinks.device}, outs[0] on {first.device}; move them together")


def _check_part(i: int, out: Tensor, lse: Tensor, first: Tensor) -> None:
    if out.shape != first.shape:
        raise InvalidInputError(
            f"outs[{i}] has shape {list(out.shape)}, outs[0] {list(first.shape)}; partial results of the same queries "
            "have one shape"
        )
    if lse.shape != out.shape[:-1]:
        raise InvalidInputError(
            f"lses[{i}] has shape {list(lse.shape)}; it must be {list(out.shape[:-1])}, the shape of outs[{i}] without "
            "its last axis (transpose an LSE that a kernel returns heads-first)"
        )
    if not out.is_floating_point():
        raise InvalidInputError(f"outs[{i}] has dtype {out.dtype}; pass float outputs")
    if lse.dtype not in (torch.float32, torch.float64):
        raise InvalidInputError(
            f"lses[{i}] has dtype {lse.dtype}; an LSE is float32 or float64 (a narrower one has lost the weights): ask "
            "the kernel for float32"
        )
    if out.device != first.device or lse.device != first.device:
        raise InvalidInputError(
            f"outs[{i}] is on {out.device}, lses[{i}] on {lse.device}, outs[0] on {first.device}; move them together"
        )
    if torch.is_grad_enabled() and out.requires_grad and not lse.requires_grad:
        raise InvalidInputError(
            f"outs[{i}] requires a gradient but lses[{i}] does not: its gradient through the merge weights would be "
            "lost. Use a backend whose LSE is differentiable for the parts (the reference is), or merge under "
            "torch.no_grad() / detach the outs if no gradient is wanted"
        )
