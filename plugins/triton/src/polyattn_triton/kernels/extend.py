"""Attention of packed queries over pages: extend, verification of drafts, mixed batches.

One program takes a tile of rows of one sequence and one key head. A row is a query with one of the GROUP query heads
that share the key head, so that few queries fill a tile. It walks along the keys of its sequence, page by page; nothing
is gathered first. Keys past the end of what may be read are the last one again: loads need no mask, read nothing that
is not the sequence's and meet no leftovers; what a row sees is decided on its logits.

Tiles are found on the device: number floor(start * GROUP / M) + n is the first of sequence n. A sequence never has
more tiles than lie between that number and the next one's, and T_q and N alone say how many numbers there are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from polyattn.contract import PagedTables
from polyattn_triton import runtime
from polyattn_triton.kernels import rules  # first: it decides how Triton is imported

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

from polyattn.contract import Key  # isort: skip
from polyattn_triton.kernels.arguments import MASKS, known_aligned, mask_arguments
from polyattn_triton.kernels.cached import (
    as_stored,
    block_scales,
    fp4_numbers,
    least,
    numbers,
    restored,
    scales_at,
    spread,
)
from polyattn_triton.kernels.choices import EPOCH, architecture, chosen
from polyattn_triton.kernels.layout import scales_of, strides
from polyattn_triton.kernels.pools import Matrix, Memory, Pools, pools_of
from polyattn_triton.kernels.room import TOO_LARGE, Loop, Room, refuse
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import (
    LOG2E,
    accumulate,
    bounds,
    dot,
    end_key,
    first_key,
    logits,
    natural_lse,
    seen,
    share,
    share_with_sink,
)
from polyattn_triton.kernels.splits import power_of_2, ranges
from polyattn_triton.kernels.tiles import parts
from polyattn_triton.records.tuned import EXTEND
from polyattn_triton.runtime import device_of

__all__ = ["Config", "config_for", "extend", "ranges_for"]


@triton.jit
def _place(pid, starts, sequences, tiles, M: tl.constexpr, GROUP: tl.constexpr, UNIFORM: tl.constexpr):
    """(sequence, tile in it) of tile `pid`. UNIFORM: all sequences have `tiles` of them."""
    if UNIFORM:
        n = pid // tiles
        return n, pid - n * tiles
    else:
        low = pid * 0
        high = low + sequences
        while low < high:
            middle = (low + high) // 2
            if tl.load(starts + middle) * GROUP // M + middle <= pid:
                low = middle + 1
            else:
                high = middle
        n = low - 1
        return n, pid - (tl.load(starts + n) * GROUP // M + n)


@triton.jit
def _pages(table, n, lowest, limit, N: tl.constexpr, PAGE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pages of keys n + [0, N), those outside [lowest, limit) moved to its ends: one page where that is sure (ALIGNED:
    n is a multiple of N), [N] otherwise. Nothing is read where n is no key."""
    if ALIGNED and PAGE % N == 0:
        return tl.load(table + n // PAGE, mask=n < limit, other=0)
    else:
        i = tl.arange(0, N)
        j = tl.minimum(tl.maximum(n + i, lowest), limit - 1)
        return tl.load(table + j // PAGE, mask=i * 0 + n < limit, other=0)


@triton.jit
def _columns(base, offset, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Columns [START, START + WIDTH) of rows at `offset` [N], zeros from D on."""
    c = START + tl.arange(0, WIDTH)
    at = base + offset[:, None] + c[None, :]
    if START + WIDTH > D:
        # A float: no integer becomes FP8.
        return tl.load(at, mask=(c < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _part(
    rows, offset, scales, scale_offset, dtype: tl.constexpr, stored_dtype: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, FRESH: tl.constexpr,
    N: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A tile [N, WIDTH] of keys or values: stored rows, or new ones as they would be stored, before their scale. Only
    the scales of FP4 are in it."""
    if FRESH:
        x = _columns(rows, offset, START, WIDTH, D).to(tl.float32)
        if KIND == "fp4_e2m1":
            factor = spread(block_scales(_columns(scales, scale_offset, START // 16, WIDTH // 16, D // 16)), N, WIDTH)
            # Columns from D on have none.
            x = tl.div_rn(x, tl.where(factor == 0, 1.0, factor))
            return cast(restored(x, KIND, stored_dtype, tl.float32) * factor, dtype)
        elif SCALES == "token":
            x = tl.div_rn(x, tl.load(scales + scale_offset).to(tl.float32)[:, None])
        elif SCALES != "":
            x = tl.div_rn(x, tl.broadcast_to(scales, x.shape))
        return restored(x, KIND, stored_dtype, dtype)
    elif KIND == "fp4_e2m1":
        factor = block_scales(_columns(scales, scale_offset, START // 16, WIDTH // 16, D // 16))
        raw = _columns(rows, offset, START // 2, WIDTH // 2, D // 2)
        return fp4_numbers(raw, factor, N, WIDTH, dtype)
    else:
        return numbers(_columns(rows, offset, START, WIDTH, D), KIND, dtype)


@triton.jit
def _given(mask, mask_key, n, first, s_k, other: tl.constexpr, N: tl.constexpr):
    """Rows [M] of a mask for keys n + [0, N), read from key `first` to s_k; `other` elsewhere."""
    j = n + tl.arange(0, N)
    return tl.load(
        mask[:, None] + (j * mask_key)[None, :], mask=((j >= first) & (j < s_k))[None, :], other=other
    )  # fmt: skip


@triton.jit
def _bits(mask, mask_key, n, first, s_k, FIRST: tl.constexpr, N: tl.constexpr):
    """int64 [M]: bit i says whether a bool mask opens key n + FIRST + i, for up to 64 of N keys."""
    i = tl.arange(0, 16)
    found = tl.zeros(mask.shape, tl.int64)
    # 16 at a time, so that few registers are in flight.
    for part in tl.static_range(0, N - FIRST if N - FIRST < 64 else 64, 16):
        given = _given(mask, mask_key, n + FIRST + part, first, s_k, 1, 16)
        found |= tl.sum(tl.where(given != 0, (1 << i)[None, :], 0), 1).to(tl.int64) << part
    return found


@triton.jit
def _opened(products, low, high, N: tl.constexpr):
    """-inf where the bit of a key is 0."""
    i = tl.arange(0, N).to(tl.int64)[None, :]
    word = low[:, None]
    if N > 64:
        word = tl.where(i < 64, word, high[:, None])
    return tl.where((word >> (i & 63)) & 1 != 0, products, float("-inf"))


@triton.jit
def _blocks(
    q1, q2, acc1, acc2, top, total, p, begin, end, lowest, limit, whole_from, whole_to, tree_from,
    k, v, k_page, k_token, v_page, v_token, k_scale, v_scale, ks_page, ks_token, vs_page, vs_token,
    k_box, v_box, box_row, box_column, page_rows, table, fresh_k, fresh_v, fresh_k_token, fresh_v_token, fresh_from,
    mask, mask_key, s_k, left, right, chunk, scale, softcap,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    N: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, stored_dtype: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    TREE: tl.constexpr, FOLD: tl.constexpr, CHECK: tl.constexpr, FRESH: tl.constexpr, BOX: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks [begin, end) of keys into the running softmax.

    CHECK: whether rows may see only some keys of a block: "none" do, "ends" (those that reach out of
    [whole_from, whole_to)), "all". FRESH: keys come from the new rows, not from pages; BOX: by tensor descriptors.
    """
    dtype: tl.constexpr = q1.dtype
    # Looked up a block ahead: the address of a row must not wait for its page.
    paged: tl.constexpr = not FRESH or SCALES == "token" or SCALES == "block16"
    if paged:
        ahead = _pages(table, begin, lowest, limit, N, PAGE, not FRESH)
    for n in tl.range(begin, end, N, num_stages=STAGES):
        j = n + tl.arange(0, N)
        known = j if CHECK == "none" else tl.minimum(tl.maximum(j, lowest), limit - 1)
        if paged:
            page = ahead
            ahead = _pages(table, n + N, lowest, limit, N, PAGE, not FRESH)
            if PAGE % N == 0 and not FRESH:
                place = known - n // PAGE * PAGE
            else:
                place = known % PAGE
            ks_at = page.to(tl.int64) * ks_page + place.to(tl.int64) * ks_token
            vs_at = page.to(tl.int64) * vs_page + place.to(tl.int64) * vs_token
        else:
            ks_at = known
            vs_at = known
        partly = (n < whole_from) | (n + N > whole_to)
        if MASK == "bool" and not (TREE and CHECK == "none"):
            # Before the products: the compiler would otherwise do the softmax in the layout of this load. And as bits.
            first = tree_from if TREE else 0
            if TREE and CHECK == "ends":
                low = tl.full(p.shape, -1, tl.int64)
                high = low
                if partly:
                    low = _bits(mask, mask_key, n, first, s_k, 0, N)
                    high = _bits(mask, mask_key, n, first, s_k, 64, N) if N > 64 else low
            else:
                low = _bits(mask, mask_key, n, first, s_k, 0, N)
                high = _bits(mask, mask_key, n, first, s_k, 64, N) if N > 64 else low
        elif MASK == "additive":
            bias = _given(mask, mask_key, n, tree_from if TREE else 0, s_k, 0.0, N)
        if BOX:
            row = page * page_rows + (n - n // PAGE * PAGE) + box_row
            keys = numbers(k_box.load([row, box_column]), KIND, dtype)
            products = dot(q1, keys.T)
        else:
            if FRESH:
                k_rows, v_rows = fresh_k, fresh_v
                k_at = (known - fresh_from).to(tl.int64) * fresh_k_token
                v_at = (known - fresh_from).to(tl.int64) * fresh_v_token
            else:
                k_rows, v_rows = k, v
                k_at = page.to(tl.int64) * k_page + place.to(tl.int64) * k_token
                v_at = page.to(tl.int64) * v_page + place.to(tl.int64) * v_token
            keys = _part(
                k_rows, k_at, k_scale, ks_at, dtype, stored_dtype, KIND, SCALES, FRESH, N, 0, D1, D
            )  # fmt: skip
            products = dot(q1, keys.T)
            if D2:
                keys = _part(
                    k_rows, k_at, k_scale, ks_at, dtype, stored_dtype, KIND, SCALES, FRESH, N, D1, D2, D
                )  # fmt: skip
                products = dot(q2, keys.T, products)
        if SCALES == "token":
            products *= tl.load(k_scale + ks_at).to(tl.float32)[None, :]

        if not FOLD:
            products = logits(products, scale, softcap, SOFTCAP, dtype)
        if MASK == "additive":
            products += bias.to(tl.float32) * LOG2E
        elif MASK == "bool" and not TREE:
            products = _opened(products, low, high, N)
        if CHECK == "all":
            if MASK == "bool" and TREE:
                products = _opened(products, low, high, N)
            found = seen(p[:, None], j[None, :], limit, left, right, chunk, LEFT, RIGHT, CHUNK)
            products = tl.where(found, products, float("-inf"))
        elif CHECK == "ends":  # noqa: SIM102 the compiler's choice, and inside it the kernel's
            if partly:
                if MASK == "bool" and TREE:
                    products = _opened(products, low, high, N)
                found = seen(p[:, None], j[None, :], limit, left, right, chunk, LEFT, RIGHT, CHUNK)
                products = tl.where(found, products, float("-inf"))

        weights, factor, top, total = accumulate(top, total, products, scale if FOLD else 1.0)
        if SCALES == "token":
            weights *= tl.load(v_scale + vs_at).to(tl.float32)[None, :]
        weights = cast(weights, dtype)
        if BOX:
            values = numbers(v_box.load([row, box_column]), KIND, dtype)
            acc1 = dot(weights, values, acc1 * factor[:, None])
        else:
            values = _part(
                v_rows, v_at, v_scale, vs_at, dtype, stored_dtype, KIND, SCALES, FRESH, N, 0, E1, E
            )  # fmt: skip
            acc1 = dot(weights, values, acc1 * factor[:, None])
            if E2:
                values = _part(
                    v_rows, v_at, v_scale, vs_at, dtype, stored_dtype, KIND, SCALES, FRESH, N, E1, E2, E
                )  # fmt: skip
                acc2 = dot(weights, values, acc2 * factor[:, None])
    return acc1, acc2, top, total


@triton.jit(
    do_not_specialize=[
        "mask_sequence", "mask_head", "mask_row", "table_row", "sequences", "tiles", "left", "right", "chunk",
        "out_part", "lse_part",
    ],
    do_not_specialize_on_alignment=["table", "lens", "starts", "mask", "lse", "k_scale", "v_scale", "sinks"],
)  # fmt: skip
def _extend(
    query, k, v, out, lse, table, lens, starts, fresh_k, fresh_v, mask, sinks, k_scale, v_scale, k_box, v_box,
    q_token, q_head, out_token, out_head, lse_token, lse_head, k_page, k_token, k_head, v_page, v_token, v_head,
    fresh_k_token, fresh_k_head, fresh_v_token, fresh_v_head, mask_sequence, mask_head, mask_row, mask_key,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, table_row, box_row, box_column, page_rows,
    sequences, tiles, left, right, chunk, scale, softcap, heads, out_part, lse_part,
    GROUP: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, UNIFORM: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    TREE: tl.constexpr, FOLD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    BOX: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    number = pid // heads
    head = pid - number * heads
    n, tile = _place(number, starts, sequences, tiles, M, GROUP, UNIFORM)
    start = tl.load(starts + n)
    s_q = tl.load(starts + n + 1) - start
    if tile * M >= s_q * GROUP:
        return
    if RIGHT:
        # The last rows see most keys: they begin first.
        tile = tl.cdiv(s_q * GROUP, M) - 1 - tile
    s_k = tl.load(lens + n)

    r = tile * M + tl.arange(0, M)
    valid = r < s_q * GROUP
    # Rows past the end are the last one again.
    r = tl.minimum(r, s_q * GROUP - 1)
    i = r // GROUP
    h = head * GROUP + r - i * GROUP
    token = (start + i).to(tl.int64)
    p = i + s_k - s_q
    low = tile * M // GROUP + s_k - s_q
    high = tl.minimum(tile * M + M, s_q * GROUP) - 1
    high = high // GROUP + s_k - s_q

    # Some row sees keys in [begin, end), all rows see those in [whole_from, whole_to).
    lowest = tl.minimum(first_key(low, left, chunk, LEFT, CHUNK), s_k)
    begin = lowest // N * N
    end = end_key(high, s_k, right, RIGHT)
    whole_from = first_key(high, left, chunk, LEFT, CHUNK)
    whole_to = end_key(low, s_k, right, RIGHT)
    if PARTS:
        # This program's share of the tile's blocks; of none it leaves zeros.
        mine, shares = tl.program_id(1), tl.num_programs(1)
        blocks = tl.cdiv(tl.maximum(end - begin, 0), N)
        end = tl.minimum(end, begin + blocks * (mine + 1) // shares * N)
        begin += blocks * mine // shares * N
        out += mine.to(tl.int64) * out_part
        lse += mine.to(tl.int64) * lse_part
    fresh_from = s_k
    if fresh_k is not None:
        fresh_from = tl.maximum(s_k - s_q, 0)
    # Pages before a window may be gone, so none of them stands in for a key.
    paged_end = tl.where(lowest < fresh_from, tl.minimum(end, fresh_from), begin)
    whole_to = tl.minimum(whole_to, fresh_from)
    tree_from = s_k - s_q
    if TREE:
        whole_to = tl.minimum(whole_to, tree_from)

    c = tl.arange(0, D1)
    at = query + token[:, None] * q_token + h.to(tl.int64)[:, None] * q_head
    q1 = tl.load(at + c[None, :], mask=(c < D)[None, :], other=0.0) if D1 > D else tl.load(at + c[None, :])
    q2 = q1
    if D2:
        c = D1 + tl.arange(0, D2)
        q2 = tl.load(at + c[None, :], mask=(c < D)[None, :], other=0.0) if D1 + D2 > D else tl.load(at + c[None, :])

    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * v_head
    table += n.to(tl.int64) * table_row
    if fresh_k is not None:
        fresh_k += start.to(tl.int64) * fresh_k_token + head * fresh_k_head
        fresh_v += start.to(tl.int64) * fresh_v_token + head * fresh_v_head
    if MASK != "":
        mask = mask + n.to(tl.int64) * mask_sequence + i.to(tl.int64) * mask_row + h.to(tl.int64) * mask_head
    k_scale, v_scale, factor, value_scale = scales_at(k_scale, v_scale, head, ks_head, vs_head, SCALES)
    scale *= factor

    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc1 = tl.zeros((M, E1), tl.float32)
    acc2 = tl.zeros((M, E2 if E2 else 16), tl.float32)
    from_block = begin
    to_block = begin
    if SPLIT:
        # Blocks that all rows see are a loop of their own, between those at the ends.
        from_block = tl.cdiv(whole_from, N) * N
        to_block = tl.maximum(whole_to, 0) // N * N
        if PARTS:
            from_block = tl.maximum(from_block, begin)
            to_block = tl.minimum(to_block, end // N * N)
        if from_block >= to_block:
            from_block = begin
            to_block = begin
    # Pages up to where all rows see, those they all see, the others; then the new rows.
    for part in tl.static_range(4):
        if (
            part == 2
            or (part == 0 and SPLIT and (LEFT or CHUNK))
            or (part == 1 and SPLIT)
            or (part == 3 and fresh_k is not None)
        ):
            acc1, acc2, top, total = _blocks(
                q1, q2, acc1, acc2, top, total, p,
                begin if part == 0 else from_block if part == 1 else to_block if part == 2
                else tl.maximum(begin, fresh_from),
                from_block if part == 0 else to_block if part == 1 else paged_end if part == 2 else end,
                fresh_from if part == 3 else lowest, fresh_from if part < 3 else end if PARTS else s_k,
                whole_from, whole_to, tree_from,
                k, v, k_page, k_token, v_page, v_token, k_scale, v_scale, ks_page, ks_token, vs_page, vs_token,
                k_box, v_box, head * box_row, head * box_column, page_rows, table,
                fresh_k, fresh_v, fresh_k_token, fresh_v_token, fresh_from,
                mask, mask_key, s_k, left, right, chunk, scale, softcap,
                D, D1, D2, E, E1, E2, N, PAGE, KIND, SCALES, k.dtype.element_ty,
                LEFT, RIGHT, CHUNK, SOFTCAP, MASK, TREE, FOLD,
                "none" if part == 1 else "all" if SPLIT or part == 3 else "ends", part == 3, BOX and part == 1,
                1 if part == 3 else STAGES,
            )  # fmt: skip

    if lse is not None:
        tl.store(lse + token * lse_token + h.to(tl.int64) * lse_head, natural_lse(top, total), mask=valid)
    if sinks is not None:
        factor = share_with_sink(top, total, tl.load(sinks + h).to(tl.float32))
    else:
        factor = share(total)
    factor *= value_scale
    at = out + token[:, None] * out_token + h.to(tl.int64)[:, None] * out_head
    kept = valid[:, None]
    c = tl.arange(0, E1)
    rows = cast(acc1 * factor[:, None], out.dtype.element_ty)
    tl.store(at + c[None, :], rows, mask=kept & (c < E)[None, :] if E1 > E else kept)
    if E2:
        c = E1 + tl.arange(0, E2)
        rows = cast(acc2 * factor[:, None], out.dtype.element_ty)
        tl.store(at + c[None, :], rows, mask=kept & (c < E)[None, :] if E1 + E2 > E else kept)


class Config(NamedTuple):
    """How a launch is cut: rows and keys of a tile, warps, pipeline stages, whether blocks that all rows see are a loop
    of their own, and whether that loop reads pages by tensor descriptors where they can be."""

    M: int
    N: int
    warps: int
    stages: int
    split: bool = False
    box: bool = False


_CONFIGS: dict[tuple[str, int, int], tuple[Config, Config]] = {
    # (architecture, D and D_v up to, bytes of a stored number; 4: float32 queries): where tensor descriptors can read
    # pages, and where they cannot
    ("hopper", 64, 2): (Config(128, 64, 4, 4, True, True), Config(128, 64, 4, 3)),
    ("hopper", 128, 2): (Config(128, 64, 4, 2, True, True), Config(128, 128, 8, 3, True)),
    ("hopper", 256, 2): (Config(128, 64, 8, 2, True, True), Config(128, 64, 8, 2)),
    ("hopper", 128, 1): (Config(128, 64, 4, 3, True, True), Config(128, 128, 8, 3)),
    ("hopper", 256, 1): (Config(128, 32, 8, 3), Config(128, 32, 8, 3)),
    ("cuda", 128, 2): (Config(128, 64, 8, 2),) * 2,
    ("cuda", 256, 2): (Config(64, 32, 8, 2),) * 2,
    ("cuda", 128, 1): (Config(128, 64, 8, 2),) * 2,
    ("cuda", 256, 1): (Config(64, 32, 8, 2),) * 2,
    ("other", 128, 2): (Config(128, 64, 4, 2),) * 2,
    ("other", 256, 2): (Config(64, 32, 4, 2),) * 2,
    ("other", 128, 1): (Config(128, 64, 4, 2),) * 2,
    ("other", 256, 1): (Config(64, 32, 4, 2),) * 2,
    # No tensor core keeps the digits of float32.
    ("hopper", 256, 4): (Config(32, 32, 4, 2),) * 2,
    ("cuda", 256, 4): (Config(32, 32, 4, 2),) * 2,
    ("other", 256, 4): (Config(32, 32, 4, 2),) * 2,
}

_MASKED: dict[tuple[str, bool], Config] = {
    # (mask, whether tensor descriptors can read pages): up to D 128 on Hopper
    ("tree", True): Config(64, 64, 4, 3, True, True),
    ("tree", False): Config(128, 64, 8, 3),
    ("bool", True): Config(128, 128, 8, 2),
    ("bool", False): Config(128, 128, 8, 2),
    ("additive", True): Config(128, 64, 8, 3),
    ("additive", False): Config(128, 64, 8, 3),
}

_INTERPRETED = Config(32, 32, 4, 1)
_TILE = 128
"""Rows, and keys: what a launch in ranges is reckoned in (`splits.ranges`)."""


def _default(where: str, width: int, itemsize: int, page_size: int, boxes: bool, mask: str, few: bool) -> Config:
    """The table's entry; `boxes`: whether tensor descriptors can read the pages."""
    boxed, plain = next(
        configs for (arch, widest, size), configs in _CONFIGS.items()
        if arch == where and width <= widest and size == itemsize
    )  # fmt: skip
    boxes = boxes and page_size > 0 and page_size % boxed.N == 0
    found = boxed if boxes else plain
    if where != "hopper" or width > 128 or itemsize == 4:
        return found
    if mask:
        return _MASKED[mask, boxes]
    if boxes:
        # Tiles that are mostly empty wait for memory, not for tensor cores.
        return found._replace(warps=8, stages=4) if few else found
    # The addresses of pages smaller than what a warp reads cost too many registers for a loop of their own.
    return found._replace(split=found.split and page_size >= 16)


@functools.lru_cache(maxsize=1024)
def _chosen(
    device: torch.device, dtype: torch.dtype, bits: int, widths: tuple[int, int], page_size: int, boxes: bool,
    mask: str, mask_bytes: int, few: bool, straight: bool, _epoch: int,
) -> Config:  # fmt: skip
    """As it was measured, else the table's, or a smaller one where that does not fit."""
    if rules.INTERPRETED:
        found = _INTERPRETED
    else:
        where = architecture(device)
        itemsize = 4 if dtype == torch.float32 else max(bits // 8, 1)
        found = _default("cuda" if where == "blackwell" else where, max(widths), itemsize, page_size, boxes, mask, few)
    fewest = least(bits)
    return chosen(
        EXTEND, _key(dtype, bits, widths, page_size, boxes, mask, few), found, device,
        (_room(dtype, bits, widths, straight, mask_bytes, fewest),), (mask_bytes, straight),
        lambda config: config._replace(N=max(config.N, fewest)),
    )  # fmt: skip


def _key(
    dtype: torch.dtype, bits: int, widths: tuple[int, int], page_size: int, boxes: bool, mask: str, few: bool
) -> Key:
    return (str(dtype).removeprefix("torch."), bits, *widths, page_size, boxes, mask, few)


def _room(dtype: torch.dtype, bits: int, widths: tuple[int, int], straight: bool, mask_bytes: int, fewest: int) -> Room:
    """What a configuration needs."""
    size = dtype.itemsize
    (d, e), widest = (sum(_widths(width, straight)) for width in widths), max(_widths(max(widths), straight))
    stored = bits if bits < 8 * size else 0
    loose = not straight and not stored  # not loaded ahead

    def loop(c: Config) -> Loop:
        held, step, once = c.M * d * size, c.N * (d + e) * bits // 8, c.N * widest * size
        return Loop(c.M, c.N, c.warps, 1 if loose else c.stages, held, step, once, size, mask_bytes, stored)

    return Room(loop, (("stages", 2), ("N", max(32, fewest)), ("M", 32), ("stages", 1), ("N", fewest), ("M", 16)))


def _ask(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, page_size: int, mask: str, mask_bytes: int,
    average: float | None, straight: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of `_chosen`: those of `config_for`."""
    widths = (query.shape[2], value_cache.shape[3])
    bits = 8 * key_cache.dtype.itemsize
    if key_cache.shape[3] != widths[0]:
        bits, widths = 4, (widths[0], 2 * widths[1])  # two numbers in a byte
    boxes = bits != 4 and all(not width & (width - 1) for width in widths)
    few = average is not None and average < 64
    return query.device, query.dtype, bits, widths, page_size, boxes, mask, mask_bytes, few, straight


def config_for(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: int, *, page_size: int = 0,
    mask: str = "", mask_bytes: int = 0, average: float | None = None, straight: bool = True,
) -> Config:  # fmt: skip
    """The table's entry for these tensors and sequences of up to `rows` rows (queries times heads of a group).

    Args:
        page_size: 0 = of no use to tensor descriptors. mask: "" | "tree" | "bool" | "additive".
        mask_bytes: of its numbers. average: rows of a sequence, on average; None = `rows`. straight: see `_widths`.
    """
    asked = _ask(query, key_cache, value_cache, page_size, mask, mask_bytes, average, straight)
    return _of_rows(_chosen(*asked, EPOCH.value), rows)


def _of_rows(found: Config, rows: int) -> Config:
    """A configuration for sequences of so many rows."""
    if rows > found.M // 2:
        return found
    # Short sequences: as few rows as an MMA has, more keys in flight.
    return found._replace(M=max(16, power_of_2(rows)), warps=4)


@functools.lru_cache(maxsize=1024)
def _box(memory: Memory, matrix: Matrix, rows: int, columns: int) -> TensorDescriptor:
    # Making one takes longer than a launch, and pools stay where they are: hence the cache.
    return TensorDescriptor(memory, matrix.shape, matrix.strides, [rows, columns])


def _boxes(k: torch.Tensor, v: torch.Tensor, hnd: bool, rows: int) -> tuple[Pools, list[TensorDescriptor]] | None:
    """Descriptors of both pools, of blocks of so many rows of one head. None: they cannot read them."""
    pools = pools_of(k, v, hnd)
    if pools is None:
        return None
    sides = ((k, pools.key), (v, pools.value))
    if rules.INTERPRETED:
        # The interpreter reads tensors, not addresses.
        return pools, [TensorDescriptor(x, m.shape, m.strides, [rows, x.shape[3]]) for x, m in sides]
    return pools, [_box(Memory(x.data_ptr(), x.dtype), m, rows, x.shape[3]) for x, m in sides]


def ranges_for(device: torch.device, sequences: int, max_seqlen_q: int, longest: int, heads: int, group: int) -> int:
    """Ranges that the keys of each tile are cut into so that the call ends soonest; 1: they stay whole. longest: keys
    that the longest sequence's queries see."""
    tiles = sequences * -(-max_seqlen_q * group // _TILE) * heads
    return ranges(runtime.processors(device), tiles, -(-longest // _TILE), 1)


def _widths(width: int, straight: bool) -> tuple[int, int]:
    """How a head dim is cut. Rows that do not go `straight` from the cache to shared memory, but by way of registers,
    fill whole swizzles of 128 bytes there. Otherwise ptxas 12.8 (in Triton 3.6) takes the place of V for another: it
    mistakes a register where descriptors of `wgmma` that differ in their swizzle begin at one address."""
    return parts(width if straight else -(-width // 64) * 64)


def extend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    tables: PagedTables,
    page_size: int,
    hnd: bool,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    scale: float,
    softcap: float = 0.0,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    tree: bool = False,
    sinks: torch.Tensor | None = None,
    kv_dtype: str = "auto",
    kv_scales: str = "",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    config: Config | None = None,
    cuts: int = 0,
) -> None:
    """Attention of packed queries, the last tokens of their sequences, over a paged cache (S9). Waits for nothing.

    Args:
        query: [T_q, H_q, D], D a multiple of 8 up to 256.
        key_cache, value_cache: [pages, page_size, H_kv, D | D_v], or with `hnd` [pages, H_kv, page_size, D | D_v];
            uint8 and D / 2 | D_v / 2 wide for fp4_e2m1.
        tables: `polyattn.contract.PagedTables`.
        causal: bottom-right. window, chunk, scale, softcap, sinks: as `polyattn.semantics.reference.attention`.
        key, value: [T_q, H_kv, D | D_v], the last keys of each sequence: read here, rounded as the cache would round
            them, and not in the pages. None: everything is in the pages.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k], bool or additive. tree: it is True before the last
            queries' own columns, which alone are read.
        kv_dtype, kv_scales, k_scale, v_scale: as `AttentionRequest`, and `polyattn.semantics.kv_quant`.
        out: [T_q, H_q, D_v], written. lse: float32 [T_q, H_q], written: natural logarithm, without sinks.
        config: None = the table's.
        cuts: above 0, the keys that each tile of queries sees are cut into so many ranges: out and lse are float32
            [cuts, T_q, H_q, D_v] and [cuts, T_q, H_q], a part of each. Without sinks.
    """
    assert not cuts or (lse is not None and sinks is None)
    T_q, H_q, D = query.shape
    page_table, seq_lens, cu_seqlens_q, max_seqlen_q = tables[:4]
    N, heads = seq_lens.shape[0], key_cache.shape[1 if hnd else 2]
    if not T_q or not N:
        return
    group, E, optional = H_q // heads, out.shape[-1], (attn_mask, kv_scales, k_scale, v_scale)
    masked, attn_mask, mask_strides = mask_arguments(attn_mask)
    mask = MASKS[masked]
    kind = kv_dtype if key_cache.dtype.itemsize == 1 else "auto"
    k, v = as_stored(key_cache, kind), as_stored(value_cache, kind)
    whole = not (D | E) & 63 or query.dtype == torch.float32
    straight = kind == "auto" and (whole or (key is None and known_aligned(k, v)))
    asked: Any = (
        query, key_cache, value_cache, page_size, "tree" if tree and mask == "bool" else mask,
        0 if attn_mask is None else attn_mask.itemsize, T_q * group / N, straight,
    )  # fmt: skip
    given = config
    if config is None:
        config = _of_rows(_chosen(*_ask(*asked), EPOCH.value), max_seqlen_q * group)
    uniform = T_q == N * max_seqlen_q
    tiles = -(-max_seqlen_q * group // config.M)
    grid = ((N * tiles if uniform else T_q * group // config.M + N) * heads, max(cuts, 1))

    left, right = bounds(causal, window, chunk)
    if kv_dtype == "fp4_e2m1":
        kv_scales = "block16"
    k_scale, k_scale_strides = scales_of(k_scale, key_cache, kv_scales, hnd)
    v_scale, v_scale_strides = scales_of(v_scale, value_cache, kv_scales, hnd)
    (D1, D2), (E1, E2) = _widths(D, straight), _widths(E, straight)
    boxes = None
    if config.box and config.split and (D1, E1) == (D, E) and kind != "fp4_e2m1" and page_size % config.N == 0:
        boxes = _boxes(k, v, hnd, config.N)
    pools, (k_box, v_box) = boxes or (None, (None, None))
    factor, cap = rules.scales(scale, softcap)
    try:
        with device_of(query):
            _extend[grid](
                query, k, v, out, lse, page_table, seq_lens, cu_seqlens_q, key, value, attn_mask, sinks, k_scale,
                v_scale, k_box, v_box,
                *query.stride()[:2], *out.stride()[-3:-1], *((0, 0) if lse is None else lse.stride()[-2:]),
                *strides(key_cache, hnd), *strides(value_cache, hnd),
                *((0, 0) if key is None else key.stride()[:2]), *((0, 0) if value is None else value.stride()[:2]),
                *mask_strides, *k_scale_strides, *v_scale_strides, page_table.stride(0),
                *((0, 0, 0) if pools is None else (pools.row, pools.column, pools.page_rows)),
                N, tiles, left, right, chunk, factor, cap, heads,
                *((out.stride(0), lse.stride(0)) if cuts and lse is not None else (0, 0)),
                GROUP=group, PAGE=page_size, KIND=kind, SCALES=kv_scales, UNIFORM=uniform,
                D=D, D1=D1, D2=D2, E=E, E1=E1, E2=E2, LEFT=left >= 0, RIGHT=right >= 0, CHUNK=chunk > 0,
                SOFTCAP=softcap != 0, MASK=mask, TREE=tree and mask != "",
                FOLD=softcap == 0 and mask != "additive" and scale > 0,
                M=config.M, N=config.N, SPLIT=config.split, BOX=pools is not None, STAGES=config.stages,
                PARTS=cuts > 0, num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
    except TOO_LARGE as error:
        device, dtype, bits, widths, size, boxed, name, mask_bytes, few, _ = _ask(*asked)
        found = _chosen(*_ask(*asked), EPOCH.value) if given is None else given
        of = _key(dtype, bits, widths, size, boxed, name, few), (mask_bytes, straight)
        refuse(EXTEND, *of, device, found, error, last=given is not None)
        attn_mask, kv_scales, k_scale, v_scale = optional
        extend(
            query, key_cache, value_cache, tables=tables, page_size=page_size, hnd=hnd, causal=causal, window=window,
            chunk=chunk, scale=scale, softcap=softcap, key=key, value=value, attn_mask=attn_mask,
            tree=tree, sinks=sinks, kv_dtype=kv_dtype, kv_scales=kv_scales, k_scale=k_scale, v_scale=v_scale, out=out,
            lse=lse, cuts=cuts,
        )  # fmt: skip
