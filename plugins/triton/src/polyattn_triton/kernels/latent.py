"""Latent (MLA) attention in absorbed form: one row per token is the key of every head, and its first D_c numbers are
the value.

All heads of a token share its row, so a tile of queries is M (token, head) pairs of one sequence: pair r is token
r // H, head r % H. A block of N keys is read once for both products.

How the keys are cut, where tiles alone would leave processors idle (`STREAMED`): the key blocks of all sequences, one
sequence after the other, are dealt out evenly to `parts` programs per tile, whatever the lengths are, and a program
goes through the sequences that its share touches. What lies wholly in one share is written to the output; of the rest
each program has at most two pieces, which `_merge` puts together. Shares follow from the lengths on the device, so a
recorded launch serves every batch of its size; they are made once for all layers (`plan`).

Otherwise each tile has a program of its own, or, where `CUTS` > 1, up to so many that depend on nothing but the
sequence itself: the batch-invariant way.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from polyattn.contract import PagedTables
from polyattn_triton import runtime  # first: it decides how Triton is imported

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip
from torch import Tensor  # isort: skip

from polyattn.contract import Key  # isort: skip
from polyattn_triton.hopper import latent as hopper  # isort: skip
from polyattn_triton.kernels.arguments import mask_arguments  # isort: skip
from polyattn_triton.kernels.cached import LATENT_GROUP, as_stored, least, numbers, scaled_parts  # isort: skip
from polyattn_triton.kernels.choices import EPOCH, architecture, chosen  # isort: skip
from polyattn_triton.kernels.room import TOO_LARGE, Loop, Room, refuse, smaller  # isort: skip
from polyattn_triton.kernels.rounding import cast  # isort: skip
from polyattn_triton.kernels.splits import power_of_2  # isort: skip
from polyattn_triton.records.tuned import LATENT  # isort: skip
from polyattn_triton.kernels.rules import (  # isort: skip
    LOG2E,
    accumulate,
    bounds,
    dot,
    end_key,
    first_key,
    logits,
    natural_lse,
    scales,
    seen,
    share,
)

__all__ = ["Config", "Launch", "attend", "launch_for", "merging", "most", "plan", "stored_as"]

LANES = tl.constexpr(128)
"""Sequences that a program looks at together, to find its own."""
CUTS = 16
"""Most pieces of a sequence where they depend on itself alone."""
_WIDE = 64
"""Rows for each piece, up to which `_merge` has small programs."""
_FEWEST, _MOST = 16, 64
"""Rows of the smallest tiles, and of those that the Hopper kernel takes."""
_BRIEF = {True: 2, False: 6}
"""Blocks of keys of a program up to which a Hopper is to have the smallest tiles, whether the Hopper kernel would take
larger ones or not: 7 sequences of 131 FP8 rows and 96 heads take 12 us on an H200, and by the Hopper kernel 16."""
CUT_TOKENS = tl.constexpr(8)
"""Queries of a sequence that is cut at all in that way."""
GROUP = tl.constexpr(LATENT_GROUP)


SLACK = tl.constexpr(40)
"""A share may be longer than the shortest possible by one in so many of its blocks."""


@triton.jit
def _sequence(
    n, sequences, seq_lens, cu_seqlens_q, left, right, chunk,
    N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(first token, tokens, keys, first key block, key blocks) of sequences n, all 0 past the last one."""
    real = n < sequences
    start = tl.load(cu_seqlens_q + n, mask=real, other=0)
    tokens = tl.load(cu_seqlens_q + n + 1, mask=real, other=0) - start
    s_k = tl.load(seq_lens + n, mask=real, other=0)
    first = first_key(s_k - tokens, left, chunk, LEFT, CHUNK) // N
    blocks = (end_key(s_k - 1, s_k, right, RIGHT) + N - 1) // N - first
    return start, tokens, s_k, first, tl.where(tokens > 0, tl.maximum(blocks, 0), 0)


