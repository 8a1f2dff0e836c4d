"""The Hopper prefill kernel: one producer warp feeds tiles by TMA to consumer warpgroups that run async wgmma.

The design is FlashAttention-3's (Shah et al., 2024): K and V go through a ring of shared-memory stages guarded by
mbarriers; every consumer warpgroup owns 64 query rows; in a step, Q K^T of the next block and P V of this one are in
flight while the softmax runs; named barriers make the warpgroups take turns, so that one computes its softmax while
the other one's products occupy the tensor cores. P never leaves registers.

A head dim that is no power of two is split in two chunks (96 = 64 + 32, 192 = 128 + 64; 72 = 64 + 16, zero-filled by
TMA), each with its own descriptor and buffers: `q`, `k`, `v`, `o` below are tuples of one or two.
"""

from __future__ import annotations

from polyattn_triton import runtime  # noqa: F401  first: it decides how Triton is imported

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia import hopper  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma  # isort: skip

__all__ = [
    "LN2",
    "added",
    "attend",
    "buffers",
    "flat",
    "leave",
    "load",
    "made_barriers",
    "operand",
    "scaled",
    "settled",
    "softmax",
    "split",
    "sums",
]

# Triton renamed these after 3.6.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)
_TURN = gl.constexpr(8)
"""First named barrier of the warpgroups' turns; Triton itself uses the low numbers."""


@gluon.jit
def _place(turn):
    """Which tile of round `turn` is this program's: there and back again, so that no program gets all the long ones."""
    pid = gl.program_id(0)
    return gl.where(turn % 2 == 0, pid, gl.num_programs(0) - 1 - pid)


@gluon.jit
def _tiles(count):
    """How many of `count` tiles this program computes."""
    programs = gl.num_programs(0)
    rounds = count // programs
    return rounds + (_place(rounds) < count - rounds * programs).to(gl.int32)


@gluon.jit
def _decode(turn, blocks, heads_q, all_heads, section):
    """Query block, head and batch of this program's tile: long rows first, `section` heads at a time (L2)."""
    tile = turn * gl.num_programs(0) + _place(turn)
    first = tile // (section * blocks) * section
    rest = tile - first * blocks
    width = gl.minimum(section, all_heads - first)
    block = blocks - 1 - rest // width
    head = first + rest % width
    return block, head % heads_q, head // heads_q


