"""Block-sparse attention on Hopper: `kernel.attend`, whose producers walk lists of key blocks.

A consumer warpgroup owns 64 queries. Query blocks of 128 belong to two of them, which share what is loaded; with query
blocks of 64 each consumer has a list, a producer and a ring of its own, and is never in step with the other one.

K and V share one ring of slots. They come in the order K0 K1 V0 K2 V1 ..., which is the order of their use: with three
slots each load has the time of about one step. A slot is filled by boxes of 64 columns and as many rows as lie together
in memory: two blocks of 64 keys, from two places, are one tile of 128 to the consumer.

Blocks of unequal sizes come as GROUPS of 16 keys that lie together, eight to a step (`groups.grouped`): what a block
has beyond whole groups is one group more, and those come last in a list, so that few steps have keys to mask. Fours of
groups that lie together come first, and one copy brings each.
"""

from __future__ import annotations

from polyattn_triton.hopper.common import (
    added,
    buffers,
    flat,
    load,
    made_barriers,
    natural_lse,
    normalised,
    operand,
    scaled,
    settled,
    softmax,
    split,
    sums,
    viewed,
)
from polyattn_triton.hopper.kernel import leave

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia import hopper  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma  # isort: skip

__all__ = ["attend_listed"]


@gluon.jit
def _share(tiles, RING: gl.constexpr, RINGS: gl.constexpr):
    """How many of the tiles are for this ring of this program."""
    walkers = gl.num_programs(0) * RINGS
    return (tiles - (gl.program_id(0) * RINGS + RING) + walkers - 1) // walkers


@gluon.jit
def _list(
    turn, lists, blocks, heads_q, RING: gl.constexpr, RINGS: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr
):
    """Query block, head and batch of a tile, its entries, how many units of keys they are (PARTS to a block), and of
    GROUPS how many are whole, and lie together in fours."""
    counts, indices, c_b, c_h, i_b, i_h, i_q = lists
    tile = (turn * gl.num_programs(0) + gl.program_id(0)) * RINGS + RING
    block = tile % blocks
    head = tile // blocks % heads_q
    batch = tile // blocks // heads_q
    far = batch.to(gl.int64)
    count = counts + far * c_b + head.to(gl.int64) * c_h
    if GROUPS:
        units = gl.load(count + 3 * block)
        whole = gl.load(count + 3 * block + 1)
        fours = gl.load(count + 3 * block + 2)
    else:
        units = gl.load(count + block) * PARTS
        whole = units
        fours = units
    entries = indices + far * i_b + head.to(gl.int64) * i_h + block.to(gl.int64) * i_q
    return block, head, batch, entries, units, whole, fours


