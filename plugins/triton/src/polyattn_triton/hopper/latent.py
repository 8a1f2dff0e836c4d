"""Latent decode on Hopper: the launcher of `latent_kernel.attend`, and what it takes."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn_triton.hopper.forward import on_hopper
from polyattn_triton.kernels.room import TOO_LARGE, too_large
from polyattn_triton.records.tuned import LATENT

__all__ = ["REGISTERS", "attend", "takes"]

_WIDTHS, _BLOCK = (512, 64), 64
REGISTERS = 216
"""Of a consumer's thread; the producer has what is left."""


def takes(query: Tensor, cache: Tensor, out: Tensor, rows: int, keys: int) -> bool:
    """Whether the kernel computes such tiles: plain causal or full attention over bfloat16 or float16 rows of 512 + 64,
    `rows` and `keys` being those of a tile and of a block. False under the interpreter and off Hopper.

    Args:
        query: [T_q, H_q, D_c + D_r]; cache: [pages, page_size, D_c + D_r]; out: [T_q, H_q, D_c].
    """
    size = cache.shape[1]
    return (
        on_hopper(query.device)
        and (rows, keys) == (_BLOCK, _BLOCK)
        and query.dtype is cache.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and (out.shape[2], query.shape[2] - out.shape[2]) == _WIDTHS
        # Pages of at least 16 rows that fit into blocks, or blocks into them; copies of 16 bytes.
        and (size % _BLOCK == 0 or (_BLOCK % size == 0 and size >= 16))
        # What is no multiple of 16 is taken for odd when the kernel is compiled.
        and all(n % 16 == 0 for n in (*query.stride()[:2], cache.stride(0)))
        and cache.stride(1) % 8 == 0
        and query.data_ptr() % 16 == 0
        and cache.data_ptr() % 16 == 0
    )


def attend(
    query: Tensor, cache: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, shares: Tensor,
    out: Tensor, lse: Tensor | None, pieces: tuple[Tensor, Tensor], tiles: int, parts: int, scale: float, causal: bool,
) -> None:  # fmt: skip
    """The shares of `kernels.latent.plan`, in one launch. Arguments as there; `scale` has log2(e) in it."""
    from polyattn_triton.hopper.latent_kernel import attend as kernel

    try:
        kernel[(parts * tiles,)](
            query, cache, page_table, seq_lens, cu_seqlens_q, shares, out, lse, *pieces,
            tiles, query.stride(0), query.stride(1), cache.stride(0), page_table.stride(0), out.stride(0),
            out.stride(1), scale, HEADS=query.shape[1], ROW=cache.stride(1), PAGE=cache.shape[1], CAUSAL=causal,
            REGISTERS=REGISTERS, num_warps=4,
        )  # fmt: skip
    except TOO_LARGE as error:
        asked = (str(query.dtype).removeprefix("torch."), *_WIDTHS, _BLOCK, False)
        raise too_large(LATENT, asked, query.device, error) from error