@gluon.jit
def _range(
    block, s_k, offset, left, CAUSAL: gl.constexpr, LEFT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Key blocks [low, high) that a query tile sees; every row of it sees all keys of [inner_low, inner_high)."""
    top = block * BLOCK_M + offset
    end = s_k
    whole = s_k
    if CAUSAL:
        end = gl.minimum(s_k, top + BLOCK_M)
        whole = gl.minimum(s_k, top + 1)
    low = top * 0
    inner_low = low
    if LEFT:
        low = gl.maximum(top - left, 0) // BLOCK_N
        inner_low = (gl.maximum(top + BLOCK_M - 1 - left, 0) + BLOCK_N - 1) // BLOCK_N
    # At least one block, all masked where the tile sees no key: no path of its own for rows without keys.
    high = gl.maximum((gl.maximum(end, 0) + BLOCK_N - 1) // BLOCK_N, low + 1)
    inner_high = gl.minimum(gl.maximum(gl.maximum(whole, 0) // BLOCK_N, low), high)
    inner_low = gl.minimum(gl.maximum(inner_low, low), inner_high)
    return low, high, inner_low, inner_high


@gluon.jit
def flat(buffer):
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def _fetch(descriptors, rings, batch, head, row, full, stage, wanted):
    """Starts the copy of one tile, if it is wanted; `full` says when it is there."""
    ELEMENTS: gl.constexpr = rings[0].shape[3] * (rings[0].shape[4] + (rings[1].shape[4] if len(rings) == 2 else 0))
    mbarrier.expect(full.index(stage), ELEMENTS * 2, pred=wanted)
    for c in gl.static_range(len(rings)):
        column = c * rings[0].shape[4]
        load(descriptors[c], [batch, head, row, column], full.index(stage), rings[c].index(stage), pred=wanted)


@gluon.jit
def _produce(
    given, CAUSAL: gl.constexpr, LEFT: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    q, k, v, rings, barriers, blocks, heads_q, group, all_heads, section, s_k, offset, left = given
    q_ring, k_ring, v_ring = rings[0], rings[1], rings[2]
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    ROWS: gl.constexpr = q_ring[0].shape[3]
    BLOCK_M: gl.constexpr = WARPGROUPS * ROWS
    step = 0
    for turn in range(_tiles(blocks * all_heads)):
        block, head, batch = _decode(turn, blocks, heads_q, all_heads, section)
        low, high, _, _ = _range(block, s_k, offset, left, CAUSAL, LEFT, BLOCK_M, BLOCK_N)
        for index in gl.static_range(WARPGROUPS):
            mbarrier.wait(q_free.index(index), turn & 1 ^ 1)
            _fetch(q, q_ring, batch, head, block * BLOCK_M + index * ROWS, q_full, index, True)
        for i in range(high - low):
            stage = step % STAGES
            phase = step // STAGES & 1 ^ 1
            key = (high - 1 - i) * BLOCK_N
            mbarrier.wait(k_free.index(stage), phase)
            _fetch(k, k_ring, batch, head // group, key, k_full, stage, True)
            mbarrier.wait(v_free.index(stage), phase)
            _fetch(v, v_ring, batch, head // group, key, v_full, stage, True)
            step += 1


@gluon.jit
def _turn(barrier, OURS: gl.constexpr):
    """Named barrier of two warpgroups: wait until it is our turn, or give the turn to the one it belongs to."""
    if OURS:
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.b32 $0, $1;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.b32 $0, $1;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
        )


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
def settled(total):
    """Keeps ptxas from moving the softmax, which ends in `total`, below the wait for products that should hide it.

    A warp barrier whose mask (all lanes) is computed from `total` where the assembler does not see that it is constant.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 lanes;
            popc.b32 lanes, $2;
            shr.b32 lanes, lanes, 6;
            not.b32 lanes, lanes;
            bar.warp.sync lanes;
            mov.b32 $0, $2;
            mov.b32 $1, $3;
        }
        """,
        "=r,=r,r,r",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def added(o, weights):
    """Waits for `_add`. The weights are given too: they are made before the wait, not after it."""
    if len(o) == 2:
        first, second, weights = hopper.warpgroup_mma_wait(0, deps=(o[0], o[1], weights))
        o = (first, second)
    else:
        first, weights = hopper.warpgroup_mma_wait(0, deps=(o[0], weights))
        o = (first,)
    return o, weights


@gluon.jit
def scaled(o, factor):
    first = o[0] * gl.convert_layout(factor, gl.SliceLayout(1, o[0].type.layout), assert_trivial=True)[:, None]
    if len(o) == 2:
        second = o[1] * gl.convert_layout(factor, gl.SliceLayout(1, o[1].type.layout), assert_trivial=True)[:, None]
        o = (first, second)
    else:
        o = (first,)
    return o


@gluon.jit
def operand(weights, o, DTYPE: gl.constexpr):
    return gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, o[0].type.layout, 2), assert_trivial=True)


@gluon.jit
def split(s):
    """[64, N] as [64, N / 8, 4, 2]: a thread of the layout of products holds all of axes 1 and 3, and one of axis 2."""
    return s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])


@gluon.jit
def _mask(s, key, row, s_k, offset, left, CAUSAL: gl.constexpr, LEFT: gl.constexpr):
    LAYOUT: gl.constexpr = s.type.layout
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
    p = row + offset + gl.arange(0, s.shape[0], ROW)
    if CAUSAL:
        end = gl.minimum(p + 1, s_k) - key
    else:
        end = p * 0 + (s_k - key)
    seen = column < end[:, None][:, :, None][:, :, :, None] - lane
    if LEFT:
        seen = seen & (column >= (p - left - key)[:, None][:, :, None][:, :, :, None] - lane)
    s = gl.where(seen, s, float("-inf")).reshape([s.shape[0], 8 * s.shape[1]])
    return gl.convert_layout(s, LAYOUT, assert_trivial=True)


@gluon.jit
def sums(weights):
    """What each thread holds of the sums over keys [64, 4]; the threads' parts are added when all keys are done."""
    return gl.sum(gl.sum(split(weights), 3), 1)


