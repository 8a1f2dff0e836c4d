"""Latent decode on Hopper: the launcher of `latent_kernel.attend`, and what it takes."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.semantics.kv_quant import MLA_BYTES
from polyattn_triton import runtime
from polyattn_triton.hopper.forward import on_hopper
from polyattn_triton.kernels.cached import scaled_parts
from polyattn_triton.kernels.room import TOO_LARGE, too_large
from polyattn_triton.records.tuned import LATENT

__all__ = ["REGISTERS", "attend", "attend_listed", "likely", "listed_parts", "takes", "takes_listed"]

_WIDTHS, _BLOCK = (512, 64), 64
REGISTERS = 216
"""Of a consumer's thread; the producer has what is left."""
LISTED_REGISTERS = 208
"""Of lists, whose producer has to know where rows are."""
FP8_REGISTERS = 200
"""Of FP8 rows, which the producer converts."""


def likely(device: torch.device, dtype: torch.dtype, widths: tuple[int, int], page_size: int, stored: str) -> bool:
    """Whether `takes` may say so of tiles of 64 rows over such a cache, as its rows lie dense. `stored`: as
    `kernels.latent.stored_as`."""
    return (
        on_hopper(device)
        and dtype in (torch.bfloat16, torch.float16)
        and widths == _WIDTHS
        and (
            stored in ("fp8_e4m3", "block128")
            # Pages of at least 16 rows that fit into blocks, or blocks into them.
            or (not stored and (page_size % _BLOCK == 0 or (_BLOCK % page_size == 0 and page_size >= 16)))
        )
    )


def takes(query: Tensor, cache: Tensor, out: Tensor, rows: int, keys: int) -> bool:
    """Whether the kernel computes such tiles: plain causal or full attention over rows of 512 + 64, bfloat16 or float16
    as the queries, or FP8 (e4m3) with or without scales; `rows` and `keys` being those of a tile and of a block. False
    under the interpreter and off Hopper.

    Args:
        query: [T_q, H_q, D_c + D_r]; cache: [pages, page_size, D_c + D_r], or uint8 [pages, page_size, 656]; out:
            [T_q, H_q, D_c].
    """
    widths = (out.shape[2], query.shape[2] - out.shape[2])
    stored = "block128" if _with_scales(cache) else "fp8_e4m3" if cache.dtype == torch.float8_e4m3fn else ""
    return (
        (rows, keys) == (_BLOCK, _BLOCK)
        and (_even(cache) if stored else query.dtype is cache.dtype)
        and likely(query.device, query.dtype, widths, cache.shape[1], stored)
        and _aligned(query, cache, out)
    )


def _with_scales(cache: Tensor) -> bool:
    return cache.dtype == torch.uint8 and cache.shape[2] == MLA_BYTES


