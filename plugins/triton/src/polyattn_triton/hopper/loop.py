"""What a consumer warpgroup does with a query tile: it walks along key blocks, from the last one to the first.

The rings of K and V are tuples of one or two buffers [stages, 1, 1, keys, columns]; a tile's logits, weights and
output are registers. `barriers` are (q_full, q_free, k_full, k_free, v_full, v_free).

What a tile sees is told by `seen`: (keys, where query row 0 stands among them, keys seen before a query's own, tree).
`tree` is (), or (a bool mask at this sequence and first head, strides of its queries and heads, rows of the tile's
sequence): the mask is read from the key on at which query row 0 stands, and is True before it.
"""

from __future__ import annotations

from polyattn_triton.hopper.common import (
    added,
    barrier,
    flat,
    load,
    meet,
    operand,
    scaled,
    settled,
    softmax,
    split,
    sums,
)

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia import hopper  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import mbarrier  # isort: skip

__all__ = ["drained", "fetch", "first_turn", "key_blocks", "own_blocks", "passed", "walked"]

_TURN = gl.constexpr(8)
"""First named barrier of the warpgroups' turns."""


@gluon.jit
def key_blocks(first, last, s_k, plain, left, CAUSAL: gl.constexpr, LEFT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Key blocks [low, high) that a query tile sees; every row of it sees all keys of [inner_low, inner_high).

    Its rows stand at keys `first` to `last`. Of the s_k keys a mask hides some from key `plain` on.
    """
    end = s_k
    whole = plain
    if CAUSAL:
        end = gl.minimum(s_k, last + 1)
        whole = gl.minimum(plain, first + 1)
    low = first * 0
    inner_low = low
    if LEFT:
        low = gl.maximum(first - left, 0) // BLOCK_N
        inner_low = (gl.maximum(last - left, 0) + BLOCK_N - 1) // BLOCK_N
    # At least one block, all masked where the tile sees no key: no path of its own for rows without keys.
    high = gl.maximum((gl.maximum(end, 0) + BLOCK_N - 1) // BLOCK_N, low + 1)
    inner_high = gl.minimum(gl.maximum(gl.maximum(whole, 0) // BLOCK_N, low), high)
    inner_low = gl.minimum(gl.maximum(inner_low, low), inner_high)
    return low, high, inner_low, inner_high


@gluon.jit
def own_blocks(
    span, row, s_q, s_k, offset, left, CAUSAL: gl.constexpr, LEFT: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Of a tile's `key_blocks` those that the ROWS query rows from `row` on see; at least one."""
    low, high = span[0], span[1]
    first = row + offset
    own_low, own_high, inner_low, inner_high = key_blocks(
        first, first + ROWS - 1, s_k, s_k, left, CAUSAL, LEFT, BLOCK_N
    )
    # Nobody reads what becomes of rows past the end.
    own_low = gl.where(row < s_q, gl.minimum(own_low, high - 1), low)
    own_high = gl.where(row < s_q, gl.minimum(gl.maximum(own_high, own_low + 1), high), low + 1)
    inner_high = gl.minimum(gl.maximum(inner_high, own_low), own_high)
    return own_low, own_high, gl.minimum(gl.maximum(inner_low, own_low), inner_high), inner_high


@gluon.jit
def fetch(descriptors, rings, batch, head, row, full, stage, wanted):
    """Starts the copy of one tile, if it is wanted; `full` says when it is there."""
    ELEMENTS: gl.constexpr = rings[0].shape[3] * (rings[0].shape[4] + (rings[1].shape[4] if len(rings) == 2 else 0))
    mbarrier.expect(full.index(stage), ELEMENTS * 2, pred=wanted)
    for c in gl.static_range(len(rings)):
        column = c * rings[0].shape[4]
        load(descriptors[c], [batch, head, row, column], full.index(stage), rings[c].index(stage), pred=wanted)


@gluon.jit
def _turn(number, OURS: gl.constexpr):
    """Two warpgroups: wait until it is our turn, or give the turn to the one it belongs to."""
    meet(number, 256, OURS)


@gluon.jit
def first_turn(INDEX: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Before the first tile of consumers that take turns: the last one lets the first one begin."""
    if INDEX == WARPGROUPS - 1:
        _turn(_TURN, False)


@gluon.jit
def passed(
    count, step, barriers, INDEX: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr
):
    """Lets `count` blocks go by that others see and consumer INDEX does not: it gives them back as they come, and its
    turns to the next. Returns the next step."""
    _, _, k_full, k_free, v_full, v_free = barriers
    for _ in range(count):
        stage = step % STAGES
        phase = step // STAGES & 1
        if TURNS:
            _turn(_TURN + INDEX, True)
            _turn(_TURN + (INDEX + 1) % WARPGROUPS, False)
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_free.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def _scores(q_ring, k_ring, stage, INDEX: gl.constexpr, LAYOUT: gl.constexpr):
    """Issues S = Q K^T; it is in flight when this returns."""
    empty = gl.full([q_ring[0].shape[3], k_ring[0].shape[3]], 0.0, gl.float32, LAYOUT)
    key = flat(k_ring[0].index(stage)).permute((1, 0))
    s = hopper.warpgroup_mma(flat(q_ring[0].index(INDEX)), key, empty, use_acc=False, is_async=True)
    if len(q_ring) == 2:
        key = flat(k_ring[1].index(stage)).permute((1, 0))
        s = hopper.warpgroup_mma(flat(q_ring[1].index(INDEX)), key, s, is_async=True)
    return s


@gluon.jit
def _add(p, v_ring, stage, o):
    """Issues O += P V; it is in flight when this returns."""
    first = hopper.warpgroup_mma(p, flat(v_ring[0].index(stage)), o[0], is_async=True)
    if len(o) == 2:
        second = hopper.warpgroup_mma(p, flat(v_ring[1].index(stage)), o[1], is_async=True)
        o = (first, second)
    else:
        o = (first,)
    return o


@gluon.jit
def _empty(v_ring, ROWS: gl.constexpr):
    """An output of zeros."""
    O_0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, v_ring[0].shape[4], 16])
    first = gl.full([ROWS, v_ring[0].shape[4]], 0.0, gl.float32, O_0)
    if len(v_ring) == 2:
        O_1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, v_ring[1].shape[4], 16])
        o = (first, gl.full([ROWS, v_ring[1].shape[4]], 0.0, gl.float32, O_1))
    else:
        o = (first,)
    return o


@gluon.jit
def _opened(s, key, row, s_k, offset, tree, GROUP: gl.constexpr):
    """Logits, -inf where the tree's mask is False."""
    LAYOUT: gl.constexpr = s.type.layout
    mask, mask_row, mask_head, rows = tree
    # Rows past the end are the last one again.
    r = gl.minimum(row + gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT)), rows - 1)
    at = (r // GROUP).to(gl.int64) * mask_row + (r % GROUP).to(gl.int64) * mask_head
    j = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
    opened = gl.load(mask + at[:, None] + j[None, :], ((j >= offset) & (j < s_k))[None, :], 1)
    return gl.where(opened != 0, s, float("-inf"))


@gluon.jit
def _masked(s, key, row, seen, CAUSAL: gl.constexpr, LEFT: gl.constexpr, GROUP: gl.constexpr):
    """Logits of the keys from `key` on, -inf for those that a row does not see."""
    LAYOUT: gl.constexpr = s.type.layout
    s_k, offset, left, tree = seen
    if len(tree) != 0:
        s = _opened(s, key, row, s_k, offset, tree, GROUP)
    s = split(s)
    SPLIT: gl.constexpr = s.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, SPLIT)))
    EIGHT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, SPLIT)))
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, SPLIT)))
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, SPLIT)))
    lane = 2 * gl.arange(0, 4, LANE)[None, :][:, None, :][:, :, :, None]
    # Compared with what is constant in a thread's register: no column number takes a register of its own.
    column = 8 * gl.arange(0, s.shape[1], EIGHT)[None, :][:, :, None][:, :, :, None]
    column = column + gl.arange(0, 2, PAIR)[None, :][:, None, :][:, :, None, :]
    if GROUP == 1:
        p = row + offset + gl.arange(0, s.shape[0], ROW)
    else:
        p = (row + gl.arange(0, s.shape[0], ROW)) // GROUP + offset
    if CAUSAL:
        end = gl.minimum(p + 1, s_k) - key
    else:
        end = p * 0 + (s_k - key)
    visible = column < end[:, None][:, :, None][:, :, :, None] - lane
    if LEFT:
        visible = visible & (column >= (p - left - key)[:, None][:, :, None][:, :, :, None] - lane)
    s = gl.where(visible, s, float("-inf")).reshape([s.shape[0], 8 * s.shape[1]])
    return gl.convert_layout(s, LAYOUT, assert_trivial=True)