@gluon.jit
def softmax(s, top, total, scale):
    """One step of the running softmax: weights, factor for what was accumulated, maximum, sum. `scale` is positive."""
    highest = gl.maximum(top, gl.max(s, 1))
    # A row without keys subtracts 0: -inf - -inf would be NaN.
    base = gl.where(highest == float("-inf"), 0.0, highest) * scale
    factor = gl.exp2(top * scale - base)
    weights = gl.exp2(s * scale - base[:, None])
    shrink = gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout), assert_trivial=True)[:, None]
    return weights, factor, highest, total * shrink + sums(weights)


@gluon.jit
def leave(o, ring, descriptors, batch, head, row, INDEX: gl.constexpr, LATER: gl.constexpr):
    """Starts the copy of the output to memory, from buffers of its own (LATER: until the next copy) or those of Q.

    TMA leaves out rows and columns beyond the end.
    """
    if LATER:
        tma.store_wait(0)
        _barrier()
    for c in gl.static_range(len(o)):
        flat(ring[c].index(INDEX)).store(o[c].to(ring[c].dtype))
    fence_async_shared()
    _barrier()
    for c in gl.static_range(len(o)):
        store(descriptors[c], [batch, head, row, c * ring[0].shape[4]], ring[c].index(INDEX))


@gluon.jit
def _give_back(feed, WHICH: gl.constexpr, ring, full, free, key, stage, STAGES: gl.constexpr):
    """The block that starts at `key` is done with: its stage goes to the producer, or is filled here (`feed`)."""
    if len(feed) == 0:
        mbarrier.arrive(free.index(stage), count=1)
    else:
        k, v, batch, head, low = feed
        _barrier()
        key -= STAGES * ring[0].shape[3]
        _fetch(k if WHICH == 0 else v, ring, batch, head, key, full, stage, key >= low)


