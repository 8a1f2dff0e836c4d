"""Partial results of the same queries over disjoint keys, as one: cascades, shared prefixes, split KV (S6).

Floor: every partial is read once and the result written once. Of 64 requests with 32 heads of 128, two partials in
float32 are 2 MB, which is a launch and little more.
"""

from __future__ import annotations

from polyattn_triton.kernels import rules  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip
from torch import Tensor

from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import LOG2E, joined, natural_lse, share, share_with_sink
from polyattn_triton.runtime import device_of

__all__ = ["merge"]


@triton.jit(do_not_specialize=["rows", "parts", "heads", "l_part", "l_token", "l_head", "lse_token", "lse_head"])
def _merge(
    outs, lses, sinks, out, lse, rows, parts, heads, o_part, o_token, o_head, l_part, l_token, l_head,
    out_token, out_head, lse_token, lse_head, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    token, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    c = tl.arange(0, BLOCK_E)
    kept = valid[:, None] & (c < E)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_E), tl.float32)
    o_at = outs + (token * o_token + h * o_head)[:, None] + c[None, :]
    l_at = lses + token * l_token + h * l_head
    # The loads of several parts are on their way together.
    for _ in tl.range(0, parts, loop_unroll_factor=4):
        partial = tl.load(o_at, mask=kept, other=0.0).to(tl.float32)
        weight = tl.load(l_at, mask=valid, other=float("-inf")) * LOG2E
        o_at += o_part
        l_at += l_part
        acc, top, total = joined(acc, top, total, partial, weight)
    if lse is not None:
        tl.store(lse + token * lse_token + h * lse_head, natural_lse(top, total), mask=valid)
    if sinks is not None:
        acc *= share_with_sink(top, total, tl.load(sinks + h, mask=valid, other=0.0).to(tl.float32))[:, None]
    else:
        acc *= share(total)[:, None]
    at = out + (token * out_token + h * out_head)[:, None] + c[None, :]
    tl.store(at, cast(acc, out.dtype.element_ty), mask=kept)


def merge(outs: Tensor, lses: Tensor, *, sinks: Tensor | None = None, out: Tensor, lse: Tensor | None = None) -> None:
    """Merge partial results by their LSEs, in the order they come; `polyattn.merge` says what that is.

    Args:
        outs: [P, T, H, D], any float dtype. lses: float32 [P, T, H], natural logarithm, -inf for rows without keys.
        sinks: [H] natural logits, which count once.
        out: [T, H, D], written. lse: float32 [T, H], written: without sinks.
    """
    P, T, H, E = outs.shape
    if not T:
        return
    block = max(triton.next_power_of_2(E), 16)
    # Four numbers of each part for a thread: few rows in a program, and all loads of a row's parts are on their way.
    rows = max((65536 if rules.INTERPRETED else 256) // block, 1)
    with device_of(out):
        _merge[(triton.cdiv(T * H, rows),)](
            outs, lses, sinks, out, lse, T * H, P, H, *outs.stride()[:3], *lses.stride(), *out.stride()[:2],
            *((0, 0) if lse is None else lse.stride()), E=E, BLOCK_E=block, ROWS=rows, num_warps=2,
        )  # fmt: skip