@triton.jit
def _counts(
    n, sequences, seq_lens, cu_seqlens_q, left, right, chunk, HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STREAMED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What is dealt out, of sequences n: key blocks where STREAMED, else tiles."""
    _, tokens, _, _, blocks = _sequence(n, sequences, seq_lens, cu_seqlens_q, left, right, chunk, N, LEFT, RIGHT, CHUNK)
    return blocks if STREAMED else (tokens * HEADS + M - 1) // M


@triton.jit
def _total(
    until, sequences, seq_lens, cu_seqlens_q, left, right, chunk, HEADS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STREAMED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`_counts` of all sequences before `until`, together."""
    total = 0
    for base in range(0, until, LANES):
        n = base + tl.arange(0, LANES)
        counts = _counts(
            n, sequences, seq_lens, cu_seqlens_q, left, right, chunk, HEADS, M, N, STREAMED, LEFT, RIGHT, CHUNK
        )
        total += tl.sum(tl.where(n < until, counts, 0))
    return total


@triton.jit
def _find(
    item, sequences, seq_lens, cu_seqlens_q, left, right, chunk, HEADS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STREAMED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The sequence that item `item` of what is dealt out belongs to, and how many items are before that sequence.
    Past the last item: `sequences`."""
    found = 0
    before = 0
    total = 0
    for base in range(0, sequences, LANES):
        n = base + tl.arange(0, LANES)
        counts = _counts(
            n, sequences, seq_lens, cu_seqlens_q, left, right, chunk, HEADS, M, N, STREAMED, LEFT, RIGHT, CHUNK
        )
        ends = total + tl.cumsum(counts, 0)
        past = (n < sequences) & (ends <= item)
        found += tl.sum(past.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(past, ends, 0)))
        total += tl.sum(counts)
    return found, before


@triton.jit
def _cut(blocks, tokens, LEAST: tl.constexpr, CUTS: tl.constexpr):
    """Key blocks of each piece of a sequence that is cut by itself."""
    pieces = tl.minimum((blocks + LEAST - 1) // LEAST, CUTS)
    pieces = tl.where(tokens > CUT_TOKENS, 1, tl.maximum(pieces, 1))
    return tl.maximum((blocks + pieces - 1) // pieces, 1)


@triton.jit
def _pages(table, j, s_k, PAGE: tl.constexpr, N: tl.constexpr):
    """The page of each of the keys j .. j + N - 1, as one number where they share it."""
    if PAGE % N == 0:
        return tl.load(table + j // PAGE, mask=j < s_k, other=0).to(tl.int64)
    else:
        keys = j + tl.arange(0, N)
        return tl.load(table + keys // PAGE, mask=keys < s_k, other=0).to(tl.int64)


@triton.jit
def _rows(
    cache, page, first, inside, page_stride, STRIDE: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Columns [0, D) of the rows of keys first .. first + N - 1, [N, WIDTH]; zeros past them and where not `inside`."""
    c = tl.arange(0, WIDTH)
    if PAGE % N == 0:
        # Few registers: one address, and offsets that are known when this is compiled.
        base = cache + (page * page_stride + first % PAGE * STRIDE)
        at = base + (tl.arange(0, N) * STRIDE)[:, None] + c[None, :]
    else:
        at = cache + (page * page_stride + (first + tl.arange(0, N)) % PAGE * STRIDE)[:, None] + c[None, :]
    if D == WIDTH:
        return tl.load(at, mask=inside[:, None], other=0.0)
    else:
        return tl.load(at, mask=inside[:, None] & (c < D)[None, :], other=0.0)


@triton.jit
def _values(
    cache, cache_scales, page, first, inside, cache_page, scale_page, dtype: tl.constexpr, ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, C: tl.constexpr, D_C: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    """The numbers of rows that are keys and values, [N, C]."""
    raw = _rows(cache, page, first, inside, cache_page, ROW, PAGE, N, C, D_C)
    if STORED == "block128":
        scale = _rows(cache_scales, page, first, inside, scale_page, SCALE_ROW, PAGE, N, C // GROUP, C // GROUP)
        real = numbers(raw, "fp8_e4m3", tl.float32).reshape(N, C // GROUP, GROUP) * scale[:, :, None]
        return cast(real.reshape(N, C), dtype)
    elif STORED != "":
        return numbers(raw, STORED, dtype)
    else:
        return raw


@triton.jit
def _piece(
    query, cache, cache_scales, cache_rope, table, mask, out, lse, piece_out, piece_lse,
    query_token, query_head, cache_page, scale_page, rope_page,
    mask_head, mask_row, mask_key, out_token, out_head, piece_row,
    start, tokens, s_k, tile, begin, end, whole, left, right, chunk, scale,
    HEADS: tl.constexpr, PAGE: tl.constexpr, D_C: tl.constexpr, D_R: tl.constexpr, ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr, ROPE_ROW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, MASK: tl.constexpr, TREE: tl.constexpr,
    FOLD: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, STORED: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of one sequence over its keys `begin` to `end`: to the output if that is the `whole` of them, else to
    row `piece_row` on of the pieces."""
    r = tile * M + tl.arange(0, M)
    token, head = r // HEADS, r % HEADS
    inside_q = token < tokens
    p = token + s_k - tokens
    c = tl.arange(0, C)
    q_row = (start + token).to(tl.int64) * query_token + head * query_head
    latent = tl.load(query + q_row[:, None] + c[None, :], mask=inside_q[:, None] & (c < D_C)[None, :], other=0.0)
    if D_R:
        x = tl.arange(0, R)
        rope = tl.load(
            query + (q_row + D_C)[:, None] + x[None, :], mask=inside_q[:, None] & (x < D_R)[None, :], other=0.0
        )

    # What some query of the tile sees: positions grow with the rows.
    lowest = s_k - tokens + tile * M // HEADS
    highest = tl.minimum(s_k - tokens + (tile * M + M - 1) // HEADS, s_k - 1)
    all_from = first_key(highest, left, chunk, LEFT, CHUNK)
    all_to = end_key(lowest, s_k, right, RIGHT)
    begin = tl.maximum(begin, first_key(lowest, left, chunk, LEFT, CHUNK) // N * N)
    end = tl.minimum(end, end_key(highest, s_k, right, RIGHT))

    acc = tl.zeros((M, C), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    # One block ahead: rows are loaded without waiting for where they are.
    page = _pages(table, begin, s_k, PAGE, N)
    for first in tl.range(begin, end, N, num_stages=STAGES):
        j = first + tl.arange(0, N)
        inside = j < s_k
        if MASK:
            # Before the products: behind them the compiler would take the layout of this load for the softmax.
            mask_at = mask + (head.to(tl.int64) * mask_head + token.to(tl.int64) * mask_row)[:, None]
            read = inside_q[:, None] & inside[None, :]
            if TREE:
                # Before the drafts every key is seen.
                read = read & (j >= s_k - tokens)[None, :]
            given = tl.load(mask_at + j.to(tl.int64)[None, :] * mask_key, mask=read, other=1 if MASK == 1 else 0)
        value = _values(
            cache, cache_scales, page, first, inside, cache_page, scale_page, query.dtype.element_ty, ROW, SCALE_ROW,
            PAGE, N, C, D_C, STORED,
        )  # fmt: skip
        products = dot(latent, value.T)
        if D_R:
            key = _rows(cache_rope, page, first, inside, rope_page, ROPE_ROW, PAGE, N, R, D_R)
            if STORED != "" and STORED != "block128":
                key = numbers(key, STORED, query.dtype.element_ty)
            # A sum that the compiler does not turn into a chain of products: of those it lays out all but the last so
            # that each warp group computes the whole of them.
            products = tl.fma(dot(rope, cast(key, query.dtype.element_ty).T), 1.0, products)
        page = _pages(table, first + N, s_k, PAGE, N)
        if not FOLD:
            products = logits(products, scale, 0.0, False)
        if MASK:
            if MASK == 1:
                products = tl.where(given != 0, products, float("-inf"))
            else:
                products += given.to(tl.float32) * LOG2E
        if first < all_from or first + N > all_to:
            products = tl.where(
                seen(p[:, None], j[None, :], s_k, left, right, chunk, LEFT, RIGHT, CHUNK), products, float("-inf")
            )
        weights, factor, top, total = accumulate(top, total, products, scale if FOLD else 1.0)
        acc = dot(cast(weights, value.dtype), value, acc * factor[:, None])

    acc = acc * share(total)[:, None]
    log = natural_lse(top, total)
    stored = inside_q[:, None] & (c < D_C)[None, :]
    if not SPLIT or whole:
        row = (start + token).to(tl.int64)
        tl.store(
            out + (row * out_token + head * out_head)[:, None] + c[None, :], cast(acc, out.dtype.element_ty), stored
        )
        if lse is not None:
            tl.store(lse + row * HEADS + head, log, inside_q)
    else:
        row = piece_row + r
        tl.store(piece_out + (row * D_C)[:, None] + c[None, :], acc, stored)
        tl.store(piece_lse + row, log, inside_q)


@triton.jit
def _each(
    total, sequences, seq_lens, cu_seqlens_q, parts, left, right, chunk, N: tl.constexpr, LEAST: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Key blocks of a share. Where that costs little they are as many as whole sequences of the longest kind have, or
    whole fractions of one: a share that begins or ends inside of another sequence has one more query to wait for, and
    leaves pieces."""
    each = tl.maximum((total + parts - 1) // parts, LEAST)
    longest = 1
    for base in range(0, sequences, LANES):
        n = base + tl.arange(0, LANES)
        counts = _counts(n, sequences, seq_lens, cu_seqlens_q, left, right, chunk, 1, 1, N, True, LEFT, RIGHT, CHUNK)
        longest = tl.maximum(longest, tl.max(counts))
    if each < longest:
        fraction = longest // each
        even = (longest + fraction - 1) // fraction
    else:
        even = (each + longest - 1) // longest * longest
    return tl.where(even - each <= each // SLACK, even, each)


@triton.jit(do_not_specialize=["sequences", "parts", "left", "right", "chunk"])
def _plan(
    shares, cuts, seq_lens, cu_seqlens_q, sequences, parts, left, right, chunk,
    N: tl.constexpr, LEAST: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Share i begins at key block shares[i, 0] of all, in sequence shares[i, 1], whose first is shares[i, 2].
    Sequence n is cut into cuts[n, 1] pieces, the first in share cuts[n, 0]; 0 pieces: it has no keys."""
    i = tl.program_id(0)
    total = _total(sequences, sequences, seq_lens, cu_seqlens_q, left, right, chunk, 1, 1, N, True, LEFT, RIGHT, CHUNK)
    each = _each(total, sequences, seq_lens, cu_seqlens_q, parts, left, right, chunk, N, LEAST, LEFT, RIGHT, CHUNK)
    if i <= parts:
        item = tl.minimum(i * each, total)
        n, before = _find(
            item, sequences, seq_lens, cu_seqlens_q, left, right, chunk, 1, 1, N, True, LEFT, RIGHT, CHUNK
        )
        tl.store(shares + i * 3, item)
        tl.store(shares + i * 3 + 1, n)
        tl.store(shares + i * 3 + 2, before)
    if i < sequences:
        before = _total(i, sequences, seq_lens, cu_seqlens_q, left, right, chunk, 1, 1, N, True, LEFT, RIGHT, CHUNK)
        _, _, _, _, blocks = _sequence(i, sequences, seq_lens, cu_seqlens_q, left, right, chunk, N, LEFT, RIGHT, CHUNK)
        tl.store(cuts + i * 2, before // each)
        tl.store(cuts + i * 2 + 1, tl.where(blocks > 0, (before + blocks - 1) // each - before // each + 1, 0))


@triton.jit(
    do_not_specialize=[
        *("table_row", "mask_sequence", "mask_head", "mask_row"),
        *("sequences", "tiles", "left", "right", "chunk"),
    ]
)
def _attend(
    query, cache, cache_scales, cache_rope, page_table, seq_lens, cu_seqlens_q, mask, out, lse, piece_out, piece_lse,
    shares, query_token, query_head, cache_page, scale_page, rope_page, table_row,
    mask_sequence, mask_head, mask_row, mask_key, out_token, out_head,
    sequences, tiles, left, right, chunk, scale,
    HEADS: tl.constexpr, PAGE: tl.constexpr, D_C: tl.constexpr, D_R: tl.constexpr, ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr, ROPE_ROW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, MASK: tl.constexpr, TREE: tl.constexpr,
    FOLD: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, STORED: tl.constexpr,
    STREAMED: tl.constexpr, LEAST: tl.constexpr, CUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`tiles` is the most that a sequence has. Pieces: 2 for each of `parts`, or CUTS for each sequence, of `tiles`
    tiles each."""
    if STREAMED:
        # Tiles of one share are neighbours: they read the same keys at the same time.
        part = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
        item = tl.load(shares + part * 3)
        n = tl.load(shares + part * 3 + 1)
        before = tl.load(shares + part * 3 + 2)
        last = tl.load(shares + part * 3 + 3)
        while item < last:
            start, tokens, s_k, first, blocks = _sequence(
                n, sequences, seq_lens, cu_seqlens_q, left, right, chunk, N, LEFT, RIGHT, CHUNK
            )
            after = tl.minimum(before + blocks, last)
            if (tile * M < tokens * HEADS) & (blocks > 0):
                # The piece that begins a sequence is the second of its program, any other the first.
                slot = 2 * part + (item == before).to(tl.int32)
                _piece(
                    query, cache, cache_scales, cache_rope, page_table + n * table_row.to(tl.int64),
                    mask + n * mask_sequence.to(tl.int64) if MASK else mask, out, lse, piece_out, piece_lse,
                    query_token, query_head, cache_page, scale_page, rope_page,
                    mask_head, mask_row, mask_key, out_token, out_head, slot.to(tl.int64) * tiles * M,
                    start, tokens, s_k, tile, (first + item - before) * N, (first + after - before) * N,
                    after - item == blocks, left, right, chunk, scale,
                    HEADS, PAGE, D_C, D_R, ROW, SCALE_ROW, ROPE_ROW, M, N, C, R, MASK, TREE, FOLD, LEFT, RIGHT, CHUNK,
                    STORED, True, STAGES,
                )  # fmt: skip
            item = after
            before += blocks
            n += 1
    else:
        n, before = _find(
            tl.program_id(0), sequences, seq_lens, cu_seqlens_q, left, right, chunk, HEADS, M, N, False, LEFT, RIGHT,
            CHUNK,
        )  # fmt: skip
        if n < sequences:
            start, tokens, s_k, first, blocks = _sequence(
                n, sequences, seq_lens, cu_seqlens_q, left, right, chunk, N, LEFT, RIGHT, CHUNK
            )
            # Tiles at the end see most.
            tile = (tokens * HEADS + M - 1) // M - 1 - (tl.program_id(0) - before)
            cut = blocks
            piece = 0
            if CUTS > 1:
                cut = _cut(blocks, tokens, LEAST, CUTS)
                piece = tl.program_id(1)
            if (piece == 0) | (piece * cut < blocks):
                _piece(
                    query, cache, cache_scales, cache_rope, page_table + n * table_row.to(tl.int64),
                    mask + n * mask_sequence.to(tl.int64) if MASK else mask, out, lse, piece_out, piece_lse,
                    query_token, query_head, cache_page, scale_page, rope_page,
                    mask_head, mask_row, mask_key, out_token, out_head, (n * CUTS + piece).to(tl.int64) * tiles * M,
                    start, tokens, s_k, tile, (first + piece * cut) * N,
                    (first + tl.minimum((piece + 1) * cut, blocks)) * N, cut >= blocks, left, right, chunk, scale,
                    HEADS, PAGE, D_C, D_R, ROW, SCALE_ROW, ROPE_ROW, M, N, C, R, MASK, TREE, FOLD, LEFT, RIGHT, CHUNK,
                    STORED, CUTS > 1, STAGES,
                )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "tiles", "left", "right", "chunk"])
def _merge(
    seq_lens, cu_seqlens_q, out, lse, piece_out, piece_lse, cuts, out_token, out_head,
    sequences, tiles, left, right, chunk,
    HEADS: tl.constexpr, D_C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, CHUNK: tl.constexpr, STREAMED: tl.constexpr, LEAST: tl.constexpr, CUTS: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS rows and WIDTH columns of a sequence that `_attend` left in pieces, TOGETHER pieces at a time."""
    n = tl.program_id(1)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if STREAMED:
        start = tl.load(cu_seqlens_q + n)
        tokens = tl.load(cu_seqlens_q + n + 1) - start
        part = tl.load(cuts + 2 * n)
        pieces = tl.load(cuts + 2 * n + 1)
    else:
        start, tokens, _, _, blocks = _sequence(
            n, sequences, seq_lens, cu_seqlens_q, left, right, chunk, N, LEFT, RIGHT, CHUNK
        )
        part = 0
        pieces = tl.maximum(tl.cdiv(blocks, _cut(blocks, tokens, LEAST, CUTS)), 1)
    inside = r < tokens * HEADS
    # One piece is the output already; what has none is written by nobody else.
    if (tl.program_id(0) * ROWS < tokens * HEADS) & (pieces != 1):
        c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
        columns = c < D_C
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for base in range(0, pieces, TOGETHER):
            s = base + tl.arange(0, TOGETHER)
            if STREAMED:
                slot = 2 * (part + s) + (s == 0).to(tl.int32)
            else:
                slot = n * CUTS + s
            row = (slot.to(tl.int64) * tiles * M)[None, :] + r[:, None]
            read = inside[:, None] & (s < pieces)[None, :]
            found = tl.load(piece_lse + row, mask=read, other=float("-inf")) * LOG2E
            given = tl.load(
                piece_out + (row * D_C)[:, :, None] + c[None, None, :],
                mask=read[:, :, None] & columns[None, None, :],
                other=0.0,
            )
            weights, factor, top, total = accumulate(top, total, found)
            acc = acc * factor[:, None] + tl.sum(weights[:, :, None] * given, 1)
        row = (start + r // HEADS).to(tl.int64)
        head = r % HEADS
        tl.store(
            out + (row * out_token + head * out_head)[:, None] + c[None, :],
            cast(acc * share(total)[:, None], out.dtype.element_ty),
            inside[:, None] & columns[None, :],
        )
        if lse is not None and tl.program_id(2) == 0:
            tl.store(lse + row * HEADS + head, natural_lse(top, total), inside)


class Config(NamedTuple):
    """How a tile is computed.

    Attributes:
        rows, keys: of a tile and of a block (M and N above). warps, stages: of a program.
        programs: that a processor runs at once.
        least: key blocks that a share has at least; apart: that a piece has in the batch-invariant way.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1
    least: int = 1
    apart: int = 16


# By architecture class and rows of a tile; for rows of at most 640 numbers of 16 bits. Fewer heads make small tiles.
_TABLE: dict[str, tuple[Config, ...]] = {
    "hopper": (Config(64, 64, 8, 2, least=2), Config(32, 64, 8, 2), Config(16, 64, 8, 2)),
    "blackwell": (Config(64, 32, 8, 2), Config(32, 64, 8, 2), Config(16, 64, 4, 2)),
    "nvidia": (Config(32, 32, 8, 2), Config(16, 32, 4, 2)),
    "": (Config(32, 32, 4, 2), Config(16, 32, 4, 2)),
    "small": (Config(16, 32, 8, 1),),
    "interpreter": (Config(64, 32, 1, 1, apart=1), Config(16, 32, 1, 1, apart=1)),
}
"""Largest tile first. `small`: wide or float32 rows, anywhere."""


def _class(device: torch.device) -> str:
    """The table's name for a device."""
    found = "interpreter" if runtime.INTERPRETED else architecture(device)
    return {"cuda": "nvidia", "other": ""}.get(found, found)


def config_for(
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int],
    rows: int,
    additive: bool = False,
    stored: str = "",
) -> Config:
    """The configuration for tiles of at most `rows` rows, of latent rows with `widths` (D_c, D_r): as it was measured,
    else the table's. `additive`: there is a mask that is added. `stored`: `stored_as` of the cache."""
    return _chosen(_class(device), device, dtype, widths, rows, additive, stored, EPOCH.value)


@functools.lru_cache(maxsize=1024)
def _chosen(
    where: str,
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int],
    rows: int,
    additive: bool,
    stored: str,
    _epoch: int,
) -> Config:
    small = dtype.itemsize > 2 or sum(map(_power, widths)) > 640
    configs = _TABLE["small" if small and not runtime.INTERPRETED else where]
    found = next((config for config in configs[:-1] if rows > config.rows // 2), configs[-1])
    if additive:
        # It may be float32 and goes through shared memory, which larger blocks fill.
        found = found._replace(keys=min(found.keys, 32))
    rooms = (_room(dtype, widths, 4 if additive else 0, stored),)
    return chosen(LATENT, _key(dtype, widths, found.rows, additive), found, device, rooms, stored)


def _key(dtype: torch.dtype, widths: tuple[int, int], rows: int, additive: bool) -> Key:
    return (str(dtype).removeprefix("torch."), *widths, rows, additive)


def _room(dtype: torch.dtype, widths: tuple[int, int], mask: int, stored: str) -> Room:
    """What a configuration needs: a step's rows are its values too, and those of FP8 pass as float32."""
    (c_wide, r_wide), size = map(_power, widths), dtype.itemsize
    row = c_wide * size + r_wide * size
    wide = c_wide * 4 + r_wide * size if stored else row

    def loop(c: Config) -> Loop:
        stages = 1 if stored else c.stages
        return Loop(c.rows, c.keys, c.warps, stages, c.rows * row, c.keys * row, c.keys * wide, size, mask)

    # Those of float32 are multiplied without tensor cores.
    fewest = least(8) if stored and size == 2 else 16
    return Room(loop, (("stages", 2), ("keys", fewest), ("rows", 16), ("stages", 1)))


def _power(width: int) -> int:
    """The width of a tile for rows of `width` numbers: at least a swizzle in shared memory (`extend._widths`)."""
    return max(power_of_2(width), 64) if width else 0


@dataclasses.dataclass(frozen=True)
class Launch:
    """What is launched for a call: its configuration, and how its keys are cut (see the top of this file).

    Attributes:
        tiles: the most that a sequence has, and of which there are pieces.
        parts: shares of the key blocks; 0 = not `streamed`. cuts: the most pieces of a sequence, 1 = it is not cut.
        blocks: of keys that a sequence may have, where there are parts.
    """

    config: Config
    tiles: int
    parts: int = 0
    cuts: int = 1
    blocks: int = 0

    @property
    def cut(self) -> bool:
        return self.parts > 0 or self.cuts > 1

    def numbers(self, sequences: int) -> int:
        """int32 numbers of a plan; 0: there is none."""
        return 3 * (self.parts + 1) + 2 * sequences if self.parts else 0

    def pieces(self, sequences: int) -> int:
        """Rows of partial results: float32 [D_c] and its LSE each."""
        slots = 2 * self.parts if self.parts else sequences * self.cuts if self.cuts > 1 else 0
        return slots * self.tiles * self.config.rows


def launch_for(
    device: torch.device, dtype: torch.dtype, heads: int, widths: tuple[int, int], sequences: int, max_seqlen_q: int,
    max_seqlen_k: int, batch_invariant: bool = False, config: Config | None = None, additive: bool = False,
    stored: str = "", own: bool = False,
) -> Launch:  # fmt: skip
    """What `attend` launches, from what the host knows.

    Args:
        device, dtype, heads: of the queries. widths: (D_c, D_r). sequences: N.
        batch_invariant: nothing may depend on the rest of the batch.
        config: instead of the one in the table. additive: there is a mask that is added.
        stored: `stored_as` of the cache. own: the Hopper kernel takes tiles of 64 rows of such calls.
    """
    if config is None:
        rows = heads if batch_invariant else heads * max_seqlen_q
        config = config_for(device, dtype, widths, rows, additive, stored)
        if _class(device) == "hopper" and not batch_invariant:
            blocks = sequences * triton.cdiv(max_seqlen_k, config.keys)
            shares = max(runtime.processors(device) // triton.cdiv(rows, _FEWEST), 1)
            if triton.cdiv(blocks, shares) <= _BRIEF[own]:
                config = config_for(device, dtype, widths, _FEWEST, additive, stored)
            elif own and config.rows < _MOST and sequences < 4 * runtime.processors(device):
                # Many of its rows may be none, and yet it reads the cache faster: 32 sequences of 16k keys and 16 heads
                # take it 156 us, and tiles of 16 rows 230.
                config = config_for(device, dtype, widths, _MOST, additive, stored)
    tiles = triton.cdiv(heads * max_seqlen_q, config.rows)
    if batch_invariant:
        tokens = min(max_seqlen_q, CUT_TOKENS.value)
        cuts = CUTS if max_seqlen_k > config.keys * config.apart else 1
        return Launch(config, triton.cdiv(heads * tokens, config.rows), cuts=cuts)
    parts = _places(device, config) // tiles
    # Enough tiles keep all processors busy by themselves; what is in one block cannot be cut.
    if parts < 2 or sequences >= 4 * parts or max_seqlen_k <= config.keys * config.least:
        return Launch(config, tiles)
    return Launch(config, tiles, parts=parts, blocks=triton.cdiv(max_seqlen_k, config.keys))


def _places(device: torch.device, config: Config) -> int:
    """Programs that run at once."""
    return runtime.processors(device) * config.programs


def most(device: torch.device, heads: int, sequences: int, tokens: int, batch_invariant: bool) -> tuple[int, int]:
    """At least `Launch.pieces` and `Launch.numbers` of any call of so many sequences and tokens."""
    configs = {config for configs in _TABLE.values() for config in configs}
    if batch_invariant:
        rows = heads * min(tokens, CUT_TOKENS.value)
        return sequences * CUTS * max(triton.cdiv(rows, c.rows) * c.rows for c in configs), 0
    parts = max(_places(device, c) for c in configs)
    return 2 * max(_places(device, c) * c.rows for c in configs), 3 * (parts + 1) + 2 * sequences


def stored_as(dtype: torch.dtype) -> str:
    """How a cache of a dtype keeps latent rows: block128 (656 bytes, with scales), fp8_e4m3 or fp8_e5m2 (no scales), ""
    as the queries are."""
    return {torch.uint8: "block128", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}.get(dtype, "")


def _bounds(causal: bool, window: tuple[int, int], chunk: int) -> tuple[tuple[int, int, int], dict[str, bool]]:
    """(left, right, chunk), and which of them there are."""
    left, right = bounds(causal, window, chunk)
    return (left, right, chunk), {"LEFT": left >= 0, "RIGHT": right >= 0, "CHUNK": chunk > 0}


def plan(
    launch: Launch, seq_lens: Tensor, cu_seqlens_q: Tensor, *, causal: bool, window: tuple[int, int] = (-1, -1),
    chunk: int = 0, out: Tensor,
) -> None:  # fmt: skip
    """Deal out the key blocks of a launch with `parts`; once for all calls with the same lengths.

    Args:
        seq_lens: int32 [N]; cu_seqlens_q: int32 [N+1]. causal, window, chunk: as `attend`.
        out: int32 [launch.numbers(N)], written.
    """
    sequences = seq_lens.shape[0]
    limits, which = _bounds(causal, window, chunk)
    with runtime.device_of(seq_lens):
        _plan[(max(launch.parts + 1, sequences),)](
            out, out[3 * (launch.parts + 1) :], seq_lens, cu_seqlens_q, sequences, launch.parts, *limits,
            N=launch.config.keys, LEAST=launch.config.least, **which, num_warps=4,
        )  # fmt: skip


def attend(
    query: Tensor, cache: Tensor, *, tables: PagedTables, causal: bool, window: tuple[int, int] = (-1, -1),
    chunk: int = 0, scale: float, attn_mask: Tensor | None = None, tree: bool = False, out: Tensor,
    lse: Tensor | None = None, launch: Launch, shares: Tensor | None = None,
    pieces: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Latent attention over pages.

    Args:
        query: [T_q, H_q, D_c + D_r], dense last axis.
        cache: [pages, page_size, D_c + D_r], of the queries' dtype or in FP8, or uint8 [pages, page_size, 656], FP8
            rows with scales (`semantics.kv_quant`).
        tables: `polyattn.contract.PagedTables`.
        causal, window, chunk: as docs/semantics.md, S3 and S4. scale: of the products.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k], bool or added. tree: it is True but for the last columns.
        out: [T_q, H_q, D_c], dense last axis. lse: float32 [T_q, H_q], contiguous.
        launch: of `launch_for`. shares: of `plan`, where the launch has `parts`.
        pieces: float32 [launch.pieces(N), D_c] and [launch.pieces(N)], if there are any.
    """
    page_table, seq_lens, cu_seqlens_q = tables[:3]
    sequences, (T, heads, _), d_c, config = seq_lens.shape[0], query.shape, out.shape[2], launch.config
    limits, which = _bounds(causal, window, chunk)
    plain = attn_mask is None and scale > 0 and limits in ((-1, -1, 0), (-1, 0, 0))
    if plain and launch.parts and hopper.takes(query, cache, out, config.rows, config.keys):
        hopper.attend(
            query, cache, page_table, seq_lens, cu_seqlens_q, shares, out, lse, pieces, launch.tiles, launch.parts,
            scales(scale, 0.0)[0], causal,
        )  # fmt: skip
    else:
        while True:
            try:
                _launch(query, cache, tables, shares, limits, which, scale, attn_mask, tree, out, lse, launch, pieces)
                break
            except TOO_LARGE as error:
                # How the keys are cut hangs on the tiles: for this call only the pipeline can be smaller.
                less = smaller(launch.config, (("stages", 1),))
                additive = attn_mask is not None and attn_mask.dtype != torch.bool
                asked = _key(query.dtype, (d_c, query.shape[2] - d_c), launch.config.rows, additive)
                refuse(LATENT, asked, stored_as(cache.dtype), query.device, launch.config, error, last=less is None)
                launch = dataclasses.replace(launch, config=less)
    if launch.cut:
        most = launch.tiles * config.rows if launch.parts else min(T, CUT_TOKENS.value) * heads
        some, width, warps, together = merging(launch, sequences, most)
        width = min(width, _power(d_c))
        cuts = None if shares is None else shares[3 * (launch.parts + 1) :]
        with runtime.device_of(query):
            _merge[triton.cdiv(most, some), sequences, triton.cdiv(d_c, width)](
                seq_lens, cu_seqlens_q, out, lse, *pieces, cuts, out.stride(0), out.stride(1),
                sequences, launch.tiles, *limits,
                HEADS=heads, D_C=d_c, M=config.rows, N=config.keys, ROWS=some, TOGETHER=together, WIDTH=width,
                **which, **_cutting(launch), num_warps=warps,
            )  # fmt: skip


def merging(launch: Launch, sequences: int, most: int) -> tuple[int, int, int, int]:
    """(rows and columns of a program of `_merge`, its warps, pieces at a time), for `most` rows of each sequence."""
    if not launch.parts:
        # One for all batches, and all pieces at once: sums in another order are other bits.
        return (64, 512, 4, CUTS) if runtime.INTERPRETED else (1, 256, 4, CUTS)
    # Shares that a sequence has some of, if all are as long, and its blocks.
    pieces = min(launch.parts // sequences + 2, launch.blocks)
    # Rows of many pieces each: small programs, with the loads of all pieces on their way. A chip has room for a dozen a
    # processor; of many rows with few pieces they would come in waves that take longer than the products.
    wide = sequences * most <= _WIDE * pieces
    some, width, warps = (64, 512, 4) if runtime.INTERPRETED else (1, 64, 2) if wide else (8, 256, 4)
    return some, width, warps, 32 if wide else 2


def _cutting(launch: Launch) -> dict[str, int]:
    """How the keys are cut, as the kernels take it."""
    least = launch.config.least if launch.parts else launch.config.apart
    return {"STREAMED": launch.parts > 0, "LEAST": least, "CUTS": launch.cuts}


def _launch(
    query: Tensor, cache: Tensor, tables: PagedTables, shares: Tensor | None, limits: tuple[int, int, int],
    which: dict[str, bool], scale: float, attn_mask: Tensor | None, tree: bool, out: Tensor, lse: Tensor | None,
    launch: Launch, pieces: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """The portable kernel."""
    page_table, seq_lens, cu_seqlens_q = tables[:3]
    (T, heads, width), d_c, config = query.shape, out.shape[2], launch.config
    stored = stored_as(cache.dtype)
    cache = cache if stored in ("", "block128") else as_stored(cache, stored)
    rows, factors, rope = cache[..., :d_c], cache, cache[..., d_c:]
    if stored == "block128":
        rows, factors, rope = scaled_parts(cache, d_c)
        rows = as_stored(rows.view(torch.float8_e4m3fn), "fp8_e4m3")
    kind, attn_mask, mask_strides = mask_arguments(attn_mask)
    piece_out, piece_lse = (None, None) if pieces is None else pieces
    most = T * heads // config.rows + seq_lens.shape[0]
    grid = (launch.parts * launch.tiles, 1) if launch.parts else (most, launch.cuts)
    with runtime.device_of(query):
        _attend[grid](
            query, rows, factors, rope, page_table, seq_lens, cu_seqlens_q, attn_mask, out, lse, piece_out, piece_lse,
            shares, query.stride(0), query.stride(1), rows.stride(0), factors.stride(0), rope.stride(0),
            page_table.stride(0), *mask_strides, out.stride(0), out.stride(1), seq_lens.shape[0], launch.tiles, *limits,
            scales(scale, 0.0)[0],
            HEADS=heads, PAGE=cache.shape[1], D_C=d_c, D_R=width - d_c, ROW=rows.stride(1), SCALE_ROW=factors.stride(1),
            ROPE_ROW=rope.stride(1), M=config.rows, N=config.keys, C=_power(d_c), R=_power(width - d_c), MASK=kind,
            TREE=tree, FOLD=scale > 0 and kind != 2, STORED=stored, STAGES=config.stages, **which,
            **_cutting(launch), num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