@gluon.jit
def _steps(
    first, last, step, weights, o, top, total, row, rings, barriers, feed, s_k, offset, left, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, INDEX: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr, TURNS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Key blocks first - 1, first - 2, ..., last.

    With OVERLAP, `weights` are those of the block before, whose products with V are added while the next are made.
    """
    q_ring, k_ring, v_ring, _ = rings
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
            s = _mask(s, key, row, s_k, offset, left, CAUSAL, LEFT)
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
def _consume(
    given, sources, CAUSAL: gl.constexpr, LEFT: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr, TURNS: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Consumer INDEX: its share of the rows of every query tile. Without a producer it copies from `sources` itself."""
    (
        descriptors, rings, barriers, lse, sinks, blocks, heads_q, all_heads, section, s_q, s_k, offset, left, scale,
        lse_b, lse_s, lse_h,
    ) = given  # fmt: skip
    q_ring, k_ring, v_ring, o_ring = rings
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    ROWS: gl.constexpr = q_ring[0].shape[3]
    BLOCK_M: gl.constexpr = WARPGROUPS * ROWS
    BLOCK_N: gl.constexpr = k_ring[0].shape[3]
    DTYPE: gl.constexpr = q_ring[0].dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    step = 0
    if TURNS and INDEX == WARPGROUPS - 1:
        # The last one lets the first one begin.
        _turn(_TURN, False)
    for turn in range(_tiles(blocks * all_heads)):
        block, head, batch = _decode(turn, blocks, heads_q, all_heads, section)
        low, high, inner_low, inner_high = _range(block, s_k, offset, left, CAUSAL, LEFT, BLOCK_M, BLOCK_N)
        row = block * BLOCK_M + INDEX * ROWS
        top = gl.full([ROWS], float("-inf"), gl.float32, LINE)
        weights = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, LAYOUT)
        total = sums(weights)
        O_0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, v_ring[0].shape[4], 16])
        first = gl.full([ROWS, v_ring[0].shape[4]], 0.0, gl.float32, O_0)
        if len(v_ring) == 2:
            O_1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, v_ring[1].shape[4], 16])
            o = (first, gl.full([ROWS, v_ring[1].shape[4]], 0.0, gl.float32, O_1))
        else:
            o = (first,)
        if len(sources) == 0:
            feed = ()
        else:
            q, k, v, group = sources
            feed = (k, v, batch, head // group, low * BLOCK_N)
            _fetch(q, q_ring, batch, head, row, q_full, 0, True)
            for ahead in gl.static_range(STAGES):
                stage = (step + ahead) % STAGES
                key = (high - 1 - ahead) * BLOCK_N
                _fetch(k, k_ring, batch, head // group, key, k_full, stage, high - ahead > low)
                _fetch(v, v_ring, batch, head // group, key, v_full, stage, high - ahead > low)
        mbarrier.wait(q_full.index(INDEX), turn & 1)
        if OVERLAP:
            # The first block's weights are made here; the loops add their products with V.
            mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
            s = hopper.warpgroup_mma_wait(0, deps=(_scores(q_ring, k_ring, step % STAGES, INDEX, LAYOUT),))
            high -= 1
            _give_back(feed, 0, k_ring, k_full, k_free, high * BLOCK_N, step % STAGES, STAGES)
            s = _mask(s, high * BLOCK_N, row, s_k, offset, left, CAUSAL, LEFT)
            weights, _, top, total = softmax(s, top, total, scale)
            step += 1
            inner_high = gl.minimum(inner_high, high)
            inner_low = gl.minimum(inner_low, inner_high)
        # From the right: blocks cut by the end of the keys or the diagonal, whole blocks, blocks cut by the window.
        if CAUSAL or not OVERLAP:
            step, weights, o, top, total = _steps(
                high, inner_high, step, weights, o, top, total, row, rings, barriers, feed, s_k, offset, left, scale,
                True, CAUSAL, LEFT, INDEX, WARPGROUPS, STAGES, OVERLAP, TURNS, LAYOUT,
            )  # fmt: skip
        step, weights, o, top, total = _steps(
            inner_high, inner_low, step, weights, o, top, total, row, rings, barriers, feed, s_k, offset, left, scale,
            False, CAUSAL, LEFT, INDEX, WARPGROUPS, STAGES, OVERLAP, TURNS, LAYOUT,
        )  # fmt: skip
        if LEFT:
            step, weights, o, top, total = _steps(
                inner_low, low, step, weights, o, top, total, row, rings, barriers, feed, s_k, offset, left, scale,
                True, CAUSAL, LEFT, INDEX, WARPGROUPS, STAGES, OVERLAP, TURNS, LAYOUT,
            )  # fmt: skip
        if len(o_ring) != 0 and len(sources) == 0:
            # No products with Q any more: the next one may come.
            mbarrier.arrive(q_free.index(INDEX), count=1)
        if OVERLAP:
            before = (step - 1) % STAGES
            mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
            o, _ = added(_add(operand(weights, o, DTYPE), v_ring, before, o), weights)
            if len(sources) == 0:
                mbarrier.arrive(v_free.index(before), count=1)

        top = top * scale
        total = gl.convert_layout(gl.sum(total, 1), LINE, assert_trivial=True)
        if lse is not None:
            i = row + gl.arange(0, ROWS, LINE)
            found = gl.where(total > 0, (top + gl.log2(total)) * LN2, float("-inf"))
            line = lse + batch.to(gl.int64) * lse_b + head * lse_h + i.to(gl.int64) * lse_s
            gl.store(line, found, i < s_q)
        if sinks is not None:
            sink = gl.load(sinks + head).to(gl.float32) * _LOG2E
            base = gl.maximum(top, sink)
            base = gl.where(base == float("-inf"), 0.0, base)
            factor = gl.exp2(top - base)
            o = scaled(o, factor)
            total = total * factor + gl.exp2(sink - base)
        # The sum of a row without keys is 0, and so is its output.
        o = scaled(o, 1.0 / gl.where(total > 0, total, 1.0))
        leave(o, q_ring if len(o_ring) == 0 else o_ring, descriptors, batch, head, row, INDEX, len(o_ring) != 0)
        if len(o_ring) == 0:
            tma.store_wait(0)
            if len(sources) == 0:
                mbarrier.arrive(q_free.index(INDEX), count=1)
            else:
                _barrier()
    tma.store_wait(0)


@gluon.jit
def buffers(descriptor, COUNT: gl.constexpr):
    shape: gl.constexpr = [COUNT] + descriptor.block_shape  # noqa: RUF005  Triton has no starred lists
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def _ring(descriptors, COUNT: gl.constexpr):
    first = buffers(descriptors[0], COUNT)
    if len(descriptors) == 2:
        rings = (first, buffers(descriptors[1], COUNT))
    else:
        rings = (first,)
    return rings


@gluon.jit
def made_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(
    do_not_specialize=[
        "blocks", "heads_q", "group", "all_heads", "section", "s_q", "s_k", "offset", "left", "lse_b", "lse_s", "lse_h",
    ]
)  # fmt: skip
def attend(
    q_0, q_1, k_0, k_1, v_0, v_1, o_0, o_1, lse, sinks,
    blocks, heads_q, group, all_heads, section, s_q, s_k, offset, left, scale, lse_b, lse_s, lse_h,
    CAUSAL: gl.constexpr, LEFT: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    TURNS: gl.constexpr, REGISTERS: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor. Descriptors are views [B, H, S, D] with boxes [1, 1, rows, chunk].

    WARPGROUPS consumers with a producer; 1: all warps together, without one. APART: the output has buffers of its own,
    and the next Q comes while it leaves.
    """
    if q_1 is None:
        q = (q_0,)
        k = (k_0,)
    else:
        q = (q_0, q_1)
        k = (k_0, k_1)
    if v_1 is None:
        v = (v_0,)
        o = (o_0,)
    else:
        v = (v_0, v_1)
        o = (o_0, o_1)
    BLOCK_N: gl.constexpr = k_0.block_shape[2]
    if APART:
        rings = (_ring(q, WARPGROUPS), _ring(k, STAGES), _ring(v, STAGES), _ring(o, WARPGROUPS))
    else:
        rings = (_ring(q, WARPGROUPS), _ring(k, STAGES), _ring(v, STAGES), ())
    barriers = (
        made_barriers(WARPGROUPS, 1), made_barriers(WARPGROUPS, 1),
        made_barriers(STAGES, 1), made_barriers(STAGES, WARPGROUPS),
        made_barriers(STAGES, 1), made_barriers(STAGES, WARPGROUPS),
    )  # fmt: skip
    produced = (q, k, v, rings, barriers, blocks, heads_q, group, all_heads, section, s_k, offset, left)
    consumed = (
        o, rings, barriers, lse, sinks, blocks, heads_q, all_heads, section, s_q, s_k, offset, left, scale,
        lse_b, lse_s, lse_h,
    )  # fmt: skip
    # Constants lose their nature in a tuple that is a variable: they are written out.
    if WARPGROUPS == 1:
        _consume(consumed, (q, k, v, group), CAUSAL, LEFT, WARPGROUPS, STAGES, OVERLAP, TURNS, 0)
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (consumed, (), CAUSAL, LEFT, WARPGROUPS, STAGES, OVERLAP, TURNS, 0)),
                (_consume, (consumed, (), CAUSAL, LEFT, WARPGROUPS, STAGES, OVERLAP, TURNS, 1)),
                (_produce, (produced, CAUSAL, LEFT, WARPGROUPS, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consumed, (), CAUSAL, LEFT, WARPGROUPS, STAGES, OVERLAP, TURNS, 0)),
                (_consume, (consumed, (), CAUSAL, LEFT, WARPGROUPS, STAGES, OVERLAP, TURNS, 1)),
                (_consume, (consumed, (), CAUSAL, LEFT, WARPGROUPS, STAGES, OVERLAP, TURNS, 2)),
                (_produce, (produced, CAUSAL, LEFT, WARPGROUPS, BLOCK_N, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
