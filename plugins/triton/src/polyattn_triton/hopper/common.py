"""What the Hopper kernels share: buffers and barriers, how programs share tiles, and one step of the softmax."""

from __future__ import annotations

from polyattn_triton import runtime  # noqa: F401  first: it decides how Triton is imported

from triton.experimental import gluon  # isort: skip
from triton._C.libtriton import ir  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language._core import builtin  # isort: skip
from triton.experimental.gluon.language.nvidia import hopper  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma  # isort: skip

__all__ = [
    "LN2",
    "add_to",
    "added",
    "barrier",
    "buffers",
    "flat",
    "load",
    "load_rows",
    "made_barriers",
    "meet",
    "natural_lse",
    "normalised",
    "operand",
    "scaled",
    "settled",
    "softmax",
    "split",
    "store",
    "sums",
    "tile_of",
    "tiles_here",
    "viewed",
]

# Triton renamed these, or made them public, after 3.6.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
viewed = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@builtin
def _reduce(descriptor, coordinates, buffer, _semantic=None):
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, buffer.handle)


# What a box in shared memory has is added to what global memory has. Gluon of 3.6 and 3.7 can say so, and has no name
# for it.
add_to = getattr(tma, "async_atomic_add", None) or _reduce

LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _place(turn):
    """Which tile of round `turn` is this program's: there and back again, so that no program gets all the long ones."""
    pid = gl.program_id(0)
    return gl.where(turn % 2 == 0, pid, gl.num_programs(0) - 1 - pid)


@gluon.jit
def tile_of(turn):
    """Number of the tile that this program computes in round `turn`."""
    return turn * gl.num_programs(0) + _place(turn)


@gluon.jit
def tiles_here(count):
    """How many of `count` tiles this program computes."""
    programs = gl.num_programs(0)
    rounds = count // programs
    return rounds + (_place(rounds) < count - rounds * programs).to(gl.int32)


@gluon.jit
def flat(buffer):
    """A buffer of a box [1, 1, rows, columns] as a matrix."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def buffers(descriptor, COUNT: gl.constexpr):
    shape: gl.constexpr = [COUNT] + descriptor.block_shape  # noqa: RUF005  Triton has no starred lists
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def made_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def meet(number, THREADS: gl.constexpr, WAIT: gl.constexpr):
    """Named barrier `number` of so many threads: wait for the others there, or tell them and go on. Triton itself uses
    the numbers below 8."""
    if WAIT:
        gl.inline_asm_elementwise(
            "bar.sync $1, $2; mov.b32 $0, $1;", "=r,r,r", [number, THREADS], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.arrive $1, $2; mov.b32 $0, $1;", "=r,r,r", [number, THREADS], dtype=gl.int32, is_pure=False, pack=1
        )


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
    """Waits for `add`. The weights are given too: they are made before the wait, not after it."""
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
def natural_lse(top, total):
    """LSE of rows with maximum `top` and sum `total`, in base 2: natural, -inf without keys."""
    return gl.where(total != 0, (top + gl.log2(total)) * LN2, float("-inf"))


@gluon.jit
def normalised(o, top, total, sink):
    """The output of rows with maximum `top` and sum `total`, in base 2; `sink`: a logit of each, or of all, or None."""
    if sink is not None:
        sink = sink.to(gl.float32) * _LOG2E
        base = gl.maximum(top, sink)
        base = gl.where(base == float("-inf"), 0.0, base)
        factor = gl.exp2(top - base)
        o = scaled(o, factor)
        total = total * factor + gl.exp2(sink - base)
    # The sum of a row without keys is 0, and so is its output.
    return scaled(o, 1.0 / gl.where(total > 0, total, 1.0))
