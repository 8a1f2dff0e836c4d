"""The Hopper extend kernel: packed queries over packed keys or a paged cache, in the manner of `kernel`, whose
consumers it shares.

A row of a tile is a query with one of the GROUP query heads that share a key head. Q is a view [T_q, H_q, D], read in
boxes of 64 / GROUP tokens; of a GROUP that does not divide 64 no box is whole tokens: consumers load their rows one by
one. The pools are matrices of rows, of which a page is PIECE or more that lie together: boxes of PIECE rows and 64
columns, side by side, are the tile that products take, so that a block may be of many pages. Packed keys (PAGE = 0) are
such a matrix without pages: a block is one box from the sequence's first row on, and what it has of the next sequence's
rows is masked like what lies past an end.

Tiles are found on the device: number floor(start * GROUP / M) + n is the first of sequence n, as in
`kernels.extend`. A program computes many, one after the other: there and back again (`common.tile_of`) where all
sequences are as long. Of others nobody knows which programs would get the long ones: those take the next tile of all
when they have done one (`queue`), which the producer asks for, and tells the consumers.

With PARTS the keys of a sequence are cut into ranges, each with tiles of its own whose results are one of as many
float32 parts: a prefix that many share has few tiles, and so have a few new tokens.
"""

from __future__ import annotations

from polyattn_triton.hopper.common import (
    barrier,
    flat,
    load,
    made_barriers,
    natural_lse,
    normalised,
    tile_of,
    viewed,
)
from polyattn_triton.hopper.loop import drained, first_turn, key_blocks, walked

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier  # isort: skip

__all__ = ["attend"]

_ROWS = gl.constexpr(64)
"""Of a consumer."""


@gluon.jit
def _taken(queue, turn):
    """The producer's: number of the tile after that of round `turn`."""
    counter, told, there, gone = queue
    if counter is None:
        number = tile_of(turn + 1)
    else:
        number = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
        mbarrier.wait(gone.index(0), turn & 1 ^ 1)
        told.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + number)
        barrier()
        mbarrier.arrive(there.index(0), count=1)
    return number