def _even(cache: Tensor) -> bool:
    """Whether a row is found by its number, which fits in 32 bits."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1) and cache.shape[0] * cache.shape[1] < 2**31


def _aligned(query: Tensor, cache: Tensor, out: Tensor) -> bool:
    """Whether rows are of 512 + 64 and can be copied by 16 bytes, on a Hopper."""
    return (
        on_hopper(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and (out.shape[2], query.shape[2] - out.shape[2]) == _WIDTHS
        # What is no multiple of 16 is taken for odd when the kernel is compiled.
        and all(n % 16 == 0 for n in (*query.stride()[:2], cache.stride(0)))
        and cache.stride(1) * cache.itemsize % 16 == 0
        and query.data_ptr() % 16 == 0
        and cache.data_ptr() % 16 == 0
    )


@runtime.on_its_device
def attend(
    query: Tensor, cache: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, shares: Tensor,
    out: Tensor, lse: Tensor | None, pieces: tuple[Tensor, Tensor], tiles: int, parts: int, scale: float, causal: bool,
) -> None:  # fmt: skip
    """The shares of `kernels.latent.plan`, in one launch. Arguments as there, `cache` as `takes`; `scale` has log2(e)
    in it."""
    from polyattn_triton.hopper.latent_kernel import attend as kernel

    fp8 = query.dtype is not cache.dtype
    rows, scales, rope = cache, None, None
    if _with_scales(cache):
        rows, scales, rope = scaled_parts(cache, _WIDTHS[0])
    if fp8:
        # FP8 numbers are loaded by fours.
        rows = rows.view(torch.int32)
    try:
        kernel[(parts * tiles,)](
            query, rows, scales, rope, page_table, seq_lens, cu_seqlens_q, shares, out, lse, *pieces, None, None,
            tiles, query.stride(0), query.stride(1), rows.stride(0), page_table.stride(0), out.stride(0),
            out.stride(1), scale, *(0,) * 7, HEADS=query.shape[1], ROW=rows.stride(1), PAGE=rows.shape[1],
            CAUSAL=causal, REGISTERS=FP8_REGISTERS if fp8 else REGISTERS, num_warps=4,
        )  # fmt: skip
    except TOO_LARGE as error:
        asked = (str(query.dtype).removeprefix("torch."), *_WIDTHS, _BLOCK, False)
        raise too_large(LATENT, asked, query.device, error) from error


def takes_listed(query: Tensor, cache: Tensor, out: Tensor) -> bool:
    """Whether `attend_listed` computes such lists, over rows of the query's dtype or FP8 rows, in pages of any size.

    Args:
        query, out: as `takes`. cache: as there, or uint8 [pages, page_size, 656].
    """
    return (_with_scales(cache) or query.dtype is cache.dtype) and _even(cache) and _aligned(query, cache, out)


def listed_parts(device: torch.device, tokens: int, heads: int, topk: int) -> int:
    """Pieces of each list: as many as fill the chip once, of no fewer than two blocks."""
    tiles = -(-heads // _BLOCK)
    return max(min(runtime.processors(device) // max(tokens * tiles, 1), -(-topk // (2 * _BLOCK))), 1)


@runtime.on_its_device
def attend_listed(
    query: Tensor, cache: Tensor, fp8: tuple[Tensor, Tensor] | None, page_table: Tensor, sequence_of: Tensor | None,
    listed: Tensor, outs: Tensor, lses: Tensor | None, scale: float,
) -> None:  # fmt: skip
    """Attention of each query to the rows of its list, by pieces of the list.

    Args:
        query: [T_q, H_q, 576]. cache: [pages, page_size, 576], or the 512 bytes of FP8 rows, [pages, page_size, 512].
        fp8: their scales, float32 [pages, page_size, 4], and rope numbers, bfloat16 [pages, page_size, 64], in the same
            rows of memory. page_table: int32 [N, max_pages].
        sequence_of: int32 [T_q], the row of the page table; None = each token has its own.
        listed: int32 [T_q, topk], dense last axis, -1 = none.
        outs: [P, T_q, H_q, 512], of each piece. lses: float32 [P, T_q, H_q], contiguous.
        scale: above 0, with log2(e) in it.
    """
    from polyattn_triton.hopper.latent_kernel import attend as kernel

    (parts, tokens, heads, _), topk = outs.shape, listed.shape[1]
    # FP8 numbers are loaded by fours.
    rows = cache if fp8 is None else cache.view(torch.int32)
    each = -(-topk // (parts * _BLOCK)) * _BLOCK
    tiles = -(-heads // _BLOCK)
    programs = max(min(runtime.processors(query.device) // tiles, tokens * parts), 1)
    try:
        kernel[(programs * tiles,)](
            query, rows, *(fp8 or (None, None)), page_table, None, None, None, outs, lses, None, None, listed,
            sequence_of, tiles, query.stride(0), query.stride(1), rows.stride(0), page_table.stride(0), outs.stride(1),
            outs.stride(2), scale, topk, tokens, parts, each, listed.stride(0), outs.stride(0), tokens * heads,
            HEADS=heads, ROW=rows.stride(1), PAGE=rows.shape[1], CAUSAL=False,
            REGISTERS=FP8_REGISTERS if fp8 else LISTED_REGISTERS, num_warps=4,
        )  # fmt: skip
    except TOO_LARGE as error:
        asked = (str(query.dtype).removeprefix("torch."), *_WIDTHS, _BLOCK, False)
        raise too_large(LATENT, asked, query.device, error) from error