@gluon.jit
def _steps(units, COUNT: gl.constexpr):
    """Steps of COUNT units each; at least one, all masked where nothing is listed: no path of its own for no keys."""
    return gl.maximum((units + COUNT - 1) // COUNT, 1)


@gluon.jit
def _unit(entries, unit, units, BLOCK_K: gl.constexpr, UNIT: gl.constexpr):
    """Number of a listed unit's key block, and the unit's first key in it."""
    number = gl.load(entries + unit // (BLOCK_K // UNIT), mask=unit < units, other=0)
    return number, unit % (BLOCK_K // UNIT) * UNIT


@gluon.jit
def _row(entries, unit, units, s_k, BLOCK_K: gl.constexpr, UNIT: gl.constexpr):
    """First key of a unit; past the list's end one past all keys, for which TMA writes zeros."""
    number, part = _unit(entries, unit, units, BLOCK_K, UNIT)
    return gl.where(unit < units, number * BLOCK_K + part, s_k)


@gluon.jit
def _group(entries, unit, units, s_k):
    """First key of a group; past the list's end one past all keys."""
    entry = gl.load(entries + unit, mask=unit < units, other=0)
    return gl.where(unit < units, entry >> 5, s_k)


@gluon.jit
def _rows(
    entries, step, units, s_k, BLOCK_K: gl.constexpr, UNIT: gl.constexpr, COUNT: gl.constexpr, GROUPS: gl.constexpr
):
    """First keys of the units of a step; of GROUPS only the first one's number, as there are too many to be kept."""
    if GROUPS:
        rows = (step * COUNT,)
    else:
        rows = _block_rows(entries, step, units, s_k, BLOCK_K, UNIT, COUNT)
    return rows


@gluon.jit
def _block_rows(entries, step, units, s_k, BLOCK_K: gl.constexpr, UNIT: gl.constexpr, COUNT: gl.constexpr):
    rows = (_row(entries, step * COUNT, units, s_k, BLOCK_K, UNIT),)
    if COUNT == 2:
        rows = (rows[0], _row(entries, step * COUNT + 1, units, s_k, BLOCK_K, UNIT))
    return rows


@gluon.jit
def _limit(entries, valid, unit, units, s_k, BLOCK_K: gl.constexpr, UNIT: gl.constexpr, PARTLY: gl.constexpr):
    """How many keys of a unit are there; UNIT or more: all of them."""
    if PARTLY:
        number, part = _unit(entries, unit, units, BLOCK_K, UNIT)
        limit = s_k - number * BLOCK_K - part
        if valid is not None:
            limit = gl.minimum(limit, gl.load(valid + number, mask=unit < units, other=0) - part)
        limit = gl.where(unit < units, limit, 0)
    else:
        limit = gl.where(unit < units, UNIT, 0)
    return limit


@gluon.jit
def _limits(
    entries, valid, step, units, s_k, BLOCK_K: gl.constexpr, UNIT: gl.constexpr, COUNT: gl.constexpr,
    PARTLY: gl.constexpr,
):  # fmt: skip
    limits = (_limit(entries, valid, step * COUNT, units, s_k, BLOCK_K, UNIT, PARTLY),)
    if COUNT == 2:
        limits = (limits[0], _limit(entries, valid, step * COUNT + 1, units, s_k, BLOCK_K, UNIT, PARTLY))
    return limits


@gluon.jit
def _limited(s, limits, UNIT: gl.constexpr):
    """Logits, -inf for keys beyond their unit's limit."""
    least = limits[0]
    if len(limits) == 2:
        least = gl.minimum(least, limits[1])
    if least < UNIT:
        LAYOUT: gl.constexpr = s.type.layout
        t = split(s)
        SPLIT: gl.constexpr = t.type.layout
        EIGHT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, SPLIT)))
        LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, SPLIT)))
        PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, SPLIT)))
        lane = 2 * gl.arange(0, 4, LANE)[None, :][:, None, :][:, :, :, None]
        column = 8 * gl.arange(0, t.shape[1], EIGHT)[None, :][:, :, None][:, :, :, None]
        column = column + gl.arange(0, 2, PAIR)[None, :][:, None, :][:, :, None, :]
        seen = column < limits[0] - lane
        if len(limits) == 2:
            seen = (seen & (column < UNIT)) | ((column >= UNIT) & (column < limits[1] + UNIT - lane))
        t = gl.where(seen, t, float("-inf")).reshape([t.shape[0], 8 * t.shape[1]])
        s = gl.convert_layout(t, LAYOUT, assert_trivial=True)
    return s


