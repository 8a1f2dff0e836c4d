"""The Hopper prefill kernel: one producer warp feeds tiles by TMA to consumer warpgroups that run async wgmma.

The design is FlashAttention-3's (Shah et al., 2024): K and V go through a ring of shared-memory stages guarded by
mbarriers; every consumer warpgroup owns 64 query rows; in a step, Q K^T of the next block and P V of this one are in
flight while the softmax runs; named barriers make the warpgroups take turns, so that one computes its softmax while
the other one's products occupy the tensor cores. P never leaves registers.

A head dim that is no power of two is split in two chunks (96 = 64 + 32, 192 = 128 + 64; 72 = 64 + 16, zero-filled by
TMA), each with its own descriptor and buffers: `q`, `k`, `v`, `o` below are tuples of one or two.
"""

from __future__ import annotations

from polyattn_triton.hopper.common import (
    barrier,
    buffers,
    flat,
    made_barriers,
    natural_lse,
    normalised,
    store,
    tile_of,
    tiles_here,
)
from polyattn_triton.hopper.loop import drained, fetch, first_turn, key_blocks, own_blocks, passed, walked

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma  # isort: skip

__all__ = ["attend", "leave"]


@gluon.jit
def _decode(turn, blocks, heads_q, all_heads, section):
    """Query block, head and batch of this program's tile: long rows first, `section` heads at a time (L2)."""
    tile = tile_of(turn)
    first = tile // (section * blocks) * section
    rest = tile - first * blocks
    width = gl.minimum(section, all_heads - first)
    block = blocks - 1 - rest // width
    head = first + rest % width
    return block, head % heads_q, head // heads_q


@gluon.jit
def _span(
    block, s_k, offset, left, CAUSAL: gl.constexpr, LEFT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """`key_blocks` of query block `block`."""
    first = block * BLOCK_M + offset
    return key_blocks(first, first + BLOCK_M - 1, s_k, s_k, left, CAUSAL, LEFT, BLOCK_N)


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
    for turn in range(tiles_here(blocks * all_heads)):
        block, head, batch = _decode(turn, blocks, heads_q, all_heads, section)
        low, high, _, _ = _span(block, s_k, offset, left, CAUSAL, LEFT, BLOCK_M, BLOCK_N)
        for index in gl.static_range(WARPGROUPS):
            mbarrier.wait(q_free.index(index), turn & 1 ^ 1)
            fetch(q, q_ring, batch, head, block * BLOCK_M + index * ROWS, q_full, index, True)
        for i in range(high - low):
            stage = step % STAGES
            phase = step // STAGES & 1 ^ 1
            key = (high - 1 - i) * BLOCK_N
            mbarrier.wait(k_free.index(stage), phase)
            fetch(k, k_ring, batch, head // group, key, k_full, stage, True)
            mbarrier.wait(v_free.index(stage), phase)
            fetch(v, v_ring, batch, head // group, key, v_full, stage, True)
            step += 1


@gluon.jit
def leave(o, ring, descriptors, batch, head, row, INDEX: gl.constexpr, LATER: gl.constexpr):
    """Starts the copy of the output to memory, from buffers of its own (LATER: until the next copy) or those of Q.

    TMA leaves out rows and columns beyond the end.
    """
    if LATER:
        tma.store_wait(0)
        barrier()
    for c in gl.static_range(len(o)):
        flat(ring[c].index(INDEX)).store(o[c].to(ring[c].dtype))
    fence_async_shared()
    barrier()
    for c in gl.static_range(len(o)):
        store(descriptors[c], [batch, head, row, c * ring[0].shape[4]], ring[c].index(INDEX))


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
    q_full, q_free, k_full, _, v_full, _ = barriers
    inputs = (q_ring, k_ring, v_ring)
    ROWS: gl.constexpr = q_ring[0].shape[3]
    BLOCK_M: gl.constexpr = WARPGROUPS * ROWS
    BLOCK_N: gl.constexpr = k_ring[0].shape[3]
    # A tile of three has blocks that one or two of them do not see. With two, and blocks of as many keys as they have
    # rows, both see all.
    SKIPS: gl.constexpr = WARPGROUPS == 3 and not OVERLAP
    step = 0
    if TURNS:
        first_turn(INDEX, WARPGROUPS)
    for turn in range(tiles_here(blocks * all_heads)):
        block, head, batch = _decode(turn, blocks, heads_q, all_heads, section)
        span = _span(block, s_k, offset, left, CAUSAL, LEFT, BLOCK_M, BLOCK_N)
        row = block * BLOCK_M + INDEX * ROWS
        if len(sources) == 0:
            feed = ()
        else:
            low, high = span[0], span[1]
            q, k, v, group = sources
            feed = (k, v, batch, head // group, low * BLOCK_N)
            fetch(q, q_ring, batch, head, row, q_full, 0, True)
            for ahead in gl.static_range(STAGES):
                stage = (step + ahead) % STAGES
                key = (high - 1 - ahead) * BLOCK_N
                fetch(k, k_ring, batch, head // group, key, k_full, stage, high - ahead > low)
                fetch(v, v_ring, batch, head // group, key, v_full, stage, high - ahead > low)
        mbarrier.wait(q_full.index(INDEX), turn & 1)
        tiles_low = span[0]
        if SKIPS:
            tiles_high = span[1]
            span = own_blocks(span, row, s_q, s_k, offset, left, CAUSAL, LEFT, ROWS, BLOCK_N)
            step = passed(tiles_high - span[1], step, barriers, INDEX, WARPGROUPS, STAGES, TURNS)
        state = walked(
            span, step, row, inputs, barriers, feed, (s_k, offset, left, ()), scale, CAUSAL, LEFT, 1,
            INDEX, WARPGROUPS, STAGES, OVERLAP, TURNS,
        )  # fmt: skip
        step = state[0]
        if SKIPS and LEFT:
            step = passed(span[0] - tiles_low, step, barriers, INDEX, WARPGROUPS, STAGES, TURNS)
        if len(o_ring) != 0 and len(sources) == 0:
            # No products with Q any more: the next one may come.
            mbarrier.arrive(q_free.index(INDEX), count=1)
        o, top, total = drained(state, inputs, barriers, feed, scale, STAGES, OVERLAP)
        if lse is not None:
            i = row + gl.arange(0, ROWS, top.type.layout)
            line = lse + batch.to(gl.int64) * lse_b + head * lse_h + i.to(gl.int64) * lse_s
            gl.store(line, natural_lse(top, total), i < s_q)
        o = normalised(o, top, total, None if sinks is None else gl.load(sinks + head))
        leave(o, q_ring if len(o_ring) == 0 else o_ring, descriptors, batch, head, row, INDEX, len(o_ring) != 0)
        if len(o_ring) == 0:
            tma.store_wait(0)
            if len(sources) == 0:
                mbarrier.arrive(q_free.index(INDEX), count=1)
            else:
                barrier()
    tma.store_wait(0)


@gluon.jit
def _ring(descriptors, COUNT: gl.constexpr):
    first = buffers(descriptors[0], COUNT)
    if len(descriptors) == 2:
        rings = (first, buffers(descriptors[1], COUNT))
    else:
        rings = (first,)
    return rings


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
