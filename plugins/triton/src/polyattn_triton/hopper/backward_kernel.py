"""The Hopper backward kernel: one producer warp feeds query tiles by TMA to two warpgroups that hold a tile of keys.

The design is FlashAttention-3's (Shah et al., 2024): a program has one tile of keys and values in shared memory, and dK
and dV in registers, while Q and dO come through a ring of stages. Scores are [keys, queries], so that the weights and
their gradient are operands of dV and dK as they lie in registers: five products, and only the gradient goes through
shared memory, for dQ. That one is added up in float32 in global memory by all programs of a head, in any order: two
runs may differ in the last bits, and calls that ask for the same bits every time take the portable kernels.
"""

from __future__ import annotations

from polyattn_triton.hopper.common import add_to, barrier, buffers, flat, load, made_barriers, meet, viewed
from polyattn_triton.hopper.loop import fetch

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia import hopper  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma  # isort: skip

__all__ = ["differentiate"]

_STAGE = gl.constexpr(8)
"""Number of the named barrier of the first stage."""


@gluon.jit
def _decode(tiles, pairs, together):
    """Key tile of this program, and which (batch, sum of heads) it is of: `together` of them at a time (L2)."""
    pid = gl.program_id(0)
    section = pid // (tiles * together)
    rest = pid - section * (tiles * together)
    here = gl.minimum(together, pairs - section * together)
    tile = rest // here
    return tile, section * together + rest - tile * here