@gluon.jit
def _told(queue, turn):
    """A consumer's: number of the tile after that of round `turn`."""
    counter, told, there, gone = queue
    if counter is None:
        number = tile_of(turn + 1)
    else:
        mbarrier.wait(there.index(0), turn & 1)
        number = gl.max(told.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        barrier()
        mbarrier.arrive(gone.index(0), count=1)
    return number


@gluon.jit
def _tile(
    pid, schedule, M: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, UNIFORM: gl.constexpr,
    PARTS: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """(sequence, its first token, its queries, its keys, where query 0 stands among them, tile in it, key head, range
    of its keys, the key at which that begins) of tile `pid`, for tiles of M rows; a sequence's last tile, which sees
    most keys, is its first one. Tiles past the end are negative. Where keys are cut, into ranges of a multiple of UNIT,
    `its keys` are those of the range. Of packed keys, whose `lens` are where sequences begin, the last is a row of
    their matrix.
    """
    lens, starts, sequences, tiles, heads, cuts = schedule
    number = pid // heads
    head = pid - number * heads
    part = number * 0
    if PARTS:
        whole = number // cuts
        part = number - whole * cuts
        number = whole
    if UNIFORM:
        n = number // tiles
        tile = number - n * tiles
    else:
        low = number * 0
        high = low + sequences
        while low < high:
            middle = (low + high) // 2
            if gl.load(starts + middle) * GROUP // M + middle <= number:
                low = middle + 1
            else:
                high = middle
        n = low - 1
        tile = number - (gl.load(starts + n) * GROUP // M + n)
    start = gl.load(starts + n)
    s_q = gl.load(starts + n + 1) - start
    s_k = gl.load(lens + n)
    if PAGE == 0:
        base = s_k
        s_k = gl.load(lens + n + 1) - base
    offset = s_k - s_q
    count = (s_q * GROUP + M - 1) // M
    first = part
    if PARTS:
        each = (s_k + cuts * UNIT - 1) // (cuts * UNIT) * UNIT
        first = part * each
        offset -= first
        s_k = gl.minimum(gl.maximum(s_k - first, 0), each)
        # Without keys there is no page either, but for the first.
        first = gl.where(s_k > 0, first, 0)
    if PAGE == 0:
        first = base
    return n, start, s_q, s_k, offset, count - 1 - tile, head, part, first


@gluon.jit
def _span(
    tile, s_q, s_k, offset, left, CAUSAL: gl.constexpr, LEFT: gl.constexpr, TREE: gl.constexpr, GROUP: gl.constexpr,
    M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """`key_blocks` of a tile, and the first key that some row of it may see."""
    first = tile * M // GROUP + offset
    last = (gl.minimum(tile * M + M, s_q * GROUP) - 1) // GROUP + offset
    plain = s_k
    if TREE:
        plain = offset
    lowest = first * 0
    if LEFT:
        lowest = gl.maximum(first - left, 0)
    return key_blocks(first, last, s_k, plain, left, CAUSAL, LEFT, BLOCK_N), lowest


@gluon.jit
def _places(table, key, s_k, pool, PAGE: gl.constexpr, PIECE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rows of the matrix at which the pieces of a block of keys begin; past the end the last piece again."""
    head_row, page_rows = pool
    found = ()
    for p in gl.static_range(BLOCK_N // PIECE):
        j = key + p * PIECE
        j = gl.minimum(j, gl.maximum(s_k - 1, 0) // PIECE * PIECE)
        page = gl.load(table + j // PAGE)
        found = found + (page * page_rows + j % PAGE + head_row,)  # noqa: RUF005
    return found


@gluon.jit
def _fetch(descriptor, boxes, places, column, full, number, stage, CHUNKS: gl.constexpr):
    """Starts the copy of a block, piece by piece; barrier `number` of `full` says when it is there."""
    PIECE: gl.constexpr = boxes.shape[1]
    WIDTH: gl.constexpr = boxes.shape[2]
    PIECES: gl.constexpr = len(places)
    mbarrier.expect(full.index(number), CHUNKS * PIECES * PIECE * WIDTH * 2)
    for p in gl.static_range(PIECES):
        for c in gl.static_range(CHUNKS):
            load(
                descriptor, [places[p], column + c * WIDTH], full.index(number),
                boxes.index((stage * CHUNKS + c) * PIECES + p),
            )  # fmt: skip


@gluon.jit
def _zeros(boxes, first, last, ROWS: gl.constexpr):
    """ROWS rows at a time of those of all stages become zeros, from number `first` to before `last`."""
    WIDTH: gl.constexpr = boxes.shape[2]
    COUNT: gl.constexpr = boxes.shape[0] * boxes.shape[1] // ROWS
    rows = viewed(boxes, boxes.dtype, [COUNT, ROWS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if ROWS == 1:
        EACH: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    else:
        EACH: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    zeros = gl.full([ROWS, WIDTH], 0.0, boxes.dtype, EACH)
    for number in range(first, last):
        rows.index(number).store(zeros)


@gluon.jit
def _clear(boxes, stage, first, last, CHUNKS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rows [first, last) of a stage become zeros: a sequence of one key leaves all others of a block."""
    last = gl.maximum(first, last)
    # Eight rows are a swizzle's pattern: what lies in them stays in them.
    low = gl.minimum((first + 7) // 8 * 8, last)
    high = gl.maximum(last // 8 * 8, low)
    for c in gl.static_range(CHUNKS):
        before = (stage * CHUNKS + c) * BLOCK_N
        _zeros(boxes, before + first, before + low, 1)
        _zeros(boxes, (before + low) // 8, (before + high) // 8, 8)
        _zeros(boxes, before + high, before + last, 1)


@gluon.jit
def _produce(
    given, CAUSAL: gl.constexpr, LEFT: gl.constexpr, TREE: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr,
    UNIFORM: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    M: gl.constexpr = WARPGROUPS * _ROWS
    (
        q, k, v, boxes, barriers, patch, queue, schedule, numbers, left, table, table_row, box_row, box_column,
        page_rows,
    ) = given  # fmt: skip
    q_box, k_box, v_box = boxes
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    heads = schedule[4]
    PIECE: gl.constexpr = k_box.shape[1]
    CHUNKS: gl.constexpr = q_box.shape[3] // k_box.shape[2]
    step = 0
    done = 0
    patched = 0
    turn = 0
    number = tile_of(0)
    while number < numbers * heads:
        n, start, s_q, s_k, offset, tile, head, _part, first = _tile(
            number, schedule, M, GROUP, PAGE, UNIFORM, PARTS, UNIT
        )
        if tile >= 0:
            span, lowest = _span(tile, s_q, s_k, offset, left, CAUSAL, LEFT, TREE, GROUP, M, BLOCK_N)
            low, high = span[0], span[1]
            if PAGE != 0:
                lines = table + n.to(gl.int64) * table_row
                if PARTS:
                    lines += first // PAGE
                pool = (head * box_row, page_rows)
            if _ROWS % GROUP == 0:
                for index in gl.static_range(WARPGROUPS):
                    mbarrier.wait(q_free.index(index), done & 1 ^ 1)
                    mbarrier.expect(q_full.index(index), _ROWS * q_box.shape[3] * 2)
                    token = start + (tile * M + index * _ROWS) // GROUP
                    load(q, [token, head * GROUP, 0], q_full.index(index), q_box.index(index))
            for i in range(high - low):
                stage = step % STAGES
                phase = step // STAGES & 1 ^ 1
                key = (high - 1 - i) * BLOCK_N
                if PAGE == 0:
                    places = (first + key,)
                else:
                    places = _places(lines, key, s_k, pool, PAGE, PIECE, BLOCK_N)
                mbarrier.wait(k_free.index(stage), phase)
                _fetch(k, k_box, places, head * box_column, k_full, stage, stage, CHUNKS)
                mbarrier.wait(v_free.index(stage), phase)
                gone = lowest - key
                kept = s_k - key
                partly = kept < BLOCK_N
                if LEFT:
                    partly = partly | (gone > 0)
                if partly:
                    # What lies past the end, or before a window, may be no number, and 0 times that is none either.
                    _fetch(v, v_box, places, head * box_column, patch, 0, stage, CHUNKS)
                    mbarrier.wait(patch.index(0), patched & 1)
                    patched += 1
                    if LEFT:
                        _clear(v_box, stage, 0, gone, CHUNKS, BLOCK_N)
                    _clear(v_box, stage, gl.maximum(kept, 0), BLOCK_N, CHUNKS, BLOCK_N)
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(v_full.index(stage), count=1)
                else:
                    _fetch(v, v_box, places, head * box_column, v_full, stage, stage, CHUNKS)
                step += 1
            done += 1
        number = _taken(queue, turn)
        turn += 1


@gluon.jit
def _gather(q, buffer, start, first, rows, head, steps, GROUP: gl.constexpr):
    """The query's rows from `first` on, loaded one by one; those past the end are the last one again."""
    q_token, q_head = steps
    D: gl.constexpr = buffer.shape[1]
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    r = gl.minimum(first + gl.arange(0, _ROWS, gl.SliceLayout(1, WHOLE)), rows - 1)
    # Steps of 16 bytes, which the compiler is to know of.
    line = q + ((start + r // GROUP).to(gl.int64) * q_token + (head * GROUP + r % GROUP) * q_head) * 8
    c = gl.arange(0, D, gl.SliceLayout(0, WHOLE))
    buffer.store(gl.load(line[:, None] + c[None, :]))
    fence_async_shared()
    barrier()


@gluon.jit
def _leave(o, buffer, out, start, first, rows, steps, GROUP: gl.constexpr):
    """The output of rows from `first` on to where it belongs, in whole rows, by way of the query's buffer."""
    out_token, out_head = steps
    D: gl.constexpr = buffer.shape[1]
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    barrier()
    buffer.store(o.to(buffer.dtype))
    barrier()
    whole = buffer.load(WHOLE)
    # The next Q is written by TMA.
    fence_async_shared()
    barrier()
    r = first + gl.arange(0, _ROWS, gl.SliceLayout(1, WHOLE))
    line = out + (start + r // GROUP).to(gl.int64) * out_token + r % GROUP * out_head
    c = gl.arange(0, D, gl.SliceLayout(0, WHOLE))
    return line[:, None] + c[None, :], whole, (r < rows)[:, None]


@gluon.jit
def _leave_part(o, out, start, first, rows, steps, GROUP: gl.constexpr):
    """The float32 output of rows from `first` on to where it belongs."""
    out_token, out_head = steps
    D: gl.constexpr = o.shape[1]
    r = first + gl.arange(0, _ROWS, gl.SliceLayout(1, o.type.layout))
    line = out + (start + r // GROUP).to(gl.int64) * out_token + r % GROUP * out_head
    c = gl.arange(0, D, gl.SliceLayout(0, o.type.layout))
    gl.store(line[:, None] + c[None, :], o, (r < rows)[:, None])


@gluon.jit
def _consume(
    given, CAUSAL: gl.constexpr, LEFT: gl.constexpr, TREE: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr,
    UNIFORM: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, TURNS: gl.constexpr,
    PARTS: gl.constexpr, UNIT: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Consumer INDEX: its share of the rows of every query tile."""
    M: gl.constexpr = WARPGROUPS * _ROWS
    (
        q, q_token, q_head, rings, barriers, queue, schedule, numbers, left, scale, mask, mask_sequence, mask_row,
        mask_head, sinks, out, lse, out_part, out_token, out_head, lse_part, lse_token, lse_head,
    ) = given  # fmt: skip
    q_ring, k_ring, _v_ring = rings
    q_full, q_free = barriers[0], barriers[1]
    heads = schedule[4]
    BLOCK_N: gl.constexpr = k_ring[0].shape[3]
    step = 0
    done = 0
    if TURNS:
        first_turn(INDEX, WARPGROUPS)
    turn = 0
    number = tile_of(0)
    while number < numbers * heads:
        n, start, s_q, s_k, offset, tile, head, part, _first = _tile(
            number, schedule, M, GROUP, PAGE, UNIFORM, PARTS, UNIT
        )
        if tile >= 0:
            span = _span(tile, s_q, s_k, offset, left, CAUSAL, LEFT, TREE, GROUP, M, BLOCK_N)[0]
            row = tile * M + INDEX * _ROWS
            if TREE:
                given_at = mask + n.to(gl.int64) * mask_sequence + (head * GROUP).to(gl.int64) * mask_head
                tree = (given_at, mask_row, mask_head, s_q * GROUP)
            else:
                tree = ()
            if _ROWS % GROUP == 0:
                mbarrier.wait(q_full.index(INDEX), done & 1)
            else:
                _gather(q, flat(q_ring[0].index(INDEX)), start, row, s_q * GROUP, head, (q_token, q_head), GROUP)
            state = walked(
                span, step, row, rings, barriers, (), (s_k, offset, left, tree), scale, CAUSAL, LEFT, GROUP,
                INDEX, WARPGROUPS, STAGES, OVERLAP, TURNS,
            )  # fmt: skip
            step = state[0]
            o, top, total = drained(state, rings, barriers, (), scale, STAGES, OVERLAP)
            r = row + gl.arange(0, _ROWS, top.type.layout)
            h = head * GROUP + r % GROUP
            if lse is not None:
                line = lse + (start + r // GROUP).to(gl.int64) * lse_token + h * lse_head
                if PARTS:
                    line += part.to(gl.int64) * lse_part
                gl.store(line, natural_lse(top, total), r < s_q * GROUP)
            o = normalised(o, top, total, None if sinks is None else gl.load(sinks + h))
            to = out + head * GROUP * out_head
            if not PARTS:
                at, whole, wanted = _leave(
                    o[0], flat(q_ring[0].index(INDEX)), to, start, row, s_q * GROUP, (out_token, out_head), GROUP
                )
                if _ROWS % GROUP == 0:
                    mbarrier.arrive(q_free.index(INDEX), count=1)
                gl.store(at, whole, wanted)
            else:
                barrier()
                if _ROWS % GROUP == 0:
                    mbarrier.arrive(q_free.index(INDEX), count=1)
                to += part.to(gl.int64) * out_part
                _leave_part(o[0], to, start, row, s_q * GROUP, (out_token, out_head), GROUP)
            done += 1
        number = _told(queue, turn)
        turn += 1


@gluon.jit(
    do_not_specialize=["mask_sequence", "mask_row", "mask_head", "table_row", "sequences", "tiles", "numbers", "left",
                       "lse_part", "q_token", "q_head", "cuts"],
)  # fmt: skip
def attend(
    q, k, v, out, lse, sinks, mask, mask_sequence, mask_row, mask_head, table, lens, starts, queue, table_row,
    box_row, box_column, page_rows, sequences, tiles, numbers, heads, left, scale,
    out_part, out_token, out_head, lse_part, lse_token, lse_head, q_token, q_head, cuts,
    CAUSAL: gl.constexpr, LEFT: gl.constexpr, TREE: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr,
    UNIFORM: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """At most one program per multiprocessor. q: in boxes [64 / GROUP, GROUP, D], or where GROUP does not divide 64 an
    address, `q_token` and `q_head` being steps of 8 numbers; k, v: in boxes [PIECE, 64].

    A page p of head h begins at row p * page_rows + h * box_row and column h * box_column. PAGE = 0: keys are packed,
    `lens` is where sequences begin among them, [N + 1], and there is no `table`. `numbers`: of tiles, times heads the
    tiles that there may be. UNIFORM: all sequences have `tiles` of them. queue: int32 0, which counts the tiles that
    programs took after their first one; None = tiles are dealt out there and back again.
    WARPGROUPS: consumers, 2 or 3. PARTS: the keys of a sequence are cut into `cuts` ranges, `numbers` being of tiles
    that are not cut; out and lse are then parts, float32, `out_part` and `lse_part` apart.
    """
    PIECE: gl.constexpr = k.block_shape[0]
    UNIT: gl.constexpr = PAGE * BLOCK_N // PIECE if PAGE else BLOCK_N
    WIDTH: gl.constexpr = k.block_shape[1]
    BOXES: gl.constexpr = STAGES * (D // WIDTH) * (BLOCK_N // PIECE)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    if _ROWS % GROUP == 0:
        q_box = gl.allocate_shared_memory(k.dtype, [WARPGROUPS, _ROWS // GROUP, GROUP, D], q.layout)
    else:
        BOX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        q_box = gl.allocate_shared_memory(k.dtype, [WARPGROUPS, _ROWS, 1, D], BOX)
    k_box = gl.allocate_shared_memory(k.dtype, [BOXES, PIECE, WIDTH], k.layout)
    v_box = gl.allocate_shared_memory(v.dtype, [BOXES, PIECE, WIDTH], v.layout)
    # Boxes side by side are a tile of the layout that products take.
    rings = (
        (viewed(q_box, k.dtype, [WARPGROUPS, 1, 1, _ROWS, D], FLAT),),
        (viewed(k_box, k.dtype, [STAGES, 1, 1, BLOCK_N, D], FLAT),),
        (viewed(v_box, v.dtype, [STAGES, 1, 1, BLOCK_N, D], FLAT),),
    )
    barriers = (
        made_barriers(WARPGROUPS, 1), made_barriers(WARPGROUPS, 1),
        made_barriers(STAGES, 1), made_barriers(STAGES, WARPGROUPS),
        made_barriers(STAGES, 1), made_barriers(STAGES, WARPGROUPS),
    )  # fmt: skip
    schedule = (lens, starts, sequences, tiles, heads, cuts)
    if queue is None:
        waiting = (None, None, None, None)
    else:
        told = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        waiting = (queue, told, made_barriers(1, 1), made_barriers(1, WARPGROUPS))
    if PARTS:
        numbers *= cuts
    produced = (
        q, k, v, (q_box, k_box, v_box), barriers, made_barriers(1, 1), waiting, schedule, numbers, left, table,
        table_row, box_row, box_column, page_rows,
    )  # fmt: skip
    consumed = (
        q, q_token, q_head, rings, barriers, waiting, schedule, numbers, left, scale, mask, mask_sequence, mask_row,
        mask_head, sinks, out, lse, out_part, out_token, out_head, lse_part, lse_token, lse_head,
    )  # fmt: skip
    # Constants lose their nature in a tuple that is a variable: they are written out.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    consumed, CAUSAL, LEFT, TREE, GROUP, PAGE, UNIFORM, WARPGROUPS, STAGES,
                    OVERLAP, TURNS, PARTS, UNIT, 0,
                )),
                (_consume, (
                    consumed, CAUSAL, LEFT, TREE, GROUP, PAGE, UNIFORM, WARPGROUPS, STAGES,
                    OVERLAP, TURNS, PARTS, UNIT, 1,
                )),
                (_produce, (
                    produced, CAUSAL, LEFT, TREE, GROUP, PAGE, UNIFORM,
                    BLOCK_N, WARPGROUPS, STAGES, PARTS, UNIT,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    consumed, CAUSAL, LEFT, TREE, GROUP, PAGE, UNIFORM, WARPGROUPS, STAGES,
                    OVERLAP, TURNS, PARTS, UNIT, 0,
                )),
                (_consume, (
                    consumed, CAUSAL, LEFT, TREE, GROUP, PAGE, UNIFORM, WARPGROUPS, STAGES,
                    OVERLAP, TURNS, PARTS, UNIT, 1,
                )),
                (_consume, (
                    consumed, CAUSAL, LEFT, TREE, GROUP, PAGE, UNIFORM, WARPGROUPS, STAGES,
                    OVERLAP, TURNS, PARTS, UNIT, 2,
                )),
                (_produce, (
                    produced, CAUSAL, LEFT, TREE, GROUP, PAGE, UNIFORM,
                    BLOCK_N, WARPGROUPS, STAGES, PARTS, UNIT,
                )),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
