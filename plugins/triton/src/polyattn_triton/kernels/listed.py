"""Latent attention to listed tokens: each query has its own list of rows, wherever in the pages they lie (DeepSeek
sparse attention).

A program has M heads of one token and a part of its list; parts are as many as fill the chip where tokens are few, and
`merge` puts them together. The bytes of a list's rows are read once for every M heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn.contract import PagedTables
from polyattn_triton import runtime  # first: it decides how Triton is imported

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip
from torch import Tensor  # isort: skip

from polyattn_triton.hopper import latent as hopper  # isort: skip
from polyattn_triton.kernels.cached import LATENT_GROUP, as_stored, numbers, scaled_parts  # isort: skip
from polyattn_triton.kernels.merge import merge  # isort: skip
from polyattn_triton.kernels.room import TOO_LARGE, smaller, too_large  # isort: skip
from polyattn_triton.kernels.rounding import cast  # isort: skip
from polyattn_triton.kernels.splits import power_of_2  # isort: skip
from polyattn_triton.records.tuned import LATENT  # isort: skip
from polyattn_triton.kernels.rules import accumulate, dot, logits, natural_lse, scales, share  # isort: skip

__all__ = ["attend", "parts_for"]

GROUP = tl.constexpr(LATENT_GROUP)
"""Numbers of an FP8 row that share a scale."""
LEAST = 128
"""Listed tokens of a part, at least."""


@triton.jit
def _rows(at, inside, WIDTH: tl.constexpr, D: tl.constexpr):
    """Columns [0, D) of the rows at these addresses, [N, WIDTH]; zeros where not `inside`."""
    c = tl.arange(0, WIDTH)
    return tl.load(at[:, None] + c[None, :], mask=inside[:, None] & (c < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["token_sequence", "table_row", "topk", "each"])
def _attend(
    query, cache, cache_scales, cache_rope, page_table, sequence_of, listed, out, lse,
    query_token, query_head, cache_page, scale_page, rope_page, table_row, listed_row,
    out_part, out_token, out_head, lse_part, topk, each, scale,
    HEADS: tl.constexpr, PAGE: tl.constexpr, D_C: tl.constexpr, D_R: tl.constexpr, ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr, ROPE_ROW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * M + tl.arange(0, M)
    part = tl.program_id(2)
    real = head < HEADS
    c = tl.arange(0, C)
    q_row = token * query_token + head * query_head
    latent = tl.load(query + q_row[:, None] + c[None, :], mask=real[:, None] & (c < D_C)[None, :], other=0.0)
    if D_R:
        x = tl.arange(0, R)
        rope = tl.load(query + (q_row + D_C)[:, None] + x[None, :], mask=real[:, None] & (x < D_R)[None, :], other=0.0)
    sequence = token if sequence_of is None else tl.load(sequence_of + token).to(tl.int64)
    table = page_table + sequence * table_row
    begin = part * each
    end = tl.minimum(begin + each, topk)

    acc = tl.zeros((M, C), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for first in tl.range(begin, end, N, num_stages=STAGES):
        n = first + tl.arange(0, N)
        place = tl.load(listed + token * listed_row + n, mask=n < end, other=-1)
        inside = place >= 0
        page = tl.load(table + place // PAGE, mask=inside, other=0).to(tl.int64)
        slot = tl.where(inside, place % PAGE, 0)
        raw = _rows(cache + page * cache_page + slot * ROW, inside, C, D_C)
        if FP8:
            factor = _rows(cache_scales + page * scale_page + slot * SCALE_ROW, inside, C // GROUP, C // GROUP)
            wide = numbers(raw, "fp8_e4m3", tl.float32).reshape(N, C // GROUP, GROUP) * factor[:, :, None]
            value = cast(wide.reshape(N, C), query.dtype.element_ty)
        else:
            value = raw
        products = dot(latent, value.T)
        if D_R:
            key = _rows(cache_rope + page * rope_page + slot * ROPE_ROW, inside, R, D_R)
            products += dot(rope, cast(key, query.dtype.element_ty).T)
        products = tl.where(inside[None, :], logits(products, scale, 0.0, False), float("-inf"))
        weights, factor_of, top, total = accumulate(top, total, products)
        acc = dot(cast(weights, value.dtype), value, acc * factor_of[:, None])

    acc = acc * share(total)[:, None]
    at = out + part * out_part + token * out_token
    tl.store(
        at + (head * out_head)[:, None] + c[None, :],
        cast(acc, out.dtype.element_ty),
        real[:, None] & (c < D_C)[None, :],
    )
    if lse is not None:
        tl.store(lse + part * lse_part + token * HEADS + head, natural_lse(top, total), real)


class Config(NamedTuple):
    """How a launch is made: heads of a program, listed tokens of a block, stages and warps."""

    heads: int
    keys: int = 32
    stages: int = 2
    warps: int = 8

    @classmethod
    def of(cls, heads: int) -> Config:
        some = _heads(heads)
        return cls(some, warps=8 if some == 64 else 4)


_SMALLER: dict[Any, Config] = {}
"""What fits a device where the usual configuration does not."""


def parts_for(device: torch.device, tokens: int, heads: int, topk: int) -> int:
    """Parts of a list: as many as give each processor work twice, of no fewer than LEAST tokens."""
    if not tokens or topk <= LEAST:
        return 1
    programs = tokens * triton.cdiv(heads, _heads(heads))
    return max(min(2 * runtime.processors(device) // programs, triton.cdiv(topk, LEAST)), 1)


def _heads(heads: int) -> int:
    """Heads of a program."""
    return min(max(triton.next_power_of_2(heads), 16), 64)


def attend(
    query: Tensor, cache: Tensor, token_indices: Tensor, *, tables: PagedTables, scale: float, out: Tensor,
    lse: Tensor | None, parts: int, config: Config | None = None,
) -> None:  # fmt: skip
    """Latent attention of each query to the tokens of its list.

    Args:
        query: [T_q, H_q, D_c + D_r], dense last axis.
        cache: [pages, page_size, D_c + D_r], or uint8 [pages, page_size, 656], FP8 rows (`semantics.kv_quant`).
        token_indices: int32 [T_q, topk], dense last axis, places in the query's sequence; -1 = none.
        tables: `polyattn.contract.PagedTables`. scale: of the products.
        out: [T_q, H_q, D_c], dense last axis. lse: float32 [T_q, H_q], contiguous. parts: of `parts_for`.
        config: None = the usual one.
    """
    (T, heads, width), d_c, topk = query.shape, out.shape[2], token_indices.shape[1]
    page_table, _, starts, longest = tables[:4]
    sequence_of = None
    if longest != 1 or page_table.shape[0] != T:
        tokens = torch.arange(T, dtype=torch.int32, device=query.device)
        sequence_of = torch.searchsorted(starts[1:], tokens, right=True, out_int32=True)
        sequence_of.clamp_(max=max(page_table.shape[0] - 1, 0))
    rows, factors, rope = cache[..., :d_c], cache, cache[..., d_c:]
    if cache.dtype == torch.uint8:
        rows, factors, rope = scaled_parts(cache, d_c)
        rows = as_stored(rows.view(torch.float8_e4m3fn), "fp8_e4m3")
    if config is None and scale > 0 and hopper.takes_listed(query, cache, out):
        fp8 = (factors, rope) if cache.dtype == torch.uint8 else None
        _on_hopper(query, rows if fp8 else cache, fp8, token_indices, page_table, sequence_of, scale, out, lse)
        return
    outs, lses = out[None], None if lse is None else lse[None]
    if parts > 1:
        outs = query.new_empty(parts, T, heads, d_c, dtype=torch.float32)
        lses = query.new_empty(parts, T, heads, dtype=torch.float32)
    shape = (query.dtype, cache.dtype, heads, width, d_c, query.device)
    config = config or _SMALLER.get(shape) or Config.of(heads)
    while True:
        some, keys, stages, warps = config
        each = triton.cdiv(triton.cdiv(topk, parts), keys) * keys
        try:
            with runtime.device_of(query):
                _attend[(T, triton.cdiv(heads, some), parts)](
                    query, rows, factors, rope, page_table, sequence_of, token_indices, outs, lses,
                    query.stride(0), query.stride(1), rows.stride(0), factors.stride(0), rope.stride(0),
                    page_table.stride(0), token_indices.stride(0), outs.stride(0), outs.stride(1), outs.stride(2),
                    0 if lses is None else lses.stride(0), topk, each, scales(scale, 0.0)[0],
                    HEADS=heads, PAGE=cache.shape[1], D_C=d_c, D_R=width - d_c, ROW=rows.stride(1),
                    SCALE_ROW=factors.stride(1), ROPE_ROW=rope.stride(1), M=some, N=keys, C=_power(d_c),
                    R=_power(width - d_c), FP8=cache.dtype == torch.uint8, STAGES=stages, num_warps=warps,
                )  # fmt: skip
            break
        except TOO_LARGE as error:
            less = smaller(config, (("heads", 16), ("keys", 16), ("stages", 1)))
            if less is None:
                asked = (str(query.dtype).removeprefix("torch."), d_c, width - d_c, some, False)
                raise too_large(LATENT, asked, query.device, error) from error
            config = _SMALLER[shape] = less
    if parts > 1 and lses is not None:
        merge(outs, lses, out=out, lse=lse)


def _on_hopper(
    query: Tensor, cache: Tensor, fp8: tuple[Tensor, Tensor] | None, token_indices: Tensor, page_table: Tensor,
    sequence_of: Tensor | None, scale: float, out: Tensor, lse: Tensor | None,
) -> None:  # fmt: skip
    """By the kernel for Hopper, whose pieces of a list are its own."""
    (T, heads, _), topk = query.shape, token_indices.shape[1]
    parts = hopper.listed_parts(query.device, T, heads, topk)
    outs, lses = out[None], None if lse is None else lse[None]
    if parts > 1:
        outs = query.new_empty(parts, T, heads, out.shape[2], dtype=torch.float32)
        lses = query.new_empty(parts, T, heads, dtype=torch.float32)
    with runtime.device_of(query):
        hopper.attend_listed(
            query, cache, fp8, page_table, sequence_of, token_indices, outs, lses, scales(scale, 0.0)[0]
        )
    if parts > 1 and lses is not None:
        merge(outs, lses, out=out, lse=lse)


def _power(width: int) -> int:
    """The width of a tile for rows of `width` numbers, 0 = there are none."""
    return max(power_of_2(width), 64) if width else 0
