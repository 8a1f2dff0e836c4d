"""Attention of few queries over many pages: decoding, chains and small trees of drafts, a prefix that many share.

Split-KV. A program takes one item (`splits`: a range of keys of one sequence), one key head and one tile of rows. A row
is a query with one of the GROUP query heads that share the key head: a group fills the 16 rows that a tensor core has.
A sequence that is one item is written at once. Of one that is several items each program leaves a partial result, and
the last of them to arrive merges all, in the order of the keys: which one that is changes no bit, and no second launch
is needed.

Floor: every key and value of the batch is read once. What it takes to come near: two programs on a processor, 32 KB
tiles, three of them on the way; page numbers are loaded one tile ahead, and brought into the L2 two more before, so
that a row's address does not wait.

Keys past the end of a range are its last one again: loads need no mask, read nothing that is not the sequence's and
meet no leftovers; what a row sees is decided on its logits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.contract import Key, PagedTables
from polyattn_triton import runtime
from polyattn_triton.kernels import rules  # before Triton: it decides how that is imported
from polyattn_triton.kernels.arguments import MASKS, mask_arguments
from polyattn_triton.kernels.cached import block_scales, fp4_numbers, least, restored, scales_at, spread
from polyattn_triton.kernels.choices import EPOCH, architecture, chosen
from polyattn_triton.kernels.layout import scales_of, units
from polyattn_triton.kernels.pairs import IN_PAIRS, as_pairs, native, nvidia, pairs
from polyattn_triton.kernels.room import TOO_LARGE, Loop, Room, fitting, refuse, shared_memory, smaller
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import (
    LOG2E,
    accumulate,
    bounds,
    dot,
    end_key,
    first_key,
    joined,
    logits,
    natural_lse,
    seen,
    share,
    share_with_sink,
)
from polyattn_triton.kernels.splits import FIELDS, Allocate, Items, Shape, power_of_2
from polyattn_triton.records.tuned import DECODE
from polyattn_triton.runtime import device_of

import triton  # isort: skip
import triton.language as tl  # isort: skip

__all__ = ["Config", "config_for", "decode", "items_for", "parts_for"]


@triton.jit
def _columns(base, at, FIRST: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """WIDTH columns of rows at `at` [N], from FIRST on in steps; zeros from D on."""
    c = FIRST + tl.arange(0, WIDTH) * STEP
    if FIRST + (WIDTH - 1) * STEP >= D:
        return tl.load(base + at[:, None] + c[None, :], mask=(c < D)[None, :], other=0)
    else:
        return tl.load(base + at[:, None] + c[None, :])


@triton.jit
def _new(x, factor, KIND: tl.constexpr, stored_dtype: tl.constexpr, dtype: tl.constexpr):
    """New numbers as the cache would hold them, before their scale."""
    if KIND != "auto":
        x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(factor + 0.0, x.shape))
    return restored(x, KIND, stored_dtype, dtype)


@triton.jit
def _side(
    rows, at, scales, scale_at, dtype: tl.constexpr, stored_dtype: tl.constexpr, KIND: tl.constexpr,
    SCALES: tl.constexpr, FRESH: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
    N: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys or values [N, WIDTH], before their scale (that of FP4 is in it): stored ones, or with FRESH new ones as they
    would be stored. With PAIRS two tiles, the even and the odd columns; else the second is the first."""
    if SCALES == "block16":
        factor = block_scales(_columns(scales, scale_at, 0, 1, WIDTH // 16, D // 16))
        if FRESH:
            factor = spread(factor, N, WIDTH)
            factor = tl.where(factor == 0, 1.0, factor)  # columns from D on
            x = _new(_columns(rows, at, 0, 1, WIDTH, D), factor, KIND, stored_dtype, tl.float32) * factor
            x = cast(x, dtype)
        else:
            x = fp4_numbers(_columns(rows, at, 0, 1, WIDTH // 2, D // 2), factor, N, WIDTH, dtype)
        return x, x
    elif FRESH:
        factor = scales
        if SCALES == "token":
            factor = tl.load(scales + scale_at).to(tl.float32)[:, None]
        if PAIRS:
            x = _new(_columns(rows, at, 0, 2, WIDTH // 2, D), factor, KIND, stored_dtype, dtype)
            y = _new(_columns(rows, at, 1, 2, WIDTH // 2, D), factor, KIND, stored_dtype, dtype)
            return x, y
        else:
            x = _new(_columns(rows, at, 0, 1, WIDTH, D), factor, KIND, stored_dtype, dtype)
            return x, x
    elif PAIRS:
        return pairs(_columns(rows, at, 0, 1, WIDTH // 2, D // 2), KIND, NATIVE, dtype)
    else:
        x = cast(_columns(rows, at, 0, 1, WIDTH, D), dtype)
        return x, x


@triton.jit
def _tile(
    q, q2, acc, acc2, top, total, p, unit, j, live, k, v, k_at, v_at, k_scale, v_scale, ks_at, vs_at,
    mask, mask_key, mask_from, s_k, left, right, chunk, scale, softcap, dtype: tl.constexpr,
    stored_dtype: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, FRESH: tl.constexpr, PAIRS: tl.constexpr,
    NATIVE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """One tile of keys j [N] into the running softmax; rows see no keys from `live` on."""
    keys, keys2 = _side(
        k, k_at, k_scale, ks_at, dtype, stored_dtype, KIND, SCALES, FRESH, PAIRS, NATIVE, N, BLOCK_D, D
    )  # fmt: skip
    products = dot(q, keys.T)
    if PAIRS:
        products = dot(q2, keys2.T, products)
        products *= unit[:, None]
    if SCALES == "token":
        products *= tl.load(k_scale + ks_at).to(tl.float32)[None, :]
    found = logits(products, scale, softcap, SOFTCAP, dtype)
    if MASK != "":
        at = mask[:, None] + j.to(tl.int64)[None, :] * mask_key
        if TREE:
            given = tl.load(at, mask=((j >= mask_from) & (j < s_k))[None, :], other=1)
        else:
            given = tl.load(at, mask=(j < s_k)[None, :], other=0)
        if MASK == "bool":
            found = tl.where(given != 0, found, float("-inf"))
        else:
            found += given.to(tl.float32) * LOG2E
    visible = seen(p[:, None], j[None, :], s_k, left, right, chunk, LEFT, RIGHT, CHUNK) & (j < live)[None, :]
    weights, factor, top, total = accumulate(top, total, tl.where(visible, found, float("-inf")))
    values, values2 = _side(
        v, v_at, v_scale, vs_at, dtype, stored_dtype, KIND, SCALES, FRESH, PAIRS, NATIVE, N, BLOCK_E, E
    )  # fmt: skip
    acc *= factor[:, None]
    acc2 *= factor[:, None]
    if SCALES == "token":
        scaling = tl.load(v_scale + vs_at).to(tl.float32)
        # Scales may be too small for float16 beside weights: the largest is multiplied in afterwards.
        most = tl.maximum(tl.max(scaling, 0), 1.1754943508222875e-38)
        weights = cast(weights * (scaling / most)[None, :], dtype)
        acc += dot(weights, values) * most
        if PAIRS:
            acc2 += dot(weights, values2) * most
    else:
        weights = cast(weights, dtype)
        acc = dot(weights, values, acc)
        if PAIRS:
            acc2 = dot(weights, values2, acc2)
    return acc, acc2, top, total


@triton.jit
def _cells(page, known, first, PAGE: tl.constexpr, WHOLE: tl.constexpr):
    """(page, place in it), int64, of keys `known` [N] of the tile that starts at `first`."""
    if WHOLE:
        return page.to(tl.int64), (known - first // PAGE * PAGE).to(tl.int64)
    else:
        return page.to(tl.int64), (known.to(tl.uint32) % PAGE).to(tl.int64)


@triton.jit
def _page(table, first, n, low, limit, PAGE: tl.constexpr, WHOLE: tl.constexpr):
    """Page numbers of the tile that starts at `first`, one where it lies in one page; those of [low, limit) only."""
    if WHOLE:
        return tl.load(table + tl.minimum(first, limit - 1) // PAGE)
    else:
        return tl.load(table + tl.maximum(tl.minimum(first + n, limit - 1), low).to(tl.uint32) // PAGE)


@triton.jit
def _fetch_pages(table, key, limit, PAGE: tl.constexpr, N: tl.constexpr):
    """Bring the page numbers of the tile of `key` into the L2: `_page`, one tile ahead, then waits for that alone."""
    SECTORS: tl.constexpr = 1 if N // PAGE <= 8 else N // PAGE // 8
    at = table + tl.minimum(key + tl.arange(0, SECTORS) * (N // SECTORS), limit - 1).to(tl.uint32) // PAGE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _deliver(
    acc, top, total, valid, token, h, out, lse, sinks, out_token, out_head, lse_token, lse_head, v_factor,
    E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the output and the LSE of rows whose softmax is complete."""
    if lse is not None:
        tl.store(lse + token * lse_token + h * lse_head, natural_lse(top, total), mask=valid)
    if sinks is not None:
        factor = share_with_sink(top, total, tl.load(sinks + h).to(tl.float32))
    else:
        factor = share(total)
    c = tl.arange(0, BLOCK_E)
    rows = cast(acc * (factor * v_factor)[:, None], out.dtype.element_ty)
    at = out + (token * out_token + h * out_head)[:, None] + c[None, :]
    tl.store(at, rows, mask=valid[:, None] & (c < E)[None, :])


@triton.jit
def _whose(rows, start, queries, head, GROUP: tl.constexpr):
    """(query within its sequence, packed token, query head), of rows; those past the end are the last one again."""
    rows = tl.minimum(rows, queries * GROUP - 1)
    i = rows // GROUP
    return i, (start + i).to(tl.int64), (head * GROUP + rows - i * GROUP).to(tl.int64)


@triton.jit
def _leave(acc, top, total, valid, outs, lses, item, M: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write the partial result of an item: normalised rows and their LSE in base 2."""
    cells = (item * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * M + tl.arange(0, M)
    c = tl.arange(0, BLOCK_E)
    tl.store(
        outs + cells[:, None] * E + c[None, :], acc * share(total)[:, None], mask=valid[:, None] & (c < E)[None, :]
    )
    some = total != 0
    found = tl.where(some, top, 0.0) + tl.log2(tl.where(some, total, 1.0))
    tl.store(lses + cells, tl.where(some, found, float("-inf")), mask=valid)


@triton.jit
def _combine(
    outs, lses, first, parts, first_row, start, queries, head, out, lse, sinks, out_token, out_head, lse_token,
    lse_head, v_factor, GROUP: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of items [first, first + parts), one after the other, and write the rows. AT_ONCE of
    them are loaded together."""
    column, columns = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_E)
    _, token, h = _whose(first_row + r, start, queries, head, GROUP)
    valid = first_row + r < queries * GROUP
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_E), tl.float32)
    for part in tl.range(0, parts, AT_ONCE, num_stages=1):
        for further in tl.static_range(AT_ONCE):
            number = part + further
            cells = ((first + number) * columns + column).to(tl.int64) * M + r
            there = valid & (number < parts)
            # From the L2: other processors wrote them.
            weight = tl.load(lses + cells, mask=there, other=float("-inf"), cache_modifier=".cg")
            kept = there[:, None] & (c < E)[None, :]
            partial = tl.load(outs + cells[:, None] * E + c[None, :], mask=kept, other=0.0, cache_modifier=".cg")
            acc, top, total = joined(acc, top, total, partial, weight)
    _deliver(
        acc, top, total, valid, token, h, out, lse, sinks,
        out_token, out_head, lse_token, lse_head, v_factor, E, BLOCK_E,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "table_row", "mask_sequence", "mask_head", "mask_row", "left", "right", "chunk",
    ],
    # Of `outs`, whose rows are loaded and stored 16 bytes at a time where it begins at such a place, there is one kind.
    do_not_specialize_on_alignment=["table", "mask", "lse", "k_scale", "v_scale", "sinks", "lses"],
)  # fmt: skip
def _decode(
    query, k, v, out, lse, table, items, counters, outs, lses, fresh_k, fresh_v, mask, sinks, k_scale, v_scale,
    q_token, q_head, out_token, out_head, lse_token, lse_head, k_page, k_token, k_head, v_page, v_token, v_head,
    fresh_k_token, fresh_k_head, fresh_v_token, fresh_v_head, mask_sequence, mask_head, mask_row, mask_key,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, table_row, left, right, chunk, scale, softcap,
    GROUP: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr,
    NATIVE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    TREE: tl.constexpr, PAIRS: tl.constexpr, TWINS: tl.constexpr,
    PREFETCH: tl.constexpr, UNIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0)
    item = tl.program_id(1)
    head, tile = column // TILES, column % TILES
    fields = items + item * FIELDS
    sequence = tl.load(fields)
    s_k = tl.load(fields + 1)
    start = tl.load(fields + 2)
    queries = tl.load(fields + 3)
    begin = tl.load(fields + 4)
    end = tl.load(fields + 5)
    first_item = tl.load(fields + 6)
    parts = tl.load(fields + 7)
    if (sequence < 0) | (tile * M >= queries * GROUP):
        return

    dtype: tl.constexpr = tl.float16 if PAIRS and query.dtype.element_ty != tl.float32 else query.dtype.element_ty
    WHOLE: tl.constexpr = PAGE % N == 0
    rows = tile * M + tl.arange(0, M)
    i, token, h = _whose(rows, start, queries, head, GROUP)
    p = i + s_k - queries
    # Some row sees keys in [low, limit).
    low = tl.minimum(first_key(tile * M // GROUP + s_k - queries, left, chunk, LEFT, CHUNK), s_k)
    last = tl.minimum(tile * M + M, queries * GROUP) - 1
    limit = tl.minimum(end_key(last // GROUP + s_k - queries, s_k, right, RIGHT), end)
    begin = tl.maximum(begin, low // N * N)
    fresh_from = s_k
    if fresh_k is not None:
        fresh_from = tl.maximum(s_k - queries, 0)
    # Nothing was written yet where the new rows will be: where all that is seen is among them, no page is read.
    paged = tl.where(low < fresh_from, tl.minimum(limit, fresh_from), begin)

    table += sequence.to(tl.int64) * table_row
    n = tl.arange(0, N)
    page = n * 0
    if WHOLE:
        page = sequence * 0
    if begin < paged:
        page = _page(table, begin, n, low, paged, PAGE, WHOLE)

    at = query + (token * q_token + h * q_head)[:, None]
    if PAIRS:
        c = 2 * tl.arange(0, BLOCK_D // 2)
        q = tl.load(at + c[None, :], mask=(c < D)[None, :], other=0.0).to(tl.float32)
        q2 = tl.load(at + c[None, :] + 1, mask=(c < D)[None, :], other=0.0).to(tl.float32)
        # A power of two for each row, so that float16 holds whatever the query's dtype holds.
        bits = tl.maximum(tl.max(tl.abs(q), 1), tl.max(tl.abs(q2), 1)).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 1 << 23), 253 << 23)
        unit = bits.to(tl.float32, bitcast=True)
        shrink = ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]
        q, q2 = cast(q * shrink, dtype), cast(q2 * shrink, dtype)
    else:
        c = tl.arange(0, BLOCK_D)
        q = tl.load(at + c[None, :], mask=(c < D)[None, :], other=0.0)
        q2 = q
        unit = tl.zeros((M,), tl.float32)

    k += head.to(tl.int64) * k_head * UNIT
    v += head.to(tl.int64) * v_head * UNIT
    if fresh_k is not None:
        fresh_k += start.to(tl.int64) * fresh_k_token + head * fresh_k_head
        fresh_v += start.to(tl.int64) * fresh_v_token + head * fresh_v_head
    if MASK != "":
        mask = mask + sequence.to(tl.int64) * mask_sequence + i.to(tl.int64) * mask_row + h * mask_head
    k_scale, v_scale, factor, v_factor = scales_at(k_scale, v_scale, head, ks_head, vs_head, SCALES)
    scale *= factor

    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_E // 2 if PAIRS else BLOCK_E), tl.float32)
    acc2 = tl.zeros((M, BLOCK_E // 2 if PAIRS else 1), tl.float32)
    stored_dtype: tl.constexpr = k.dtype.element_ty
    for first in tl.range(begin, paged, N, num_stages=STAGES):
        j = first + n
        known = tl.minimum(j, paged - 1)
        if LEFT or CHUNK:
            known = tl.maximum(known, low)
        cell, place = _cells(page, known, first, PAGE, WHOLE)
        if PREFETCH:
            _fetch_pages(table, first + 3 * N, paged, PAGE, N)
        # One tile ahead of the rows that need it.
        page = _page(table, first + N, n, low, paged, PAGE, WHOLE)
        k_at = (cell * k_page + place * k_token) * UNIT
        v_at = k_at if TWINS else (cell * v_page + place * v_token) * UNIT
        acc, acc2, top, total = _tile(
            q, q2, acc, acc2, top, total, p, unit, j, paged,
            k, v, k_at, v_at,
            k_scale, v_scale, cell * ks_page + place * ks_token, cell * vs_page + place * vs_token,
            mask, mask_key, s_k - queries, s_k, left, right, chunk, scale, softcap, dtype, stored_dtype,
            KIND, SCALES, False, PAIRS, NATIVE, N, D, BLOCK_D, E, BLOCK_E, LEFT, RIGHT, CHUNK, SOFTCAP, MASK, TREE,
        )  # fmt: skip
    if fresh_k is not None:
        for first in tl.range(tl.maximum(begin, fresh_from), limit, N, num_stages=1):
            j = first + n
            known = tl.minimum(j, limit - 1)
            cell = tl.load(table + known // PAGE).to(tl.int64)
            place = (known % PAGE).to(tl.int64)
            new = (known - fresh_from).to(tl.int64)
            acc, acc2, top, total = _tile(
                q, q2, acc, acc2, top, total, p, unit, j, limit,
                fresh_k, fresh_v, new * fresh_k_token, new * fresh_v_token,
                k_scale, v_scale, cell * ks_page + place * ks_token, cell * vs_page + place * vs_token,
                mask, mask_key, s_k - queries, s_k, left, right, chunk, scale, softcap, dtype, stored_dtype,
                KIND, SCALES, True, PAIRS, NATIVE, N, D, BLOCK_D, E, BLOCK_E, LEFT, RIGHT, CHUNK, SOFTCAP, MASK, TREE,
            )  # fmt: skip
    if PAIRS:
        acc = tl.interleave(acc, acc2)

    if parts == 1:
        _deliver(
            acc, top, total, rows < queries * GROUP, token, h, out, lse, sinks,
            out_token, out_head, lse_token, lse_head, v_factor, E, BLOCK_E,
        )  # fmt: skip
    elif SPLIT:
        _leave(acc, top, total, rows < queries * GROUP, outs, lses, item, M, E, BLOCK_E)
        # All threads of the program have written before one of them says so.
        tl.debug_barrier()
        counter = counters + sequence * tl.num_programs(0) + column
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == parts - 1:
            tl.store(counter, 0)  # for the next call
            _combine(
                outs, lses, first_item, parts, tile * M, start, queries, head, out, lse, sinks,
                out_token, out_head, lse_token, lse_head, v_factor, GROUP, M, ROWS, AT_ONCE, E, BLOCK_E,
            )  # fmt: skip


class Config(NamedTuple):
    """How a launch is cut.

    Attributes:
        M, N: rows and keys of a tile. warps, stages: of a program and its pipeline.
        resident: programs that a processor holds at a time. least: tiles of keys of the shortest part.
    """

    M: int
    N: int
    warps: int
    stages: int
    resident: int
    least: int


_LEAST = 64
"""Columns of a tile, at least: of FP4 that many (`cached.least`), of 16 bits a whole swizzle in shared memory, so that
keys and values have the same, without which ptxas 12.8 miscompiles `wgmma` (`extend._widths` has the story)."""
FIXED_KEYS = (128, 2048)
"""Keys of the shortest and of the longest part of batch-invariant splits: one of 2k keys is 16 parts, and so is one of
32k."""

_TILE_BYTES = {"hopper": 16384, "cuda": 16384, "other": 8192}
"""Of the keys of a tile, and of its values."""
_CONFIGS: dict[tuple[str, int], tuple[int, int, int, int]] = {
    # (architecture, rows of a tile): warps, stages, resident, least
    ("hopper", 16): (4, 3, 2, 1),
    ("hopper", 32): (4, 3, 2, 1),
    ("hopper", 64): (4, 3, 2, 2),
    ("cuda", 16): (4, 3, 2, 1),
    ("cuda", 32): (4, 3, 2, 1),
    ("cuda", 64): (4, 3, 1, 2),
    ("other", 16): (4, 2, 2, 1),
    ("other", 32): (4, 2, 2, 1),
    ("other", 64): (4, 2, 2, 2),
}


def _default(device: torch.device, rows: int, width: int, bits: int) -> Config:
    """The table's entry. `bits`: of a stored number, or of the query's where that is float32."""
    # A cache of 8 bits takes two tiles and two accumulators: 64 rows of them do not fit the registers.
    M = min(max(power_of_2(rows), 16), 32 if bits <= 8 else 64)
    if rules.INTERPRETED:
        return Config(M, 32, 4, 1, 1, 1)
    where = architecture(device)
    where = "cuda" if where == "blackwell" else where
    warps, stages, resident, shortest = _CONFIGS[where, M]
    itemsize = max(bits // 8, 1)
    N = min(max(_TILE_BYTES[where] // (power_of_2(width) * itemsize), 16), 128)
    if bits <= 8 and M == 16 and where == "hopper":
        # Turning bytes into numbers takes longer than reading them: more programs to hide it, and smaller ones where
        # that was measured.
        resident = 3
        if bits == 8 and power_of_2(width) == 128:
            N, warps, stages, resident = 64, 2, 4, 4
    if itemsize == 4:
        N = max(N // 2, 16)  # multiplied without tensor cores, out of registers
    elif M == 64 and width > 128:
        warps = 8
    return Config(M, N, warps, stages, resident, shortest)


@functools.lru_cache(maxsize=1024)
def config_for(
    device: torch.device, dtype: torch.dtype, bits: int, dims: tuple[int, int], rows: int, _epoch: int = 0
) -> Config:
    """As it was measured, else the table's.

    Args:
        dtype: of the query. bits: of a stored number. dims: (D, D_v). rows: queries of a sequence times heads of a
            group.
    """
    wide = dtype == torch.float32
    found = _default(device, rows, max(dims), 32 if wide else bits)
    # A bool mask, numbers of 8 bits, goes into the weights.
    fewest = 16 if wide else least(min(bits, 8))
    return chosen(
        DECODE, _key(dtype, bits, dims, found.M), found, device, (_room(dtype, bits, dims, fewest),),
        within=lambda config: config._replace(N=max(config.N, fewest)),
    )  # fmt: skip


def _bits(dtype: torch.dtype, kv_dtype: str) -> int:
    """Of a stored number."""
    return {"auto": 8 * dtype.itemsize, "fp4_e2m1": 4}.get(kv_dtype, 8)


_PIPELINE = (("stages", 1),)


def _key(dtype: torch.dtype, bits: int, dims: tuple[int, int], rows: int) -> Key:
    return (str(dtype).removeprefix("torch."), bits, *dims, rows)


def _room(dtype: torch.dtype, bits: int, dims: tuple[int, int], fewest: int, mask: int = 0) -> Room:
    """What a configuration needs. Its rows are part of how the batch is cut: they do not shrink."""
    d, e = (max(power_of_2(width), _LEAST) for width in dims)
    stored = bits if bits < 8 * dtype.itemsize else 0

    def loop(c: Config) -> Loop:
        held, once = c.M * d * dtype.itemsize, c.N * max(d, e) * dtype.itemsize
        step = c.N * (d + e) * bits // 8
        return Loop(c.M, c.N, c.warps, c.stages, held, step, once, dtype.itemsize, mask, stored)

    return Room(loop, (("stages", 2), ("N", fewest), ("stages", 1)))


@functools.lru_cache(maxsize=1024)
def parts_for(programs: int, blocks: int, processors: int, resident: int, cells: int = 512) -> int:
    """Parts of the longest sequence, so that a uniform batch ends soonest.

    The estimate counts tiles, one after the other on the busiest processor, and was fitted to an H200, where a tile
    takes 1 us at full bandwidth. A lone program reaches 70 % of that. Starting and draining cost 4 us, twice that
    for programs which share a processor. Leaving parts and merging them costs 1.5 us, and 2.4 more for 16 parts of 16
    rows of 128.

    Args:
        programs: of the batch, were nothing split. blocks: tiles of the longest sequence. cells: numbers of a part.
    """
    slots = processors * resident
    if programs >= 4 * slots:
        return 1  # they have long ceased to end together

    def estimate(parts: int) -> float:
        waves, rest = divmod(programs * parts, slots)
        deep = -(-rest // processors)
        longest = -(-blocks // parts) + 0.5  # what a program does beside its tiles
        tiles = (waves * resident + (1.4 if deep == 1 else deep)) * longest
        return tiles + (4 if not waves and deep == 1 else 8) + (1.5 + parts * merging if parts > 1 else 0)

    merging = 0.15 * max(cells / 2048, 0.5)

    best = min(range(1, min(blocks, max(2 * processors // max(programs, 1), 8)) + 1), key=estimate, default=1)
    # No more than the longest part asks for.
    return -(-blocks // -(-blocks // best))


@functools.lru_cache(maxsize=1024)
def _cut(
    dims: tuple[int, int], dtype: torch.dtype, device: torch.device, heads: tuple[int, int], sequences: int,
    max_seqlen_q: int, max_seqlen_k: int, window: tuple[int, int], chunk: int, kv_dtype: str, invariant: bool,
    single: bool, config: Config | None, epoch: int,
) -> tuple[Shape, Config]:  # fmt: skip
    """`items_for` without the memory."""
    rows = max_seqlen_q * (heads[0] // heads[1])
    if config is None:
        own = 16 if invariant and not single else rows
        config = config_for(device, dtype, _bits(dtype, kv_dtype), dims, own, epoch)
    keys = (32, 64) if rules.INTERPRETED else FIXED_KEYS
    columns = heads[1] * -(-rows // config.M)
    processors = runtime.processors(device)
    longest = max_seqlen_k
    if chunk or window[0] >= 0:
        # Keys that some query of a sequence sees.
        longest = min(longest, max_seqlen_q + (chunk or window[0]))
    cells = min(config.M, power_of_2(rows)) * max(power_of_2(dims[1]), _LEAST)
    parts = parts_for(columns * sequences, max(-(-longest // config.N), 1), processors, config.resident, cells)
    # Where nothing is to be split, one sequence much longer than the others still is.
    spare = min(processors * config.resident // columns, sequences - 1) if parts == 1 else 0
    shape = Shape(
        sequences=sequences,
        columns=columns,
        rows=config.M,
        width=dims[1],
        max_seqlen_k=max_seqlen_k,
        block=config.N,
        target=parts * sequences + spare,
        least=config.least,
        fixed=(max(keys[0] // config.N, 1), max(keys[1] // config.N, 1)) if invariant else None,
        window=window,
        chunk=chunk,
    )
    return shape, config


def items_for(
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    heads: tuple[int, int],
    sequences: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window: tuple[int, int],
    chunk: int,
    kv_dtype: str = "auto",
    invariant: bool = False,
    single: bool = False,
    allocate: Allocate | None = None,
    config: Config | None = None,
) -> tuple[Items, Config]:
    """How calls of these shapes are cut, and the memory for it. `Items.share_out` is to follow, for each step.

    Args:
        dims: (D, D_v). dtype: of the query. heads: (H_q, H_kv). sequences: N.
        window: causal is a right bound of 0, and so is chunk: see `bounds`.
        invariant: parts that follow from the sequence alone, and tiles that are the same for all batches: a sequence's
            results do not depend on what else is in the batch. single: no batch has a sequence with several queries, so
            that tiles may be as small as one needs.
        allocate: where memory comes from; None = torch. config: None = the table's.
    """
    shape, config = _cut(
        dims, dtype, device, heads, sequences, max_seqlen_q, max_seqlen_k, window, chunk, kv_dtype, invariant, single,
        config, EPOCH.value,
    )  # fmt: skip

    def empty(name: str, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    return Items(shape, allocate or empty), config


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    tables: PagedTables,
    page_size: int,
    hnd: bool,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    scale: float,
    softcap: float = 0.0,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    tree: bool = False,
    sinks: Tensor | None = None,
    kv_dtype: str = "auto",
    kv_scales: str = "",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None = None,
    invariant: bool = False,
    single: bool = False,
    plan: tuple[Items, Config] | None = None,
) -> None:
    """Attention of a few packed queries for each sequence over a paged cache (S9). Waits for nothing.

    Args:
        query to lse: as `kernels.extend.extend`.
        invariant, single: as `items_for`. plan: what `items_for` gave, shared out for these lengths; None = made here,
            which costs another launch.
    """
    T_q, H_q, D = query.shape
    page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[:5]
    sequences = seq_lens.shape[0]
    if not T_q or not sequences:
        return
    heads, E = key_cache.shape[1 if hnd else 2], out.shape[2]
    kind = kv_dtype if key_cache.dtype.itemsize == 1 else "auto"
    k_scale, k_scale_strides = scales_of(k_scale, key_cache, kv_scales, hnd)
    v_scale, v_scale_strides = scales_of(v_scale, value_cache, kv_scales, hnd)
    k, v = as_pairs(key_cache, kind), as_pairs(value_cache, kind)
    unit, k_strides, v_strides = units(k, v, hnd)
    masked, attn_mask, mask_strides = mask_arguments(attn_mask)
    planned = plan
    while True:
        if planned is None:
            plan = items_for(
                (D, E), query.dtype, query.device, heads=(H_q, heads), sequences=sequences, max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k, window=bounds(causal, window, chunk), chunk=chunk, kv_dtype=kv_dtype,
                invariant=invariant, single=single,
            )  # fmt: skip
            plan[0].share_out(seq_lens, cu_seqlens_q)
        assert plan is not None
        items, config = plan
        columns = items.shape.columns
        numbers, constants = _fixed(
            query.device, query.dtype, (D, E), (H_q, heads), max_seqlen_q, page_size, kind, kv_scales, causal, window,
            chunk, scale, softcap, masked, 0 if attn_mask is None else attn_mask.itemsize, tree, columns,
            invariant and not single, config,
        )  # fmt: skip
        try:
            with device_of(query):
                _decode[(columns, items.count)](
                    query, k, v, out, lse, page_table, items.table, items.counters, items.outs, items.lses, key, value,
                    attn_mask, sinks, k_scale, v_scale,
                    *query.stride()[:2], *out.stride()[:2], *((0, 0) if lse is None else lse.stride()),
                    *k_strides, *v_strides,
                    *((0, 0) if key is None else key.stride()[:2]), *((0, 0) if value is None else value.stride()[:2]),
                    *mask_strides, *k_scale_strides, *v_scale_strides, page_table.stride(0), *numbers,
                    TWINS=k_strides == v_strides, UNIT=unit, SPLIT=items.count > sequences, **constants,
                )  # fmt: skip
            return
        except TOO_LARGE as error:
            # What was planned for has its tiles: only its pipeline can be smaller.
            less = smaller(config, _PIPELINE)
            asked = _key(query.dtype, _bits(query.dtype, kind), (D, E), config.M)
            last = planned is not None and less is None
            refuse(DECODE, asked, None, query.device, config, error, last=last)
            plan = planned = None if planned is None else (items, less)


@functools.lru_cache(maxsize=1024)
def _fixed(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int], max_seqlen_q: int,
    page_size: int, kind: str, kv_scales: str, causal: bool, window: tuple[int, int], chunk: int, scale: float,
    softcap: float, masked: int, mask_bytes: int, tree: bool, columns: int, fixed_rows: bool, config: Config,
) -> tuple[tuple[float, ...], dict[str, Any]]:  # fmt: skip
    """What does not differ from layer to layer: numbers for the kernel, and what it is compiled for."""
    # A plan is made without knowing of masks.
    room = _room(dtype, _bits(dtype, kind), dims, config.N, mask_bytes)._replace(shrinks=_PIPELINE)
    config = fitting(config, (room,), architecture(device), shared_memory(device))
    left, right = bounds(causal, window, chunk)
    (D, E), group = dims, heads[0] // heads[1]
    block_d, block_e = max(power_of_2(D), _LEAST), max(power_of_2(E), _LEAST)
    rows = config.M if fixed_rows else min(config.M, power_of_2(max_seqlen_q * group))
    # Numbers that all threads load together.
    merged = 2048 * config.warps
    return (max(left, 0), max(right, 0), chunk, *rules.scales(scale, softcap)), {
        "GROUP": group, "TILES": columns // heads[1], "PAGE": page_size, "KIND": kind, "SCALES": kv_scales,
        "NATIVE": native(device, kind), "D": D, "BLOCK_D": block_d, "E": E, "BLOCK_E": block_e, "LEFT": left >= 0,
        "RIGHT": right >= 0, "CHUNK": chunk > 0, "SOFTCAP": softcap != 0, "MASK": MASKS[masked],
        "TREE": tree and masked > 0, "PAIRS": kind in IN_PAIRS,
        "PREFETCH": nvidia(device) and page_size & (page_size - 1) == 0, "M": config.M, "N": config.N, "ROWS": rows,
        "AT_ONCE": min(max(merged // (rows * block_e), 1), 8), "STAGES": config.stages, "num_warps": config.warps,
        "num_stages": config.stages,
    }  # fmt: skip
