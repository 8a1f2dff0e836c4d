"""The Hopper latent (MLA) kernel: a tile of 64 queries, two consumer warpgroups, and a producer warpgroup that copies.

The design is FlashMLA's (DeepSeek, 2025). Keys go by in pairs of blocks of 64. In a step each consumer makes the scores
of one block, over all 576 columns, and each adds the products of both blocks with one half of the values' 512 columns
to its half of the output, [64, 256] in registers. Its own weights it has in registers, the other's come through shared
memory. The blocks count one after the other, as if one consumer went through them: the weights of the first block are
made against the maximum so far and its own, those of the second against both. So the first consumer never waits for the
second's scores, and runs half a step ahead: the softmax of one is beside the products of the other. A block is in
shared memory once, for both products, in two halves by columns that go back to the producer one by one: half i of a
block is last read by consumer i, which has that half of the output.

The producer copies with cp.async, since pages may be small, and since rows past the last key become zeros: what is not
a number would go through a weight of 0. Where pages hold whole blocks it can copy those by TMA (`boxes`), and only the
last block of a sequence as before.
"""

from __future__ import annotations

from polyattn_triton.hopper.common import LN2, load, load_rows, made_barriers, viewed

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia import hopper  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier  # isort: skip

__all__ = ["attend"]

_M = gl.constexpr(64)
"""Rows of a tile."""
_N = gl.constexpr(64)
"""Keys of a block."""
_HALF = gl.constexpr(256)
"""Columns of half a value."""
_ROPE = gl.constexpr(64)
_PRODUCERS = gl.constexpr(128)
"""Threads that copy."""