@gluon.jit
def _span(
    key, s_q, s_k, offset, left, CAUSAL: gl.constexpr, LEFT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Query blocks [low, high) that see some key of the tile from `key` on; [inner_low, inner_high) see all of them."""
    last = gl.minimum(key + BLOCK_N, s_k) - 1
    row_from = key * 0
    row_to = s_q
    whole_from = row_from
    whole_to = s_q + BLOCK_M
    if CAUSAL:
        row_from = gl.maximum(key - offset, 0)
        whole_from = gl.maximum(last - offset, 0)
    if LEFT:
        row_to = gl.minimum(s_q, last + left - offset + 1)
        whole_to = gl.maximum(key + left - offset + 1, 0)
    low = row_from // BLOCK_M
    high = gl.maximum((gl.maximum(row_to, 0) + BLOCK_M - 1) // BLOCK_M, low)
    inner_low = gl.minimum(gl.maximum((whole_from + BLOCK_M - 1) // BLOCK_M, low), high)
    # A tile that the end of the keys cuts has no whole blocks.
    inner_low = gl.where(key + BLOCK_N > s_k, high, inner_low)
    inner_high = gl.minimum(gl.maximum(whole_to // BLOCK_M, inner_low), high)
    return low, high, inner_low, inner_high


@gluon.jit
def _turned(i, first, last, tile, tiles, ROTATE: gl.constexpr):
    """The i-th of blocks [first, last). ROTATE: programs of a head begin at different ones, not to meet at one dQ."""
    if ROTATE:
        i = (i + (last - first) * tile // tiles) % (last - first)
    return first + i


@gluon.jit
def _given_back(stage, WAIT: gl.constexpr):
    """The producer and the consumers of a stage: wait until it is free, or say that it is.

    An arrival at a barrier in memory would cost two barriers of all consumers: it is one thread's, for all of them.
    """
    meet(_STAGE + stage, 288, WAIT)


@gluon.jit
def _produce(
    given, CAUSAL: gl.constexpr, LEFT: gl.constexpr, ROTATE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    (
        q, k, v, dout, numbers, rings, barriers, tiles, pairs, together, heads, heads_k, each, sums, blocks,
        s_q, s_k, offset, left,
    ) = given  # fmt: skip
    q_ring, d_ring, number_ring, k_buffer, v_buffer, _, _ = rings
    q_full, d_full, k_full, v_full = barriers
    tile, pair = _decode(tiles, pairs, together)
    batch = pair // sums
    first_head = pair % sums * each
    key = tile * BLOCK_N
    fetch((k,), (k_buffer,), batch, first_head // (heads // heads_k), key, k_full, 0, True)
    fetch((v,), (v_buffer,), batch, first_head // (heads // heads_k), key, v_full, 0, True)
    low, high, _, _ = _span(key, s_q, s_k, offset, left, CAUSAL, LEFT, BLOCK_M, BLOCK_N)
    step = 0
    for g in range(each):
        head = first_head + g
        for i in range(high - low):
            block = _turned(i, low, high, tile, tiles, ROTATE)
            stage = step % STAGES
            if step >= STAGES:
                _given_back(stage, True)
            # The numbers of the rows come with Q: one phase of the barrier is both.
            mbarrier.expect(q_full.index(stage), BLOCK_M * (q_ring.shape[4] * 2 + 8))
            load(q, [batch, head, block * BLOCK_M, 0], q_full.index(stage), q_ring.index(stage))
            line = (batch * heads + head) * blocks + block
            load(numbers, [line, 0], q_full.index(stage), number_ring.index(stage))
            fetch((dout,), (d_ring,), batch, head, block * BLOCK_M, d_full, stage, True)
            step += 1
    for i in range(gl.minimum(step, STAGES)):
        _given_back((step + i) % STAGES if step >= STAGES else i, True)


@gluon.jit
def _seen(s, key, row, s_k, offset, left, CAUSAL: gl.constexpr, LEFT: gl.constexpr):
    """Products [keys, queries], -inf where the query does not see the key."""
    LAYOUT: gl.constexpr = s.type.layout
    j = key + gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    p = row + offset + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    visible = j < s_k
    if CAUSAL:
        visible = visible & (j <= p)
    if LEFT:
        visible = visible & (j >= p - left)
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _leave(buffer, dq):
    """Puts a tile of dQ into shared memory: each thread's numbers lie together, by fours (`kernels.gradient_sums` puts
    them in order), so that no two threads meet in a bank."""
    M: gl.constexpr = dq.shape[0]
    D: gl.constexpr = dq.shape[1]
    # A warp has 16 rows, in two halves of eight; of eight columns four threads have two each.
    by_thread = dq.reshape([M // 16, 2, 8, D // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    FOURS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    viewed(buffer, gl.float32, [M * D // 4, 4], FOURS).store(by_thread.reshape([M * D // 4, 4]))


@gluon.jit
def _steps(
    first, last, low, high, step, line, dk, dv, place, rings, barriers, dquery, seen, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, ROTATE: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, Q_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Query blocks `first` to `last` of a head that sees blocks `low` to `high`."""
    q_ring, d_ring, number_ring, k_buffer, v_buffer, ds_buffer, dq_ring = rings
    q_full, d_full, _, _ = barriers
    tile, tiles, lines = place
    s_k, offset, left = seen
    DTYPE: gl.constexpr = q_ring.dtype
    BLOCK_M: gl.constexpr = q_ring.shape[3]
    BLOCK_N: gl.constexpr = k_buffer.shape[3]
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = dquery.block_shape[0]
    key = tile * BLOCK_N
    for i in range(last - first):
        if ROTATE:
            block = _turned(i, low, high, tile, tiles, ROTATE)
        else:
            block = first + i
        stage = step % STAGES
        phase = step // STAGES & 1
        mbarrier.wait(q_full.index(stage), phase)
        empty = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, S_LAYOUT)
        query = flat(q_ring.index(stage))
        s = hopper.warpgroup_mma(flat(k_buffer.index(0)), query.permute((1, 0)), empty, use_acc=False, is_async=True)
        mbarrier.wait(d_full.index(stage), phase)
        dout = flat(d_ring.index(stage))
        dp = hopper.warpgroup_mma(flat(v_buffer.index(0)), dout.permute((1, 0)), empty, use_acc=False, is_async=True)
        numbers = viewed(number_ring.index(stage), gl.float32, [2 * BLOCK_M], LINE)
        top = numbers.slice(0, BLOCK_M, 0).load(ROW)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        if MASKED:
            s = _seen(s, key, block * BLOCK_M, s_k, offset, left, CAUSAL, LEFT)
        weights = gl.exp2(s * scale - top[None, :])
        p = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2), assert_trivial=True)
        dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
        delta = numbers.slice(BLOCK_M, BLOCK_M, 0).load(ROW)
        change = (weights * (dp - delta[None, :])).to(DTYPE)
        dv = hopper.warpgroup_mma(p, dout, dv, is_async=True)
        ds_buffer.store(change)
        # Of this step's gradient of scores, and of the dQ that the step before left.
        fence_async_shared()
        barrier()
        if step > 0:
            add_to(dquery, [line, 0], dq_ring.index((step - 1) % 2))
        nothing = gl.full([BLOCK_M, k_buffer.shape[4]], 0.0, gl.float32, Q_LAYOUT)
        dq = hopper.warpgroup_mma(
            ds_buffer.permute((1, 0)), flat(k_buffer.index(0)), nothing, use_acc=False, is_async=True
        )
        ds = gl.convert_layout(change, gl.DotOperandLayout(0, dk.type.layout, 2), assert_trivial=True)
        dk = hopper.warpgroup_mma(ds, query, dk, is_async=True)
        dv, dq, p = hopper.warpgroup_mma_wait(1, deps=(dv, dq, p))
        # What was added up two steps ago has left its place, which one thread knows; and nobody reads the gradient of
        # scores any more.
        tma.store_wait(1)
        barrier()
        _leave(dq_ring.index(step % 2), dq)
        line = (lines + block) * LINES
        dk, ds = hopper.warpgroup_mma_wait(0, deps=(dk, ds))
        _given_back(stage, False)
        step += 1
    return step, line, dk, dv


@gluon.jit
def _put(base, strides, batch, head, key, found, s_k, width):
    """Stores rows of a gradient: keys below s_k, columns below `width`."""
    LAYOUT: gl.constexpr = found.type.layout
    by_batch, by_row, by_head = strides
    j = key + gl.arange(0, found.shape[0], gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, found.shape[1], gl.SliceLayout(0, LAYOUT))
    line = base + batch.to(gl.int64) * by_batch + head.to(gl.int64) * by_head
    at = line + (j.to(gl.int64) * by_row)[:, None] + c[None, :]
    gl.store(at, found.to(base.dtype.element_ty), (j < s_k)[:, None] & (c < width)[None, :])