@gluon.jit
def _give_back(feed, WHICH: gl.constexpr, ring, full, free, key, stage, STAGES: gl.constexpr):
    """The block that starts at `key` is done with: its stage goes to the producer, or is filled here (`feed`)."""
    if len(feed) == 0:
        mbarrier.arrive(free.index(stage), count=1)
    else:
        k, v, batch, head, low = feed
        barrier()
        key -= STAGES * ring[0].shape[3]
        fetch(k if WHICH == 0 else v, ring, batch, head, key, full, stage, key >= low)


@gluon.jit
def _steps(
    first, last, step, weights, o, top, total, row, rings, barriers, feed, seen, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, GROUP: gl.constexpr, INDEX: gl.constexpr,
    WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, TURNS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Key blocks first - 1, first - 2, ..., last.

    With OVERLAP, `weights` are those of the block before, whose products with V are added while the next are made.
    """
    q_ring, k_ring, v_ring = rings
    _, _, k_full, k_free, v_full, v_free = barriers
    DTYPE: gl.constexpr = q_ring[0].dtype
    BLOCK_N: gl.constexpr = k_ring[0].shape[3]
    for i in range(first - last):
        stage = step % STAGES
        phase = step // STAGES & 1
        key = (first - 1 - i) * BLOCK_N
        if OVERLAP:
            # Carried from step to step in fp32: halves of registers would be unpacked and packed again.
            p = operand(weights, o, DTYPE)
        mbarrier.wait(k_full.index(stage), phase)
        if TURNS:
            _turn(_TURN + INDEX, True)
        s = _scores(q_ring, k_ring, stage, INDEX, LAYOUT)
        if OVERLAP:
            before = (step - 1) % STAGES
            mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
            o = _add(p, v_ring, before, o)
            if TURNS:
                _turn(_TURN + (INDEX + 1) % WARPGROUPS, False)
            s = hopper.warpgroup_mma_wait(len(o), deps=(s,))
        else:
            if TURNS:
                _turn(_TURN + (INDEX + 1) % WARPGROUPS, False)
            s = hopper.warpgroup_mma_wait(0, deps=(s,))
        _give_back(feed, 0, k_ring, k_full, k_free, key, stage, STAGES)
        if MASKED:
            s = _masked(s, key, row, seen, CAUSAL, LEFT, GROUP)
        weights, factor, top, total = softmax(s, top, total, scale)
        if OVERLAP:
            total = settled(total)
            o, weights = added(o, weights)
            _give_back(feed, 1, v_ring, v_full, v_free, key + BLOCK_N, before, STAGES)
            o = scaled(o, factor)
        else:
            o = scaled(o, factor)
            mbarrier.wait(v_full.index(stage), phase)
            o = _add(operand(weights, o, DTYPE), v_ring, stage, o)
            o, weights = added(o, weights)
            _give_back(feed, 1, v_ring, v_full, v_free, key, stage, STAGES)
        step += 1
    return step, weights, o, top, total


@gluon.jit
def walked(
    span, step, row, rings, barriers, feed, seen, scale, CAUSAL: gl.constexpr, LEFT: gl.constexpr, GROUP: gl.constexpr,
    INDEX: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Consumer INDEX, whose first query row is `row`, over the `key_blocks` of its tile; its query is there.

    The state afterwards: step (blocks walked over in all), weights, output, maxima, sums. `drained` makes an end of it;
    Q is not needed any more. `feed`: () where a producer fills the rings, or (descriptors of K, and of V, batch, head,
    first key that is wanted). GROUP query heads share a key head: rows of a tile are queries times these.
    """
    q_ring, k_ring, v_ring = rings
    _, _, k_full, k_free, _, _ = barriers
    low, high, inner_low, inner_high = span
    ROWS: gl.constexpr = q_ring[0].shape[3]
    BLOCK_N: gl.constexpr = k_ring[0].shape[3]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    weights = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, LAYOUT)
    total = sums(weights)
    o = _empty(v_ring, ROWS)
    if OVERLAP:
        # The first block's weights are made here; the loops add their products with V.
        mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
        s = hopper.warpgroup_mma_wait(0, deps=(_scores(q_ring, k_ring, step % STAGES, INDEX, LAYOUT),))
        high -= 1
        _give_back(feed, 0, k_ring, k_full, k_free, high * BLOCK_N, step % STAGES, STAGES)
        s = _masked(s, high * BLOCK_N, row, seen, CAUSAL, LEFT, GROUP)
        weights, _, top, total = softmax(s, top, total, scale)
        step += 1
        inner_high = gl.minimum(inner_high, high)
        inner_low = gl.minimum(inner_low, inner_high)
    # From the right: blocks cut by the end of the keys or the diagonal, whole blocks, blocks cut by the window.
    if CAUSAL or len(seen[3]) != 0 or not OVERLAP:
        step, weights, o, top, total = _steps(
            high, inner_high, step, weights, o, top, total, row, rings, barriers, feed, seen, scale,
            True, CAUSAL, LEFT, GROUP, INDEX, WARPGROUPS, STAGES, OVERLAP, TURNS, LAYOUT,
        )  # fmt: skip
    step, weights, o, top, total = _steps(
        inner_high, inner_low, step, weights, o, top, total, row, rings, barriers, feed, seen, scale,
        False, CAUSAL, LEFT, GROUP, INDEX, WARPGROUPS, STAGES, OVERLAP, TURNS, LAYOUT,
    )  # fmt: skip
    if LEFT:
        step, weights, o, top, total = _steps(
            inner_low, low, step, weights, o, top, total, row, rings, barriers, feed, seen, scale,
            True, CAUSAL, LEFT, GROUP, INDEX, WARPGROUPS, STAGES, OVERLAP, TURNS, LAYOUT,
        )  # fmt: skip
    return step, weights, o, top, total


@gluon.jit
def drained(state, rings, barriers, feed, scale, STAGES: gl.constexpr, OVERLAP: gl.constexpr):
    """What `walked` leaves, with the last block's products with V: output, and of each row maximum and sum, base 2."""
    step, weights, o, top, total = state
    q_ring, _, v_ring = rings
    _, _, _, _, v_full, v_free = barriers
    LINE: gl.constexpr = top.type.layout
    if OVERLAP:
        before = (step - 1) % STAGES
        mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
        o, _ = added(_add(operand(weights, o, q_ring[0].dtype), v_ring, before, o), weights)
        if len(feed) == 0:
            mbarrier.arrive(v_free.index(before), count=1)
    return o, top * scale, gl.convert_layout(gl.sum(total, 1), LINE, assert_trivial=True)
