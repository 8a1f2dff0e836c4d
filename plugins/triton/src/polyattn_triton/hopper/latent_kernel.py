"""The Hopper latent (MLA) kernel: a tile of 64 queries, two consumer warpgroups, and a producer warpgroup that copies.

The design is FlashMLA's (DeepSeek, 2025). Keys go by in pairs of blocks of 64. In a step each consumer makes the scores
of one block, over all 576 columns, and each adds the products of both blocks with one half of the values' 512 columns
to its half of the output, [64, 256] in registers. Its own weights it has in registers, the other's come through shared
memory. The blocks count one after the other, as if one consumer went through them: the weights of the first block are
made against the maximum so far and its own, those of the second against both. So the first consumer never waits for the
second's scores, and runs half a step ahead: the softmax of one is beside the products of the other. A block is in
shared memory once, for both products, in two halves by columns that go back to the producer one by one: half i of a
block is last read by consumer i, which has that half of the output.

Copies are waited for in pieces of 64 columns: the scores of a block begin when its first piece is there. Both parts of
the query lie in shared memory, and a block's weights where its rope columns were. The second consumer asks for the
first one's weights before it has its own scores, so that those products are behind these without a gap.

The producer copies with cp.async, since pages may be small, and since rows past the last key become zeros: what is not
a number would go through a weight of 0.

Of FP8 rows the producer makes numbers of 16 bits, in registers: consumers see the same blocks. A row's 512 numbers go
by in groups of 128, which share a scale where there are scales. What goes into a half is loaded while its buffer is
waited for, out of the second-level cache: that was asked for all of a pair's rows a pair ahead.
"""

from __future__ import annotations

from polyattn_triton.hopper.common import LN2, load_rows, made_barriers, scaled, viewed

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
_PIECE = gl.constexpr(64)
"""Columns that are copied and waited for together; those of the rope part are one."""
_PIECES = gl.constexpr(4)
"""Of a half."""
_PRODUCERS = gl.constexpr(128)
"""Threads that copy."""
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Which of them copies what of a piece."""
_GROUP = gl.constexpr(128)
"""Numbers of an FP8 row that share a scale: two pieces."""
_RAW = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
"""Which thread converts what of a group, in words of four FP8 numbers: four of each of 4 rows. Eight threads side by
side write parts of two rows, which lie in different banks."""
_ROPE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [0, 8], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
"""The same of rope columns, whose rows each thread has in `_RAW` as well."""
_RAW_ROPE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [8, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
"""The same of rope columns in FP8, in words of four."""
_FETCHED = gl.constexpr(
    gl.DistributedLinearLayout([], [[1, 0], [2, 0], [4, 0], [8, 0], [0, 1]], [[16, 0], [32, 0]], [], [64, 2])
)
"""Which thread asks for a line of which row: one of a row that its warp has in `_RAW`."""
_LINE_BYTES = gl.constexpr(128)
"""What is asked for at once."""


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers, an allocation each: between waits for two of one allocation Triton puts a barrier of the warps."""
    barriers = ()
    for _ in gl.static_range(COUNT):
        barriers = barriers + (made_barriers(1, ARRIVALS).index(0),)  # noqa: RUF005  no starred tuples
    return barriers