@gluon.jit
def _cut(s, entries, step, units, whole, UNIT: gl.constexpr, COUNT: gl.constexpr):
    """Logits, -inf for keys that a step's groups do not have."""
    if (step + 1) * COUNT > whole:
        LAYOUT: gl.constexpr = s.type.layout
        t = split(s)
        SPLIT: gl.constexpr = t.type.layout
        EIGHT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, SPLIT)))
        LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, SPLIT)))
        PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, SPLIT)))
        eight = gl.arange(0, t.shape[1], EIGHT)
        unit = step * COUNT + eight // (UNIT // 8)
        has = (gl.load(entries + unit, mask=unit < units, other=0) & 31) - eight % (UNIT // 8) * 8
        lane = 2 * gl.arange(0, 4, LANE)[None, :][:, None, :][:, :, :, None]
        column = lane + gl.arange(0, 2, PAIR)[None, :][:, None, :][:, :, None, :]
        seen = column < has[None, :][:, :, None][:, :, :, None]
        t = gl.where(seen, t, float("-inf")).reshape([t.shape[0], 8 * t.shape[1]])
        s = gl.convert_layout(t, LAYOUT, assert_trivial=True)
    return s


@gluon.jit
def _copy(descriptor, pool, batch, head, row, full, slot, u, CHUNKS: gl.constexpr, COUNT: gl.constexpr):
    """Starts the copy of the rows from `row` on to box u of COUNT of a slot."""
    for c in gl.static_range(CHUNKS):
        box = pool.index((slot * CHUNKS + c) * COUNT + u)
        load(descriptor, [batch, head, row, c * 64], full.index(slot), box)


@gluon.jit
def _fill(
    descriptor, rows, listed, ring, n, RING: gl.constexpr, SLOTS: gl.constexpr, CHUNKS: gl.constexpr,
    COUNT: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the units of a step to slot n of a ring, when it is free."""
    batch, head, entries, units, fours, s_k = listed
    pool, full, free = ring
    slot = RING * SLOTS + n % SLOTS
    mbarrier.wait(free.index(slot), n // SLOTS & 1 ^ 1)
    UNIT: gl.constexpr = pool.shape[3]
    mbarrier.expect(full.index(slot), CHUNKS * COUNT * UNIT * 128)
    if GROUPS:
        one, four = descriptor
        FOURS: gl.constexpr = COUNT // 4
        wide = viewed(pool, pool.dtype, [pool.shape[0] // 4, 1, 1, 4 * UNIT, 64], four.layout)
        for h in gl.static_range(FOURS):
            first = rows[0] + 4 * h
            if first < fours:
                _copy(four, wide, batch, head, gl.load(entries + first) >> 5, full, slot, h, CHUNKS, FOURS)
            else:
                for u in gl.static_range(4):
                    row = _group(entries, first + u, units, s_k)
                    _copy(one, pool, batch, head, row, full, slot, 4 * h + u, CHUNKS, COUNT)
    else:
        for u in gl.static_range(COUNT):
            _copy(descriptor, pool, batch, head, rows[u], full, slot, u, CHUNKS, COUNT)


@gluon.jit
def _produce(
    given, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, COUNT: gl.constexpr, SLOTS: gl.constexpr,
    GROUPS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """The producer warp of a ring."""
    q, k, v, q_ring, pool, barriers, lists, blocks, heads_q, group, tiles, s_k = given
    q_full, q_free, full, free = barriers
    UNIT: gl.constexpr = pool.shape[3]
    CHUNKS: gl.constexpr = q_ring.shape[4] // 64
    RINGS: gl.constexpr = 128 // BLOCK_Q
    n = 0
    for turn in range(_share(tiles, RING, RINGS)):
        block, head, batch, entries, units, _, fours = _list(
            turn, lists, blocks, heads_q, RING, RINGS, BLOCK_K // UNIT, GROUPS
        )
        steps = _steps(units, COUNT)
        rows = _rows(entries, steps - 1, units, s_k, BLOCK_K, UNIT, COUNT, GROUPS)
        listed = (batch, head // group, entries, units, fours, s_k)
        ring = (pool, full, free)
        for i in gl.static_range(BLOCK_Q // 64):
            mbarrier.wait(q_free.index(RING + i), turn & 1 ^ 1)
            mbarrier.expect(q_full.index(RING + i), q_ring.shape[4] * 128)
            load(q, [batch, head, block * BLOCK_Q + i * 64, 0], q_full.index(RING + i), q_ring.index(RING + i))
        _fill(k, rows, listed, ring, n, RING, SLOTS, CHUNKS, COUNT, GROUPS)
        n += 1
        for i in range(1, steps):
            before = rows
            rows = _rows(entries, steps - 1 - i, units, s_k, BLOCK_K, UNIT, COUNT, GROUPS)
            _fill(k, rows, listed, ring, n, RING, SLOTS, CHUNKS, COUNT, GROUPS)
            _fill(v, before, listed, ring, n + 1, RING, SLOTS, CHUNKS, COUNT, GROUPS)
            n += 2
        _fill(v, rows, listed, ring, n, RING, SLOTS, CHUNKS, COUNT, GROUPS)
        n += 1


@gluon.jit
def _consume(
    given, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, COUNT: gl.constexpr, SLOTS: gl.constexpr,
    PARTLY: gl.constexpr, APART: gl.constexpr, GROUPS: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Consumer INDEX: 64 queries of every tile, or of its own tiles."""
    o_descriptor, q_ring, o_ring, pool, barriers, lists, valid, lse, blocks, heads_q, tiles, s_q, s_k, scale = given
    q_full, q_free, full, free = barriers
    UNIT: gl.constexpr = pool.shape[3]
    RINGS: gl.constexpr = 128 // BLOCK_Q
    RING: gl.constexpr = INDEX if RINGS == 2 else 0
    N: gl.constexpr = COUNT * UNIT
    D: gl.constexpr = q_ring.shape[4]
    DTYPE: gl.constexpr = q_ring.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = viewed(pool, DTYPE, [RINGS * SLOTS, N, D], SWIZZLED)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    PLACE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    query = flat(q_ring.index(INDEX))
    n = 0
    for turn in range(_share(tiles, RING, RINGS)):
        block, head, batch, entries, units, whole, _ = _list(
            turn, lists, blocks, heads_q, RING, RINGS, BLOCK_K // UNIT, GROUPS
        )
        steps = _steps(units, COUNT)
        row = block * BLOCK_Q + (INDEX * 64 if RINGS == 1 else 0)
        top = gl.full([64], float("-inf"), gl.float32, LINE)
        empty = gl.full([64, N], 0.0, gl.float32, LAYOUT)
        total = sums(empty)
        o = (gl.full([64, D], 0.0, gl.float32, PLACE),)
        if not GROUPS:
            limits = _limits(entries, valid, steps - 1, units, s_k, BLOCK_K, UNIT, COUNT, PARTLY)
        mbarrier.wait(q_full.index(INDEX), turn & 1)
        slot = RING * SLOTS + n % SLOTS
        mbarrier.wait(full.index(slot), n // SLOTS & 1)
        s = hopper.warpgroup_mma(query, ring.index(slot).permute((1, 0)), empty, use_acc=False, is_async=True)
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(free.index(slot), count=1)
        # From the list's end: its last step, which may have a unit less, is this one.
        if GROUPS:
            s = _cut(s, entries, steps - 1, units, whole, UNIT, COUNT)
        else:
            s = _limited(s, limits, UNIT)
        weights, _, top, total = softmax(s, top, total, scale)
        n += 1
        if PARTLY:
            limits = _limits(entries, valid, gl.maximum(steps - 2, 0), units, s_k, BLOCK_K, UNIT, COUNT, PARTLY)
        for i in range(1, steps):
            # As in `kernel._steps`: products of these keys, and of the values before, during the softmax.
            p = operand(weights, o, DTYPE)
            slot = RING * SLOTS + n % SLOTS
            mbarrier.wait(full.index(slot), n // SLOTS & 1)
            empty = gl.full([64, N], 0.0, gl.float32, LAYOUT)
            s = hopper.warpgroup_mma(query, ring.index(slot).permute((1, 0)), empty, use_acc=False, is_async=True)
            before = RING * SLOTS + (n + 1) % SLOTS
            mbarrier.wait(full.index(before), (n + 1) // SLOTS & 1)
            o = (hopper.warpgroup_mma(p, ring.index(before), o[0], is_async=True),)
            if PARTLY:
                now = limits
                ahead = gl.maximum(steps - 2 - i, 0)
                limits = _limits(entries, valid, ahead, units, s_k, BLOCK_K, UNIT, COUNT, PARTLY)
            s = hopper.warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(free.index(slot), count=1)
            if GROUPS:
                s = _cut(s, entries, steps - 1 - i, units, whole, UNIT, COUNT)
            if PARTLY:
                s = _limited(s, now, UNIT)
            weights, factor, top, total = softmax(s, top, total, scale)
            total = settled(total)
            o, weights = added(o, weights)
            mbarrier.arrive(free.index(before), count=1)
            o = scaled(o, factor)
            n += 2
        if APART:
            # No products with Q any more: the next one may come.
            mbarrier.arrive(q_free.index(INDEX), count=1)
        slot = RING * SLOTS + n % SLOTS
        mbarrier.wait(full.index(slot), n // SLOTS & 1)
        o = (hopper.warpgroup_mma(operand(weights, o, DTYPE), ring.index(slot), o[0], is_async=True),)
        o, _ = added(o, weights)
        mbarrier.arrive(free.index(slot), count=1)
        n += 1

        total = gl.convert_layout(gl.sum(total, 1), LINE, assert_trivial=True)
        if lse is not None:
            i = row + gl.arange(0, 64, LINE)
            line = lse + (batch.to(gl.int64) * heads_q + head) * s_q + i
            gl.store(line, natural_lse(top * scale, total), i < s_q)
        o = normalised(o, top, total, None)
        leave(o, (o_ring,) if APART else (q_ring,), (o_descriptor,), batch, head, row, INDEX, APART)
        if not APART:
            tma.store_wait(0)
            mbarrier.arrive(q_free.index(INDEX), count=1)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "blocks", "heads_q", "group", "tiles", "s_q", "s_k", "c_b", "c_h", "i_b", "i_h", "i_q",
    ]
)  # fmt: skip
def attend_listed(
    q, k, v, k_four, v_four, o, lse, counts, indices, valid, blocks, heads_q, group, tiles, s_q, s_k, scale,
    c_b, c_h, i_b, i_h, i_q,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, COUNT: gl.constexpr, SLOTS: gl.constexpr, PARTLY: gl.constexpr,
    APART: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor.

    Descriptors are views [B, H, S, D]: of Q and O with boxes of 64 rows x D, of K and V with boxes of a unit of keys x
    64 columns. COUNT units are a step. SLOTS: of a ring; there are two rings with blocks of 64 queries. PARTLY: a unit
    that is listed may hold fewer keys. GROUPS: `counts` and `indices` are those of `groups.grouped`; a unit is a group,
    and k_four and v_four have boxes of four. They are the same as k and v elsewhere, and nobody reads them.
    """
    D: gl.constexpr = q.block_shape[3]
    RINGS: gl.constexpr = 128 // BLOCK_Q
    q_ring = buffers(q, 2)
    pool = buffers(k, RINGS * SLOTS * COUNT * (D // 64))
    if APART:
        o_ring = buffers(o, 2)
    else:
        o_ring = q_ring
    barriers = (
        made_barriers(2, 1), made_barriers(2, 1),
        made_barriers(RINGS * SLOTS, 1), made_barriers(RINGS * SLOTS, 2 // RINGS),
    )  # fmt: skip
    lists = (counts, indices, c_b, c_h, i_b, i_h, i_q)
    if GROUPS:
        keys, values = (k, k_four), (v, v_four)
    else:
        keys, values = k, v
    produced = (q, keys, values, q_ring, pool, barriers, lists, blocks, heads_q, group, tiles, s_k)
    consumed = (o, q_ring, o_ring, pool, barriers, lists, valid, lse, blocks, heads_q, tiles, s_q, s_k, scale)
    if RINGS == 1:
        gl.warp_specialize(
            [
                (_consume, (consumed, BLOCK_Q, BLOCK_K, COUNT, SLOTS, PARTLY, APART, GROUPS, 0)),
                (_consume, (consumed, BLOCK_Q, BLOCK_K, COUNT, SLOTS, PARTLY, APART, GROUPS, 1)),
                (_produce, (produced, BLOCK_Q, BLOCK_K, COUNT, SLOTS, GROUPS, 0)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consumed, BLOCK_Q, BLOCK_K, COUNT, SLOTS, PARTLY, APART, GROUPS, 0)),
                (_consume, (consumed, BLOCK_Q, BLOCK_K, COUNT, SLOTS, PARTLY, APART, GROUPS, 1)),
                (_produce, (produced, BLOCK_Q, BLOCK_K, COUNT, SLOTS, GROUPS, 0)),
                (_produce, (produced, BLOCK_Q, BLOCK_K, COUNT, SLOTS, GROUPS, 1)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