@gluon.jit
def _consume(
    given, CAUSAL: gl.constexpr, LEFT: gl.constexpr, ROTATE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The two warpgroups: 64 keys of the tile are each one's."""
    (
        rings, barriers, dquery, dkey, dvalue, tiles, pairs, together, heads, each, sums, blocks, s_q, s_k, offset,
        left, scale, factor, width, v_width, dk_strides, dv_strides,
    ) = given  # fmt: skip
    k_buffer, v_buffer, k_full, v_full = rings[3], rings[4], barriers[2], barriers[3]
    D: gl.constexpr = k_buffer.shape[4]
    E: gl.constexpr = v_buffer.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    # Of 64 rows each warpgroup makes half of the columns.
    WARPS_M: gl.constexpr = BLOCK_M // 16
    WARPS_N: gl.constexpr = 8 // WARPS_M
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS_M, WARPS_N], [16, D // WARPS_N, 16])
    tile, pair = _decode(tiles, pairs, together)
    batch = pair // sums
    key = tile * BLOCK_N
    low, high, inner_low, inner_high = _span(key, s_q, s_k, offset, left, CAUSAL, LEFT, BLOCK_M, BLOCK_N)
    dk = gl.full([BLOCK_N, D], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16]))
    dv = gl.full([BLOCK_N, E], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [8, 1], [16, E, 16]))
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(v_full.index(0), 0)
    step = 0
    line = 0
    seen = (s_k, offset, left)
    for g in range(each):
        place = (tile, tiles, (batch * heads + pair % sums * each + g) * blocks)
        step, line, dk, dv = _steps(
            low, inner_low, low, high, step, line, dk, dv, place, rings, barriers, dquery, seen, scale,
            True, CAUSAL, LEFT, ROTATE, STAGES, S_LAYOUT, Q_LAYOUT,
        )  # fmt: skip
        step, line, dk, dv = _steps(
            inner_low, inner_high, low, high, step, line, dk, dv, place, rings, barriers, dquery, seen, scale,
            False, CAUSAL, LEFT, ROTATE, STAGES, S_LAYOUT, Q_LAYOUT,
        )  # fmt: skip
        if LEFT:
            step, line, dk, dv = _steps(
                inner_high, high, low, high, step, line, dk, dv, place, rings, barriers, dquery, seen, scale,
                True, CAUSAL, LEFT, ROTATE, STAGES, S_LAYOUT, Q_LAYOUT,
            )  # fmt: skip
    # The dQ of the last step.
    fence_async_shared()
    barrier()
    if step > 0:
        add_to(dquery, [line, 0], rings[6].index((step - 1) % 2))
    _put(dkey, dk_strides, batch, pair % sums, key, dk * factor, s_k, width)
    _put(dvalue, dv_strides, batch, pair % sums, key, dv, s_k, v_width)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tiles", "pairs", "together", "heads", "heads_k", "each", "sums", "blocks", "s_q", "s_k", "offset", "left",
    ]
)  # fmt: skip
def differentiate(
    q, k, v, dout, numbers, dquery, dkey, dvalue,
    tiles, pairs, together, heads, heads_k, each, sums, blocks, s_q, s_k, offset, left, scale, factor, width, v_width,
    dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    CAUSAL: gl.constexpr, LEFT: gl.constexpr, ROTATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program for each tile of keys of each sum of heads. Descriptors are views [B, H, S, D] with boxes of
    [1, 1, rows, columns], and `numbers` [blocks of rows, 2 x rows]: LSE in base 2 and delta of each.

    dquery: float32, see `_leave`. sums: how many sums over `each` query heads a sequence has.
    """
    BLOCK_M: gl.constexpr = q.block_shape[2]
    BLOCK_N: gl.constexpr = k.block_shape[2]
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rings = (
        buffers(q, STAGES), buffers(dout, STAGES), buffers(numbers, STAGES), buffers(k, 1), buffers(v, 1),
        gl.allocate_shared_memory(q.dtype, [BLOCK_N, BLOCK_M], DS), buffers(dquery, 2),
    )  # fmt: skip
    barriers = (
        made_barriers(STAGES, 1), made_barriers(STAGES, 1), made_barriers(1, 1), made_barriers(1, 1),
    )  # fmt: skip
    produced = (
        q, k, v, dout, numbers, rings, barriers, tiles, pairs, together, heads, heads_k, each, sums, blocks,
        s_q, s_k, offset, left,
    )  # fmt: skip
    consumed = (
        rings, barriers, dquery, dkey, dvalue, tiles, pairs, together, heads, each, sums, blocks, s_q, s_k, offset,
        left, scale, factor, width, v_width, (dk_batch, dk_row, dk_head), (dv_batch, dv_row, dv_head),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (consumed, CAUSAL, LEFT, ROTATE, BLOCK_M, BLOCK_N, STAGES)),
            (_produce, (produced, CAUSAL, LEFT, ROTATE, BLOCK_M, BLOCK_N, STAGES)),
        ],
        [1],
        [24],
    )