@gluon.jit
def _share(shares, lists, tiles):
    """This program's (tile, number of its share, first and last key block, sequence, that sequence's first block). Of
    lists pieces are dealt out, whole ones: first and last of these."""
    part = gl.program_id(0) // tiles
    if lists[0] is None:
        at = shares + part * 3
        found = (gl.load(at), gl.load(at + 3), gl.load(at + 1), gl.load(at + 2))
    else:
        pieces = (lists[3] * lists[4]).to(gl.int64)
        parts = gl.num_programs(0) // tiles
        found = ((part * pieces // parts).to(gl.int32), ((part + 1) * pieces // parts).to(gl.int32), 0, 0)
    return gl.program_id(0) % tiles, part, found[0], found[1], found[2], found[3]


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
def _listed_segment(item, lists, tile, HEADS: gl.constexpr):
    """As `_segment`, of a piece of a token's list. It has keys `begin` to `end` of the list."""
    _listed, _sequence_of, topk, _tokens, parts, each, _row = lists
    begin = item % parts * each
    end = gl.minimum(begin + each, topk)
    pairs = gl.maximum((end - begin + 2 * _N - 1) // (2 * _N), 1)
    return item // parts, 1, topk, begin, end, pairs, item + 1, True, 0, tile * _M < HEADS


@gluon.jit
def _places_of(lists, token, key, end, LAYOUT: gl.constexpr):
    """What a block of a list says, of a sequence its keys; -1 past its end."""
    n = key + gl.arange(0, _N, LAYOUT)
    if lists[0] is None:
        return gl.where(n < end, n, -1)
    else:
        return gl.load(lists[0] + token.to(gl.int64) * lists[6] + n, mask=n < end, other=-1)


@gluon.jit
def _rows_of(table, place, PAGE: gl.constexpr):
    """The rows of the cache where these places of a sequence lie, -1 = none."""
    page = gl.load(table + gl.maximum(place, 0) // PAGE, mask=place >= 0, other=0)
    return gl.where(place >= 0, page * PAGE + place % PAGE, -1)


@gluon.jit
def _pages_of(page_table, key, end, PAGE: gl.constexpr):
    """The pages of a block."""
    pages = ()
    for chunk in gl.static_range(max(_N // PAGE, 1)):
        at = key + chunk * PAGE
        pages = pages + (gl.load(page_table + at // PAGE, mask=at < end, other=0),)  # noqa: RUF005  no starred tuples
    return pages


@gluon.jit
def _copy_piece(
    to, full, base, pages, first, end, cache_page, ROW: gl.constexpr, PAGE: gl.constexpr, AT: gl.constexpr
):  # fmt: skip
    """Starts the copy of the piece that begins with column AT of keys first .. first + 63, which lie in `pages`: zeros
    from key `end` on."""
    LAYOUT: gl.constexpr = _COPIED
    ROWS: gl.constexpr = min(PAGE, _N)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    at = (row * ROW)[:, None] + (AT + gl.arange(0, _PIECE, gl.SliceLayout(0, LAYOUT)))[None, :]
    if ROWS == _N:
        source = base + (pages[0].to(gl.int64) * cache_page + first % PAGE * ROW)
        if first + _N <= end:
            load_rows(to, source + at)
        else:
            load_rows(to, source + at, mask=(row < end - first)[:, None])
    else:
        for chunk in gl.static_range(_N // ROWS):
            key = first + chunk * ROWS
            source = base + pages[chunk].to(gl.int64) * cache_page
            load_rows(to.slice(chunk * ROWS, ROWS, dim=0), source + at, mask=(row < end - key)[:, None])
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _copy_rows(to, full, base, rows, ROW: gl.constexpr, AT: gl.constexpr):
    """As `_copy_piece`, of rows wherever they lie: zeros for row -1."""
    at = rows.to(gl.int64)[:, None] * ROW + (AT + gl.arange(0, _PIECE, gl.SliceLayout(0, _COPIED)))[None, :]
    load_rows(to, base + at, mask=(rows >= 0)[:, None])
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _copy_listed_half(given, rows, phase, BLOCK: gl.constexpr, SIDE: gl.constexpr, ROW: gl.constexpr):
    """As `_copy_half`, of rows wherever they lie."""
    ks, rs, full, rope_full, free, cache, _first, _end, _cache_page = given
    HALF: gl.constexpr = 2 * BLOCK + SIDE
    mbarrier.wait(free[HALF], phase)
    for c in gl.static_range(_PIECES):
        piece = ks.index(HALF * _PIECES + c)
        _copy_rows(piece, full[HALF * _PIECES + c], cache, rows, ROW, SIDE * _HALF + c * _PIECE)
    if SIDE != BLOCK:
        _copy_rows(rs.index(BLOCK), rope_full[BLOCK], cache, rows, ROW, 2 * _HALF)


@gluon.jit
def _hidden_zero(any_number):
    """0, which the compiler does not know. What is made of it is made where it is used: all 44 descriptors of a step's
    products would be kept in registers from step to step, and spilled."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [any_number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch(rows, words, ROW: gl.constexpr):
    """Asks for FP8 rows in the second-level cache, -1 = none. They begin anywhere in a line, but end in the one where
    their last 16 bytes begin."""
    line = gl.arange(0, 2, gl.SliceLayout(0, _FETCHED))
    WORDS: gl.constexpr = _LINE_BYTES // 4
    for pair in gl.static_range(((656 - 16) // _LINE_BYTES + 2) // 2):
        at = words + (rows.to(gl.int64)[:, None] * ROW + ((2 * pair + line) * WORDS)[None, :])
        gl.inline_asm_elementwise(
            """
            {
                .reg .pred some;
                setp.ge.s32 some, $2, 0;
                @some prefetch.global.L2 [$1];
                mov.b32 $0, 0;
            }
            """,
            "=r,l,r", [at, rows[:, None]], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _load_half(rows, cache, TURN: gl.constexpr, ROW: gl.constexpr):
    """The half TURN of FP8 rows, in the order in which halves of two pairs come free, in groups: words [64, 32] and, if
    there are some, scales [64]; zeros for row -1."""
    words, scales, _rope = cache
    row = gl.convert_layout(rows[TURN // 2], gl.SliceLayout(1, _RAW))
    some = row >= 0
    at = row.to(gl.int64) * ROW
    column = gl.arange(0, _GROUP // 4, gl.SliceLayout(0, _RAW))
    groups = ()
    for group in gl.static_range(2):
        number = (TURN + 1) // 2 % 2 * 2 + group
        numbers = gl.load(
            words + (at[:, None] + (number * (_GROUP // 4) + column)[None, :]), mask=some[:, None], other=0
        )
        if scales is None:
            groups = groups + (numbers,)  # noqa: RUF005
        else:
            groups = groups + ((numbers, gl.load(scales + (at + number), mask=some, other=0.0)),)  # noqa: RUF005
    return groups


@gluon.jit
def _numbers(words, factor, zero, dtype: gl.constexpr):
    """The numbers of a group [64, 128], or of fewer columns: FP8 in words of four, times their scales [64], where there
    are some. `zero`: a hidden one."""
    # Two bytes of a word are converted together. The compiler would take the upper two apart first.
    upper = words >> (16 + zero)
    even = gl.join(words.to(gl.uint8), upper.to(gl.uint8))
    odd = gl.join((words >> 8).to(gl.uint8), (upper >> 8).to(gl.uint8))
    raw = gl.join(even, odd).reshape([_N, 4 * words.shape[1]]).to(gl.float8e4nv, bitcast=True)
    if factor is None:
        return raw.to(gl.float32).to(dtype)
    else:
        factor = gl.convert_layout(factor, gl.SliceLayout(1, raw.type.layout), assert_trivial=True)
        return (raw.to(gl.float32) * factor[:, None]).to(dtype)


@gluon.jit
def _convert_half(given, rows, groups, phase, TURN: gl.constexpr, ROW: gl.constexpr):
    """Makes half TURN of a pair of its FP8 `groups`, once its buffer is free, and loads the next one.

    `rows`: of this pair's blocks and of the next one's. Returns: the next half's groups.
    """
    gs, rs, full, rope_full, free, cache = given
    BLOCK: gl.constexpr = TURN // 2
    SIDE: gl.constexpr = (TURN + 1) // 2 % 2
    HALF: gl.constexpr = 2 * BLOCK + SIDE
    words, scales, rope = cache
    # Copied as they are, or told of by one thread.
    COPIED: gl.constexpr = rope is not None and rope.dtype.element_ty == gs.dtype
    if SIDE != BLOCK:
        if rope is None:
            row = gl.convert_layout(rows[BLOCK], gl.SliceLayout(1, _RAW_ROPE))
            at = row.to(gl.int64)[:, None] * ROW + gl.arange(0, _PIECE // 4, gl.SliceLayout(0, _RAW_ROPE))[None, :]
            turned = gl.load(words + (2 * _HALF // 4) + at, mask=(row >= 0)[:, None], other=0)
        else:
            row = gl.convert_layout(rows[BLOCK], gl.SliceLayout(1, _ROPE))
            at = row.to(gl.int64)[:, None] * (2 * ROW) + gl.arange(0, _PIECE, gl.SliceLayout(0, _ROPE))[None, :]
            some = (row >= 0)[:, None]
            if not COPIED:
                turned = gl.load(rope + at, mask=some, other=0.0)
    mbarrier.wait(free[HALF], phase)
    if SIDE != BLOCK:
        if COPIED:
            load_rows(rs.index(BLOCK), rope + at, mask=some)
            async_copy.mbarrier_arrive(rope_full[BLOCK], increment_count=False)
        elif rope is None:
            rs.index(BLOCK).store(_numbers(turned, None, _hidden_zero(phase), gs.dtype))
        else:
            rs.index(BLOCK).store(turned.to(gs.dtype))
    zero = _hidden_zero(phase)
    for group in gl.static_range(2):
        if scales is None:
            gs.index(2 * HALF + group).store(_numbers(groups[group], None, zero, gs.dtype))
        else:
            gs.index(2 * HALF + group).store(_numbers(groups[group][0], groups[group][1], zero, gs.dtype))
    # Nothing that was loaded is on its way here: the fence would wait for it.
    fence_async_shared()
    mbarrier.arrive(full[HALF], count=1)
    if SIDE != BLOCK and not COPIED:
        mbarrier.arrive(rope_full[BLOCK], count=1)
    return _load_half(rows, cache, TURN + 1, ROW)


@gluon.jit
def _copy_half(given, pages, phase, BLOCK: gl.constexpr, SIDE: gl.constexpr, ROW: gl.constexpr, PAGE: gl.constexpr):
    """Starts the copies of half SIDE of a block of the pair whose first key is `first`, once its buffers are free. The
    rope columns go with the half that the other consumer frees: it is the last to read the weights in their place."""
    ks, rs, full, rope_full, free, cache, first, end, cache_page = given
    HALF: gl.constexpr = 2 * BLOCK + SIDE
    key = first + BLOCK * _N
    mbarrier.wait(free[HALF], phase)
    for c in gl.static_range(_PIECES):
        _copy_piece(
            ks.index(HALF * _PIECES + c), full[HALF * _PIECES + c], cache, pages, key, end, cache_page, ROW, PAGE,
            SIDE * _HALF + c * _PIECE,
        )  # fmt: skip
    if SIDE != BLOCK:
        _copy_piece(rs.index(BLOCK), rope_full[BLOCK], cache, pages, key, end, cache_page, ROW, PAGE, 2 * _HALF)


@gluon.jit
def _produce(given, HEADS: gl.constexpr, ROW: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr):
    """The producer: the query of each segment, then its blocks, each half as soon as its buffer is free."""
    (
        query, cache, page_table, seq_lens, cu_seqlens_q, shares, qs, ks, gs, rs, barriers, tiles,
        query_token, query_head, cache_page, table_row, lists,
    ) = given  # fmt: skip
    full, rope_full, free, q_full, q_free = barriers
    LAYOUT: gl.constexpr = _COPIED
    FP8: gl.constexpr = cache[0].dtype.element_ty == gl.int32
    KEYS: gl.constexpr = gl.SliceLayout(1, _FETCHED if FP8 else LAYOUT)
    tile, _part, item, last, n, before = _share(shares, lists, tiles)
    step = 0
    segment = 0
    while item < last:
        if lists[0] is None:
            found = _segment(n, item, last, before, tile, seq_lens, cu_seqlens_q, HEADS, CAUSAL)
        else:
            found = _listed_segment(item, lists, tile, HEADS)
        start, tokens, _s_k, begin, end, pairs, after, _whole, blocks, here = found
        if here:
            if lists[0] is not None or FP8:
                # Meanwhile consumers have the query before.
                sequence = n
                if lists[0] is not None:
                    sequence = start
                    if lists[1] is not None:
                        sequence = gl.load(lists[1] + start)
                table = page_table + sequence * table_row.to(gl.int64)
                rows_0 = _rows_of(table, _places_of(lists, start, begin, end, KEYS), PAGE)
                rows_1 = _rows_of(table, _places_of(lists, start, begin + _N, end, KEYS), PAGE)
                place_0 = _places_of(lists, start, begin + 2 * _N, end, KEYS)
                place_1 = _places_of(lists, start, begin + 3 * _N, end, KEYS)
                if FP8:
                    _fetch(rows_0, cache[0], ROW)
                    _fetch(rows_1, cache[0], ROW)
            mbarrier.wait(q_free, (segment & 1) ^ 1)
            r = tile * _M + gl.arange(0, _M, gl.SliceLayout(1, LAYOUT))
            token = r // HEADS
            row = (start + token).to(gl.int64) * query_token + (r - token * HEADS) * query_head
            at = row[:, None] + gl.arange(0, _PIECE, gl.SliceLayout(0, LAYOUT))[None, :]
            for c in gl.static_range(2 * _PIECES + 1):
                load_rows(qs.index(c), query + at + c * _PIECE, mask=(token < tokens)[:, None])
            async_copy.mbarrier_arrive(q_full, increment_count=False)
            segment += 1
            if lists[0] is None and not FP8:
                table = page_table + n * table_row.to(gl.int64)
                page_0 = _pages_of(table, begin, end, PAGE)
                page_1 = _pages_of(table, begin + _N, end, PAGE)
                for pair in range(pairs):
                    first = begin + pair * (2 * _N)
                    phase = (step & 1) ^ 1
                    # A pair ahead: no copy waits for where its rows are.
                    next_0 = _pages_of(table, first + 2 * _N, end, PAGE)
                    next_1 = _pages_of(table, first + 3 * _N, end, PAGE)
                    block = (ks, rs, full, rope_full, free, cache[0], first, end, cache_page)
                    # In the order in which they come free.
                    _copy_half(block, page_0, phase, 0, 0, ROW, PAGE)
                    _copy_half(block, page_0, phase, 0, 1, ROW, PAGE)
                    _copy_half(block, page_1, phase, 1, 1, ROW, PAGE)
                    _copy_half(block, page_1, phase, 1, 0, ROW, PAGE)
                    page_0 = next_0
                    page_1 = next_1
                    step += 1
            else:
                if FP8:
                    groups = _load_half((rows_0,), cache, 0, ROW)
                for pair in range(pairs):
                    first = begin + pair * (2 * _N)
                    phase = (step & 1) ^ 1
                    # Two pairs ahead, and one: no copy waits for a list or for where its rows are.
                    later_0 = _places_of(lists, start, first + 4 * _N, end, KEYS)
                    later_1 = _places_of(lists, start, first + 5 * _N, end, KEYS)
                    next_0 = _rows_of(table, place_0, PAGE)
                    next_1 = _rows_of(table, place_1, PAGE)
                    if FP8:
                        block = (gs, rs, full, rope_full, free, cache)
                        for turn in gl.static_range(4):
                            groups = _convert_half(block, (rows_0, rows_1, next_0, next_1), groups, phase, turn, ROW)
                            if turn == 0:
                                _fetch(next_0, cache[0], ROW)
                            if turn == 1:
                                _fetch(next_1, cache[0], ROW)
                    else:
                        block = (ks, rs, full, rope_full, free, cache[0], first, end, cache_page)
                        _copy_listed_half(block, rows_0, phase, 0, 0, ROW)
                        _copy_listed_half(block, rows_0, phase, 0, 1, ROW)
                        _copy_listed_half(block, rows_1, phase, 1, 1, ROW)
                        _copy_listed_half(block, rows_1, phase, 1, 0, ROW)
                    rows_0 = next_0
                    rows_1 = next_1
                    place_0 = later_0
                    place_1 = later_1
                    step += 1
        item = after
        before += blocks
        n += 1


@gluon.jit
def _write(
    acc, found, out, lse, start, tokens, tile, out_token, out_head,
    HEADS: gl.constexpr, INDEX: gl.constexpr, OUTPUT: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """Half a tile of output to its tokens, and by the first consumer its LSE."""
    r = tile * _M + gl.arange(0, _M, gl.SliceLayout(1, OUTPUT))
    line = tile * _M + gl.arange(0, _M, LINE)
    c = INDEX * _HALF + gl.arange(0, _HALF, gl.SliceLayout(0, OUTPUT))
    rows = tokens * HEADS
    token = r // HEADS
    row = (start + token).to(gl.int64) * out_token + (r - token * HEADS) * out_head
    gl.store(out + row[:, None] + c[None, :], acc.to(out.dtype.element_ty), mask=(r < rows)[:, None])
    if lse is not None:
        gl.store(lse + start.to(gl.int64) * HEADS + line, found, mask=(line < rows) & (INDEX == 0))


@gluon.jit
def _leave(
    acc, found, out, lse, piece_out, piece_lse, start, tokens, tile, piece_row, whole, out_token, out_head,
    HEADS: gl.constexpr, INDEX: gl.constexpr, OUTPUT: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """Half a tile of output to where it belongs: its tokens, or a piece."""
    if whole:
        _write(acc, found, out, lse, start, tokens, tile, out_token, out_head, HEADS, INDEX, OUTPUT, LINE)
    else:
        r = tile * _M + gl.arange(0, _M, gl.SliceLayout(1, OUTPUT))
        line = tile * _M + gl.arange(0, _M, LINE)
        c = INDEX * _HALF + gl.arange(0, _HALF, gl.SliceLayout(0, OUTPUT))
        rows = tokens * HEADS
        gl.store(piece_out + ((piece_row + r) * (2 * _HALF))[:, None] + c[None, :], acc, mask=(r < rows)[:, None])
        gl.store(piece_lse + piece_row + line, found, mask=(line < rows) & (INDEX == 0))


@gluon.jit
def _base(top, scale):
    """What is subtracted from scaled scores. A row without keys subtracts 0: -inf - -inf would be NaN."""
    return gl.where(top == float("-inf"), 0.0, top) * scale


@gluon.jit
def _multiplied(s, qs, ks, full, phase, zero, BLOCK: gl.constexpr, SIDE: gl.constexpr, ADD: gl.constexpr):
    """The scores of a block with the products of its half SIDE, piece by piece as these come; in flight when this
    returns."""
    HALF: gl.constexpr = 2 * BLOCK + SIDE
    # Barriers of a half.
    EACH: gl.constexpr = len(full) // 4
    for c in gl.static_range(_PIECES):
        if c * EACH % _PIECES == 0:
            mbarrier.wait(full[HALF * EACH + c * EACH // _PIECES], phase)
        piece = ks.index(HALF * _PIECES + c + zero).permute((1, 0))
        s = hopper.warpgroup_mma(qs.index(SIDE * _PIECES + c + zero), piece, s, use_acc=ADD or c > 0, is_async=True)
    return s


@gluon.jit
def _consume(given, HEADS: gl.constexpr, CAUSAL: gl.constexpr, INDEX: gl.constexpr):
    """Consumer INDEX: the scores of every second block, and half INDEX of the output."""
    (
        query, seq_lens, cu_seqlens_q, shares, out, lse, piece_out, piece_lse, qs, ks, vs, rs, maxima, sums,
        barriers, tiles, out_token, out_head, scale, lists, out_part, lse_part,
    ) = given  # fmt: skip
    full, rope_full, free, q_full, q_free, told, weighed, summed = barriers
    OTHER: gl.constexpr = 1 - INDEX
    dtype: gl.constexpr = query.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, SCORES)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    tile, part, item, last, n, before = _share(shares, lists, tiles)
    step = 0
    segment = 0
    while item < last:
        if lists[0] is None:
            found = _segment(n, item, last, before, tile, seq_lens, cu_seqlens_q, HEADS, CAUSAL)
        else:
            found = _listed_segment(item, lists, tile, HEADS)
        start, tokens, s_k, begin, end, pairs, after, whole, blocks, here = found
        if here:
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
                if lists[0] is not None:
                    place = _places_of(lists, start, first, end, gl.SliceLayout(0, SCORES))
                s = gl.full([_M, _N], 0.0, gl.float32, SCORES)
                # The half that this consumer frees comes first, the rope columns come with the other one.
                s = _multiplied(s, qs, ks, full, phase, zero, INDEX, INDEX, False)
                s = _multiplied(s, qs, ks, full, phase, zero, INDEX, OTHER, True)
                mbarrier.wait(rope_full[INDEX], phase)
                s = hopper.warpgroup_mma(
                    qs.index(2 * _PIECES + zero), rs.index(INDEX + zero).permute((1, 0)), s, is_async=True
                )
                if INDEX == 1:
                    # The products with the other's weights go behind these scores, and the softmax beside them.
                    mbarrier.wait(told[0], phase)
                    first_top = maxima.index(0).load(LINE)
                    factor = gl.exp2(top * scale - _base(first_top, scale))
                    acc = scaled((acc,), factor)[0]
                    mbarrier.wait(weighed[0], phase)
                    o = hopper.warpgroup_mma(rs.index(zero), vs.index(1 + zero), acc, is_async=True)
                    s = hopper.warpgroup_mma_wait(1, deps=[s])
                else:
                    s = hopper.warpgroup_mma_wait(0, deps=[s])
                if pair + 1 == pairs:
                    # The next query comes during the last softmax and the products after it.
                    mbarrier.arrive(q_free, count=1)
                if lists[0] is not None:
                    s = gl.where((place >= 0)[None, :], s, float("-inf"))
                elif first + _N > gl.minimum(all_seen, end):
                    j = first + gl.arange(0, _N, gl.SliceLayout(0, SCORES))
                    s = gl.where(j[None, :] < gl.minimum(seen, end)[:, None], s, float("-inf"))
                highest_here = gl.max(s, 1)
                if INDEX == 0:
                    # This consumer goes ahead, with a maximum of its own; the other's block comes on top of it.
                    first_top = gl.maximum(top, highest_here)
                    maxima.index(0).store(first_top)
                    mbarrier.arrive(told[0], count=1)
                    weights = gl.exp2(s * scale - _base(first_top, scale)[:, None])
                    factor = gl.exp2(top * scale - _base(first_top, scale))
                    total = total * factor + gl.sum(weights, 1)
                    p = weights.to(dtype)
                    rs.index(0).store(p)
                    fence_async_shared()
                    mbarrier.arrive(weighed[0], count=1)
                    acc = scaled((acc,), factor)[0]
                    p = gl.convert_layout(p, WEIGHTS, assert_trivial=True)
                    o = hopper.warpgroup_mma(p, vs.index(zero), acc, is_async=True)
                    acc = hopper.warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(free[0], count=1)
                    mbarrier.wait(told[1], phase)
                    top = maxima.index(1).load(LINE)
                    factor = gl.exp2(first_top * scale - _base(top, scale))
                    total = total * factor
                    acc = scaled((acc,), factor)[0]
                    mbarrier.wait(weighed[1], phase)
                    o = hopper.warpgroup_mma(rs.index(1 + zero), vs.index(2 + zero), acc, is_async=True)
                    acc = hopper.warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(free[2], count=1)
                else:
                    highest = gl.maximum(first_top, highest_here)
                    maxima.index(1).store(highest)
                    mbarrier.arrive(told[1], count=1)
                    weights = gl.exp2(s * scale - _base(highest, scale)[:, None])
                    total = total * gl.exp2(top * scale - _base(highest, scale)) + gl.sum(weights, 1)
                    factor = gl.exp2(first_top * scale - _base(highest, scale))
                    top = highest
                    p = weights.to(dtype)
                    rs.index(1).store(p)
                    fence_async_shared()
                    mbarrier.arrive(weighed[1], count=1)
                    acc = hopper.warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(free[1], count=1)
                    acc = scaled((acc,), factor)[0]
                    p = gl.convert_layout(p, WEIGHTS, assert_trivial=True)
                    o = hopper.warpgroup_mma(p, vs.index(3 + zero), acc, is_async=True)
                    acc = hopper.warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(free[3], count=1)
                step += 1
            sums.index(INDEX).store(total)
            mbarrier.arrive(summed[INDEX], count=1)
            mbarrier.wait(summed[OTHER], segment & 1)
            segment += 1
            total += sums.index(OTHER).load(LINE)
            some = total != 0
            total = gl.where(some, total, 1.0)
            acc = scaled((acc,), 1.0 / total)[0]
            natural = gl.where(some, (top * scale + gl.log2(total)) * LN2, float("-inf"))
            # The piece that begins a sequence is the second of its program, any other the first.
            slot = 2 * part + (item == before).to(gl.int32)
            if lists[0] is not None:
                own_lse = lse
                if lse is not None:
                    own_lse = lse + item % lists[4] * lse_part
                _write(
                    acc, natural, out + item % lists[4] * out_part, own_lse, start, tokens, tile, out_token, out_head,
                    HEADS, INDEX, OUTPUT, LINE,
                )  # fmt: skip
            else:
                _leave(
                    acc, natural, out, lse, piece_out, piece_lse, start, tokens, tile, slot.to(gl.int64) * tiles * _M,
                    whole, out_token, out_head, HEADS, INDEX, OUTPUT, LINE,
                )  # fmt: skip
        item = after
        before += blocks
        n += 1


@gluon.jit(do_not_specialize=["tiles", "table_row", "topk", "tokens", "parts", "each"])
def attend(
    query, cache, scales, rope, page_table, seq_lens, cu_seqlens_q, shares, out, lse, piece_out, piece_lse, listed,
    sequence_of, tiles, query_token, query_head, cache_page, table_row, out_token, out_head, scale,
    topk, tokens, parts, each, listed_row, out_part, lse_part,
    HEADS: gl.constexpr, ROW: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `_attend` of kernels/latent.py where STREAMED, for rows of 512 + 64 numbers of 16 bits. `scale` is above 0.

    With `listed`, as `_attend` of kernels/listed.py: a token's list is cut into `parts` pieces of `each` tokens. Of FP8
    `cache` has words of four numbers, ROW counts these, and pages lie side by side. With `scales` and `rope` it is rows
    of 656 bytes, without of 576, rope numbers too.
    """
    lists = (listed, sequence_of, topk, tokens, parts, each, listed_row)
    dtype: gl.constexpr = query.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qs = gl.allocate_shared_memory(dtype, [2 * _PIECES + 1, _M, _PIECE], TILE)
    ks = gl.allocate_shared_memory(dtype, [4 * _PIECES, _N, _PIECE], TILE)
    # Pieces side by side are halves of blocks.
    vs = viewed(ks, dtype, [4, _N, _HALF], TILE)
    gs = viewed(ks, dtype, [8, _N, _GROUP], TILE)
    rs = gl.allocate_shared_memory(dtype, [2, _N, _PIECE], TILE)
    maxima = gl.allocate_shared_memory(gl.float32, [2, _M], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [2, _M], FLAT)
    FP8: gl.constexpr = cache.dtype.element_ty == gl.int32
    if FP8:
        # Halves that were converted, told of by one thread.
        full = _barriers(4, 1)
    else:
        full = _barriers(4 * _PIECES, _PRODUCERS)
    if not FP8 or (rope is not None and rope.dtype.element_ty == dtype):
        rope_full = _barriers(2, _PRODUCERS)
    else:
        rope_full = _barriers(2, 1)
    free = _barriers(4, 1)
    q_full = made_barriers(1, _PRODUCERS)
    q_free = made_barriers(1, 2)
    told = _barriers(2, 1)
    weighed = _barriers(2, 1)
    summed = _barriers(2, 1)
    produced = (
        query, (cache, scales, rope), page_table, seq_lens, cu_seqlens_q, shares, qs, ks, gs, rs,
        (full, rope_full, free, q_full.index(0), q_free.index(0)),
        tiles, query_token, query_head, cache_page, table_row, lists,
    )  # fmt: skip
    consumed = (
        query, seq_lens, cu_seqlens_q, shares, out, lse, piece_out, piece_lse, qs, ks, vs, rs, maxima, sums,
        (full, rope_full, free, q_full.index(0), q_free.index(0), told, weighed, summed),
        tiles, out_token, out_head, scale, lists, out_part, lse_part,
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
