"""What the dense and packed kernels, forward and backward, share: their tiles in memory and what a tile may see.

Head dims that are no power of two are cut in two: 64 + 32 for 96, 128 + 64 for 192. `D1` and `D2` are the widths of
the parts of Q and K, `E1` and `E2` those of V; a second part of 0 does not exist.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from polyattn_triton.kernels import rules  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels import choices
from polyattn_triton.kernels.rules import LOG2E, end_key, first_key, seen

__all__ = [
    "Spec",
    "architecture",
    "block",
    "head_at",
    "hidden",
    "parts",
    "put",
    "reach",
    "rows_of",
    "span",
    "steps",
    "tile_at",
]


class Spec(NamedTuple):
    """Who sees what, and the logits, as numbers: what every launch of one request has in common.

    Attributes:
        scale: factor on the logits. softcap: 0 = off.
        left, right: keys seen before and after a query's position, -1 = no bound; causal is a right bound of 0.
        chunk: block length of chunked-local attention, 0 = off; its right bound is 0.
        top_left: query row 0 stands at key 0; otherwise the last row stands at the last key.
    """

    scale: float
    softcap: float = 0.0
    left: int = -1
    right: int = -1
    chunk: int = 0
    top_left: bool = False


def parts(width: int) -> tuple[int, int]:
    """Powers of two that cover a head dim: one, or a large one and what is left over."""
    first = 1 << (width.bit_length() - 1)
    if first == width:
        return width, 0
    rest = max(16, 1 << (width - first - 1).bit_length())
    return (2 * first, 0) if rest == first else (first, rest)


def architecture(device: torch.device) -> str:
    """The class of devices that a configuration is for: interpreter, hopper, or "" for all others."""
    if rules.INTERPRETED:
        return "interpreter"
    return "hopper" if choices.architecture(device) == "hopper" else ""


@triton.jit
def place(pid, tiles, pairs, together, DESCENDING: tl.constexpr):
    """(tile, pair) of program `pid`: `together` pairs at a time, tile by tile; DESCENDING: the last tile first."""
    section = pid // (tiles * together)
    rest = pid - section * (tiles * together)
    here = tl.minimum(together, pairs - section * together)
    number = rest // here
    pair = section * together + rest - number * here
    if DESCENDING:
        number = tiles - 1 - number
    return number, pair


@triton.jit
def span(cu_seqlens, z, length):
    """(first token, length) of sequence z: of a packed batch, or of one of `length` tokens a sequence."""
    if cu_seqlens is None:
        return z * 0, length
    else:
        first = tl.load(cu_seqlens + z)
        return first, tl.load(cu_seqlens + z + 1) - first


@triton.jit
def tile_at(tiles, pairs, together, heads, cu_q, cu_k, s_q, s_k, DESCENDING: tl.constexpr):
    """(tile, sequence, head, first query, S_q, first key, S_k) of this program; a pair is a sequence with a head."""
    number, pair = place(tl.program_id(0), tiles, pairs, together, DESCENDING)
    z = pair // heads
    first_q, s_q = span(cu_q, z, s_q)
    first_k, s_k = span(cu_k, z, s_k)
    return number, z, pair - z * heads, first_q, s_q, first_k, s_k


@triton.jit
def steps(z, m, h, UNIT: tl.constexpr):
    """Strides that were given in units of 16 bytes, in elements: now the compiler knows what divides them."""
    return tl.cast(z, tl.int64) * UNIT, tl.cast(m, tl.int64) * UNIT, tl.cast(h, tl.int64) * UNIT


@triton.jit
def head_at(base, z, first, head, sz, sm, sh):
    """Where a head of sequence z begins, whose first token is `first`."""
    return base + tl.cast(z, tl.int64) * sz + tl.cast(first, tl.int64) * sm + tl.cast(head, tl.int64) * sh


@triton.jit
def reach(
    lowest, highest, s_k, left, right, chunk, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """(key_from, key_to, whole_from, whole_to) of queries at lowest ... highest: some of them sees keys in the first
    range, which starts at a block of N, all of them see those in the second."""
    key_from = first_key(lowest, left, chunk, LEFT, CHUNK) // N * N
    key_to = end_key(highest, s_k, right, RIGHT)
    return key_from, key_to, first_key(highest, left, chunk, LEFT, CHUNK), end_key(lowest, s_k, right, RIGHT)


@triton.jit
def rows_of(base, first, stride, limit, N: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Rows [first, first + N) below `limit` and columns [START, START + WIDTH) below D; zeros elsewhere."""
    i = tl.arange(0, N)
    c = START + tl.arange(0, WIDTH)
    at = base + tl.cast(first, tl.int64) * stride + i.to(tl.int64)[:, None] * stride + c[None, :]
    inside = (i < limit - first)[:, None]
    if START + WIDTH > D:
        inside = inside & (c < D)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def block(
    source, z, head, first, stride, limit, N: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """`rows_of` a head of a sequence: of a pointer to it, or of a tensor descriptor [B, S, H, D]."""
    if TMA:
        return source.load([z, first, head, START]).reshape(N, WIDTH)
    else:
        return rows_of(source, first, stride, limit, N, START, WIDTH, D)


@triton.jit
def put(base, at, valid, found, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Store rows at offsets `at` where `valid`, columns [START, START + WIDTH) below D."""
    c = START + tl.arange(0, WIDTH)
    inside = valid[:, None]
    if START + WIDTH > D:
        inside = inside & (c < D)[None, :]
    tl.store(base + at[:, None] + c[None, :], found, mask=inside)


@triton.jit
def hidden(
    found, p, j, mask, smn, s_k, left, right, chunk, partly,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Base-2 logits `found`, -inf where queries at p do not see keys j; p [M, 1] and j [1, N], or [1, M] and [N, 1].

    Args:
        mask: pointers to the mask's rows, shaped as p. MASK: 0 none, 1 bool, 2 additive.
        partly: whether some query here does not see some key by position.
    """
    if MASK:
        given = tl.load(mask + j.to(tl.int64) * smn, mask=j < s_k, other=0)
        if MASK == 1:
            found = tl.where(given != 0, found, float("-inf"))
        else:
            found += given.to(tl.float32) * LOG2E
    if partly:
        found = tl.where(seen(p, j, s_k, left, right, chunk, LEFT, RIGHT, CHUNK), found, float("-inf"))
    return found