@gluon.jit
def _share(shares, tiles):
    """This program's (tile, number of its share, first and last key block, sequence, that sequence's first block)."""
    part = gl.program_id(0) // tiles
    at = shares + part * 3
    return gl.program_id(0) % tiles, part, gl.load(at), gl.load(at + 3), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _segment(n, item, last, before, tile, seq_lens, cu_seqlens_q, HEADS: gl.constexpr, CAUSAL: gl.constexpr):
    """What there is to do for sequence n: (first token, tokens, keys, keys `begin` to `end` that the tile sees of this
    share, pairs of blocks, block after the last, whether that is all there is of the sequence, its blocks)."""
    start = gl.load(cu_seqlens_q + n)
    tokens = gl.load(cu_seqlens_q + n + 1) - start
    s_k = gl.load(seq_lens + n)
    blocks = (s_k + _N - 1) // _N
    blocks = gl.where(tokens > 0, blocks, 0)
    after = gl.minimum(before + blocks, last)
    begin = (item - before) * _N
    end = gl.minimum((after - before) * _N, s_k)
    if CAUSAL:
        end = gl.minimum(end, s_k - tokens + (tile * _M + _M - 1) // HEADS + 1)
    here = (tile * _M < tokens * HEADS) & (blocks > 0)
    # At least one: the consumers' barriers count on it.
    pairs = gl.maximum((end - begin + 2 * _N - 1) // (2 * _N), 1)
    return start, tokens, s_k, begin, end, pairs, after, after - item == blocks, blocks, here


@gluon.jit
def _copy_rows(
    to, base, page_table, page, first, end, cache_page, ROW: gl.constexpr, PAGE: gl.constexpr, AT: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Starts the copy of columns [AT, AT + WIDTH) of keys first .. first + 63, zeros from key `end` on. `page` is that
    of `first` where pages are not smaller than blocks."""
    ROWS: gl.constexpr = min(PAGE, _N)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    at = (row * ROW)[:, None] + (AT + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)))[None, :]
    if ROWS == _N:
        source = base + (page * cache_page + first % PAGE * ROW)
        if first + _N <= end:
            load_rows(to, source + at)
        else:
            load_rows(to, source + at, mask=(row < end - first)[:, None])
    else:
        for chunk in gl.static_range(_N // ROWS):
            key = first + chunk * ROWS
            page = gl.load(page_table + key // PAGE, mask=key < end, other=0).to(gl.int64)
            load_rows(
                to.slice(chunk * ROWS, ROWS, dim=0), base + page * cache_page + at, mask=(row < end - key)[:, None]
            )


@gluon.jit
def _page_of(page_table, key, end, PAGE: gl.constexpr):
    """The page of a block, where one page has all of it."""
    if PAGE % _N == 0:
        return gl.load(page_table + key // PAGE, mask=key < end, other=0).to(gl.int64)
    else:
        return (key * 0).to(gl.int64)


@gluon.jit
def _copy_boxes(boxes, k_box, rs, full, at, half, BLOCK: gl.constexpr, SIDE: gl.constexpr):
    """Starts the copy of half SIDE of a whole block, whose first row in the cache is `at`, by TMA."""
    COUNT: gl.constexpr = _HALF // _ROPE
    # One thread copies, and arrives in the place of all.
    mbarrier.expect(full, (_HALF + (_ROPE if SIDE == BLOCK else 0)) * _N * 2)
    for c in gl.static_range(COUNT):
        load(boxes, [at, SIDE * _HALF + c * _ROPE], full, k_box.index(half * COUNT + c))
    if SIDE == BLOCK:
        load(boxes, [at, 2 * _HALF], full, rs.index(BLOCK))
    mbarrier.arrive(full, count=_PRODUCERS - 1)


@gluon.jit
def _copy_half(
    given, page, phase, BLOCK: gl.constexpr, SIDE: gl.constexpr, ROW: gl.constexpr, PAGE: gl.constexpr,
    WIDE: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Starts the copy of half SIDE of a block of the pair whose first key is `first`, once its buffer is free; the rope
    columns go with the half that their reader frees."""
    ks, rs, k_box, boxes, full, free, cache, table, first, end, cache_page = given
    HALF: gl.constexpr = 2 * BLOCK + SIDE
    key = first + BLOCK * _N
    mbarrier.wait(free.index(HALF), phase)
    by_rows = True
    if boxes is not None:
        by_rows = key + _N > end
        if not by_rows:
            at = (page * (cache_page // ROW)).to(gl.int32) + key % PAGE
            _copy_boxes(boxes, k_box, rs, full.index(HALF), at, HALF, BLOCK, SIDE)
    if by_rows:
        _copy_rows(ks.index(HALF), cache, table, page, key, end, cache_page, ROW, PAGE, SIDE * _HALF, _HALF, WIDE)
        if SIDE == BLOCK:
            _copy_rows(rs.index(BLOCK), cache, table, page, key, end, cache_page, ROW, PAGE, 2 * _HALF, _ROPE, NARROW)
        async_copy.mbarrier_arrive(full.index(HALF), increment_count=False)


@gluon.jit
def _produce(
    given, HEADS: gl.constexpr, ROW: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """The producer: the query of each segment, then its blocks, each half as soon as its buffer is free."""
    (
        query, cache, boxes, page_table, seq_lens, cu_seqlens_q, shares, qs, ks, rs, k_box, barriers, tiles,
        query_token, query_head, cache_page, table_row,
    ) = given  # fmt: skip
    full, free, q_full, q_free = barriers
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile, _part, item, last, n, before = _share(shares, tiles)
    step = 0
    segment = 0
    while item < last:
        start, tokens, _s_k, begin, end, pairs, after, _whole, blocks, here = _segment(
            n, item, last, before, tile, seq_lens, cu_seqlens_q, HEADS, CAUSAL
        )
        if here:
            mbarrier.wait(q_free, (segment & 1) ^ 1)
            r = tile * _M + gl.arange(0, _M, gl.SliceLayout(1, WIDE))
            token = r // HEADS
            row = (start + token).to(gl.int64) * query_token + (r - token * HEADS) * query_head
            c = gl.arange(0, _HALF, gl.SliceLayout(0, WIDE))
            for half in gl.static_range(2):
                load_rows(
                    qs.index(half), query + row[:, None] + (c + half * _HALF)[None, :], mask=(token < tokens)[:, None]
                )
            async_copy.mbarrier_arrive(q_full, increment_count=False)
            segment += 1
            table = page_table + n * table_row.to(gl.int64)
            page_0 = _page_of(table, begin, end, PAGE)
            page_1 = _page_of(table, begin + _N, end, PAGE)
            for pair in range(pairs):
                first = begin + pair * (2 * _N)
                phase = (step & 1) ^ 1
                # A pair ahead: no copy waits for where its rows are.
                next_0 = _page_of(table, first + 2 * _N, end, PAGE)
                next_1 = _page_of(table, first + 3 * _N, end, PAGE)
                block = (ks, rs, k_box, boxes, full, free, cache, table, first, end, cache_page)
                # In the order in which they come free.
                _copy_half(block, page_0, phase, 0, 0, ROW, PAGE, WIDE, NARROW)
                _copy_half(block, page_0, phase, 0, 1, ROW, PAGE, WIDE, NARROW)
                _copy_half(block, page_1, phase, 1, 1, ROW, PAGE, WIDE, NARROW)
                _copy_half(block, page_1, phase, 1, 0, ROW, PAGE, WIDE, NARROW)
                page_0 = next_0
                page_1 = next_1
                step += 1
        item = after
        before += blocks
        n += 1


@gluon.jit
def _hidden_zero(any_number):
    """0, which the compiler does not know. What is made of it is made where it is used: all 44 descriptors of a step's
    products would be kept in registers from step to step, and spilled."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [any_number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _leave(
    acc, found, out, lse, piece_out, piece_lse, start, tokens, tile, piece_row, whole, out_token, out_head,
    HEADS: gl.constexpr, INDEX: gl.constexpr, OUTPUT: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """Half a tile of output to where it belongs, and by the first consumer its LSE."""
    r = tile * _M + gl.arange(0, _M, gl.SliceLayout(1, OUTPUT))
    line = tile * _M + gl.arange(0, _M, LINE)
    c = INDEX * _HALF + gl.arange(0, _HALF, gl.SliceLayout(0, OUTPUT))
    rows = tokens * HEADS
    if whole:
        token = r // HEADS
        row = (start + token).to(gl.int64) * out_token + (r - token * HEADS) * out_head
        gl.store(out + row[:, None] + c[None, :], acc.to(out.dtype.element_ty), mask=(r < rows)[:, None])
        if lse is not None:
            gl.store(lse + start.to(gl.int64) * HEADS + line, found, mask=(line < rows) & (INDEX == 0))
    else:
        gl.store(piece_out + ((piece_row + r) * (2 * _HALF))[:, None] + c[None, :], acc, mask=(r < rows)[:, None])
        gl.store(piece_lse + piece_row + line, found, mask=(line < rows) & (INDEX == 0))


@gluon.jit
def _base(top, scale):
    """What is subtracted from scaled scores. A row without keys subtracts 0: -inf - -inf would be NaN."""
    return gl.where(top == float("-inf"), 0.0, top) * scale


@gluon.jit
def _consume(
    given, HEADS: gl.constexpr, CAUSAL: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """Consumer INDEX: the scores of every second block, and half INDEX of the output."""
    (
        query, seq_lens, cu_seqlens_q, shares, out, lse, piece_out, piece_lse, qs, ks, rs, ps, maxima, sums, barriers,
        tiles, query_token, query_head, out_token, out_head, scale,
    ) = given  # fmt: skip
    full, free, q_full, q_free, told, weighed, summed = barriers
    OTHER: gl.constexpr = 1 - INDEX
    MINE: gl.constexpr = 3 * INDEX
    dtype: gl.constexpr = query.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROPE: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    tile, part, item, last, n, before = _share(shares, tiles)
    step = 0
    segment = 0
    while item < last:
        start, tokens, s_k, begin, end, pairs, after, whole, blocks, here = _segment(
            n, item, last, before, tile, seq_lens, cu_seqlens_q, HEADS, CAUSAL
        )
        if here:
            r = tile * _M + gl.arange(0, _M, gl.SliceLayout(1, ROPE))
            token = r // HEADS
            row = (start + token).to(gl.int64) * query_token + (r - token * HEADS) * query_head + 2 * _HALF
            x = gl.arange(0, _ROPE, gl.SliceLayout(0, ROPE))
            rope_at = query + row[:, None] + x[None, :]
            rope_real = (token < tokens)[:, None]
            acc = gl.full([_M, _HALF], 0.0, gl.float32, OUTPUT)
            top = gl.full([_M], float("-inf"), gl.float32, LINE)
            total = gl.full([_M], 0.0, gl.float32, LINE)
            # Keys that a row sees: to the end, or to its own position.
            r = tile * _M + gl.arange(0, _M, LINE)
            if CAUSAL:
                seen = gl.minimum(s_k - tokens + r // HEADS + 1, s_k)
                all_seen = s_k - tokens + tile * _M // HEADS + 1
            else:
                seen = gl.full([_M], 0, gl.int32, LINE) + s_k
                all_seen = s_k
            mbarrier.wait(q_full, segment & 1)
            for pair in range(pairs):
                phase = step & 1
                first = begin + pair * (2 * _N) + INDEX * _N
                zero = _hidden_zero(step)
                # Anew for each pair: 16 registers more all along would spill.
                rope = gl.load(rope_at, mask=rope_real, other=0.0)
                mbarrier.wait(full.index(MINE), phase)
                s = gl.full([_M, _N], 0.0, gl.float32, SCORES)
                s = hopper.warpgroup_mma(
                    qs.index(INDEX + zero), ks.index(MINE + zero).permute((1, 0)), s, use_acc=False, is_async=True
                )
                s = hopper.warpgroup_mma(rope, rs.index(INDEX + zero).permute((1, 0)), s, is_async=True)
                mbarrier.wait(full.index(2 * INDEX + OTHER), phase)
                s = hopper.warpgroup_mma(
                    qs.index(OTHER + zero), ks.index(2 * INDEX + OTHER + zero).permute((1, 0)), s, is_async=True
                )
                s = hopper.warpgroup_mma_wait(0, deps=[s])
                if pair + 1 == pairs:
                    # The next query comes during the last softmax and the products after it.
                    mbarrier.arrive(q_free, count=1)
                if first + _N > gl.minimum(all_seen, end):
                    j = first + gl.arange(0, _N, gl.SliceLayout(0, SCORES))
                    s = gl.where(j[None, :] < gl.minimum(seen, end)[:, None], s, float("-inf"))
                found = gl.max(s, 1)
                if INDEX == 0:
                    # This consumer goes ahead, with a maximum of its own; the other's block comes on top of it.
                    first_top = gl.maximum(top, found)
                    maxima.index(0).store(first_top)
                    mbarrier.arrive(told.index(0), count=1)
                    weights = gl.exp2(s * scale - _base(first_top, scale)[:, None])
                    factor = gl.exp2(top * scale - _base(first_top, scale))
                    total = total * factor + gl.sum(weights, 1)
                    p = weights.to(dtype)
                    ps.index(0).store(p)
                    fence_async_shared()
                    mbarrier.arrive(weighed.index(0), count=1)
                    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
                    p = gl.convert_layout(p, WEIGHTS, assert_trivial=True)
                    o = hopper.warpgroup_mma(p, ks.index(zero), acc, is_async=True)
                    acc = hopper.warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(free.index(0), count=1)
                    mbarrier.wait(told.index(1), phase)
                    top = maxima.index(1).load(LINE)
                    factor = gl.exp2(first_top * scale - _base(top, scale))
                    total = total * factor
                    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
                    mbarrier.wait(weighed.index(1), phase)
                    mbarrier.wait(full.index(2), phase)
                    o = hopper.warpgroup_mma(ps.index(1 + zero), ks.index(2 + zero), acc, is_async=True)
                    acc = hopper.warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(free.index(2), count=1)
                else:
                    mbarrier.wait(told.index(0), phase)
                    first_top = maxima.index(0).load(LINE)
                    highest = gl.maximum(first_top, found)
                    maxima.index(1).store(highest)
                    mbarrier.arrive(told.index(1), count=1)
                    factor = gl.exp2(top * scale - _base(first_top, scale))
                    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
                    mbarrier.wait(weighed.index(0), phase)
                    mbarrier.wait(full.index(1), phase)
                    o = hopper.warpgroup_mma(ps.index(zero), ks.index(1 + zero), acc, is_async=True)
                    weights = gl.exp2(s * scale - _base(highest, scale)[:, None])
                    total = total * gl.exp2(top * scale - _base(highest, scale)) + gl.sum(weights, 1)
                    factor = gl.exp2(first_top * scale - _base(highest, scale))
                    top = highest
                    p = weights.to(dtype)
                    acc = hopper.warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(free.index(1), count=1)
                    ps.index(1).store(p)
                    fence_async_shared()
                    mbarrier.arrive(weighed.index(1), count=1)
                    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
                    p = gl.convert_layout(p, WEIGHTS, assert_trivial=True)
                    o = hopper.warpgroup_mma(p, ks.index(3 + zero), acc, is_async=True)
                    acc = hopper.warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(free.index(3), count=1)
                step += 1
            sums.index(INDEX).store(total)
            mbarrier.arrive(summed.index(INDEX), count=1)
            mbarrier.wait(summed.index(OTHER), segment & 1)
            segment += 1
            total += sums.index(OTHER).load(LINE)
            some = total > 0
            total = gl.where(some, total, 1.0)
            acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
            found = gl.where(some, (top * scale + gl.log2(total)) * LN2, float("-inf"))
            # The piece that begins a sequence is the second of its program, any other the first.
            slot = 2 * part + (item == before).to(gl.int32)
            _leave(
                acc, found, out, lse, piece_out, piece_lse, start, tokens, tile, slot.to(gl.int64) * tiles * _M, whole,
                out_token, out_head, HEADS, INDEX, OUTPUT, LINE,
            )  # fmt: skip
        item = after
        before += blocks
        n += 1


@gluon.jit(do_not_specialize=["tiles", "table_row"])
def attend(
    query, cache, boxes, page_table, seq_lens, cu_seqlens_q, shares, out, lse, piece_out, piece_lse,
    tiles, query_token, query_head, cache_page, table_row, out_token, out_head, scale,
    HEADS: gl.constexpr, ROW: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `_attend` of kernels/latent.py where STREAMED, for rows of 512 + 64 numbers of 16 bits. `scale` is above 0.

    boxes: of 64 rows and columns of the cache as a matrix of rows, whole blocks of which lie in a page; or None.
    """
    dtype: gl.constexpr = query.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qs = gl.allocate_shared_memory(dtype, [2, _M, _HALF], TILE)
    if boxes is None:
        ks = gl.allocate_shared_memory(dtype, [4, _N, _HALF], TILE)
        k_box = ks
    else:
        # Boxes side by side are halves of blocks.
        k_box = gl.allocate_shared_memory(dtype, [4 * (_HALF // _ROPE), _N, _ROPE], TILE)
        ks = viewed(k_box, dtype, [4, _N, _HALF], TILE)
    rs = gl.allocate_shared_memory(dtype, [2, _N, _ROPE], TILE)
    ps = gl.allocate_shared_memory(dtype, [2, _M, _N], TILE)
    maxima = gl.allocate_shared_memory(gl.float32, [2, _M], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [2, _M], FLAT)
    full = made_barriers(4, _PRODUCERS)
    free = made_barriers(4, 1)
    q_full = made_barriers(1, _PRODUCERS)
    q_free = made_barriers(1, 2)
    told = made_barriers(2, 1)
    weighed = made_barriers(2, 1)
    summed = made_barriers(2, 1)
    produced = (
        query, cache, boxes, page_table, seq_lens, cu_seqlens_q, shares, qs, ks, rs, k_box,
        (full, free, q_full.index(0), q_free.index(0)), tiles, query_token, query_head, cache_page, table_row,
    )  # fmt: skip
    consumed = (
        query, seq_lens, cu_seqlens_q, shares, out, lse, piece_out, piece_lse, qs, ks, rs, ps, maxima, sums,
        (full, free, q_full.index(0), q_free.index(0), told, weighed, summed),
        tiles, query_token, query_head, out_token, out_head, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (consumed, HEADS, CAUSAL, 0)),
            (_consume, (consumed, HEADS, CAUSAL, 1)),
            (_produce, (produced, HEADS, ROW, PAGE, CAUSAL)),
        ],
        [4, 4],
        [REGISTERS, 504 - 2 * REGISTERS],
    )
