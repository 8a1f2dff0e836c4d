"""Which keys a query sees, its logits, and the running softmax: what every kernel has in common.

A query stands at position p = row + offset on the keys' axis (offset S_k - S_q, or 0 for top-left). By position alone
it sees one run of keys [first_key(p), end_key(p)); both ends grow with p. Causal is a right bound of 0, and so is
chunked-local attention, so three numbers say it all (docs/semantics.md, S3 and S4); a mask can only take keys away.

Logits are kept in base 2, scaled by log2(e), because exp2 is what the hardware has.
"""

from __future__ import annotations

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

__all__ = [
    "INTERPRETED",
    "LN2",
    "LOG2E",
    "accumulate",
    "bounds",
    "dot",
    "end_key",
    "first_key",
    "joined",
    "logits",
    "natural_lse",
    "scales",
    "seen",
    "share",
    "share_with_sink",
]

INTERPRETED = runtime.INTERPRETED
_INTERPRETED = tl.constexpr(INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, acc=None):
    """a [M, K] b [K, N] + acc in float32; float32 operands keep their digits. Triton's interpreter takes bfloat16 for
    integers here."""
    if _INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def first_key(p, left, chunk, LEFT: tl.constexpr, CHUNK: tl.constexpr):
    """First key that a query at p may see."""
    first = p * 0
    if LEFT:
        first = tl.maximum(first, p - left)
    if CHUNK:
        # Rounded towards zero: a query before all keys sees none of them anyway, by `end_key`.
        first = tl.maximum(first, p // chunk * chunk)
    return first


@triton.jit
def end_key(p, s_k, right, RIGHT: tl.constexpr):
    """One past the last key that a query at p may see."""
    end = p * 0 + s_k
    if RIGHT:
        end = tl.minimum(end, p + right + 1)
    return end


@triton.jit
def seen(p, j, s_k, left, right, chunk, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """Whether queries at p [M, 1] see keys j [1, N]."""
    found = j < end_key(p, s_k, right, RIGHT)
    if LEFT or CHUNK:
        found = found & (j >= first_key(p, left, chunk, LEFT, CHUNK))
    return found


@triton.jit
def _tanh(x, dtype: tl.constexpr):
    """tanh by exp2, which saturates to +-1 instead of overflowing. That loses the digits of a small x, down to an error
    of 2^-24: nothing to numbers of a dtype of 16 bits, but not to float32."""
    grown = tl.exp2(tl.minimum(x * (2 * LOG2E), 126.0))
    far = 1 - 2 / (grown + 1)
    if dtype == tl.float32:
        # The polynomial of Cephes' tanhf (S. L. Moshier, netlib.org/cephes).
        y = x * x
        near = (((-5.70498872745e-3 * y + 2.06390887954e-2) * y - 5.37397155531e-2) * y + 1.33314422036e-1) * y
        near = (near - 3.33332819422e-1) * y * x + x
        return tl.where(y < 0.625 * 0.625, near, far)
    else:
        return far


@triton.jit
def logits(products, scale, softcap, SOFTCAP: tl.constexpr, dtype: tl.constexpr = tl.float32):
    """Base-2 logits of query-key products. `scale` is scale * log2(e), with a softcap scale / softcap; see `scales`.
    dtype: of what was multiplied; 16 bits allow a cheaper softcap."""
    if SOFTCAP:
        return _tanh(products * scale, dtype) * (softcap * LOG2E)
    else:
        return products * scale


@triton.jit
def accumulate(top, total, found, scale=1.0):
    """One step of the running softmax over logits `found` * scale [M, N], -inf where unseen. A scale above 0 that is
    left to this step costs nothing: it becomes part of one multiply-add.

    Returns:
        weights [M, N], the factor for what was accumulated so far [M], the new running maximum and sum [M]. Rows that
        have seen no key keep a maximum of -inf, weights of 0 and a factor of 1.
    """
    highest = tl.maximum(top, tl.max(found, 1) * scale)
    # A row without keys subtracts 0: -inf - -inf would be NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(found * scale - base[:, None])
    factor = tl.exp2(tl.where(top == float("-inf"), base, top) - base)
    return weights, factor, highest, total * factor + tl.sum(weights, 1)


@triton.jit
def joined(acc, top, total, partial, weight):
    """(acc [M, E], top [M], total [M]) of a running merge with one more partial result [M, E]. `weight`: its LSE [M] in
    base 2, -inf of rows without keys."""
    highest = tl.maximum(top, weight)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(weight - base)
    factor = tl.exp2(tl.where(top == float("-inf"), base, top) - base)
    return acc * factor[:, None] + partial * weight[:, None], highest, total * factor + weight


@triton.jit
def natural_lse(top, total):
    """LSE of rows with a running maximum and sum, natural logarithm; -inf without keys (S6, S7). Of NaN it is NaN: the
    numbers of a row of -inf are not read by who merges it."""
    some = total != 0
    return tl.where(some, (tl.where(some, top, 0.0) + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))


@triton.jit
def share(total):
    """What an accumulated row is multiplied by to become the output. One without keys holds zeros and stays so (S7)."""
    return 1.0 / tl.where(total > 0, total, 1.0)


@triton.jit
def share_with_sink(top, total, sink):
    """`share` where a sink, a natural logit, takes part in the denominator (S5)."""
    base = tl.where(total > 0, top, 0.0)
    sink = sink * LOG2E
    high = tl.maximum(base, sink)
    kept = tl.exp2(base - high)
    count = total * kept + tl.exp2(sink - high)
    return kept / tl.where(count > 0, count, 1.0)


def scales(scale: float, softcap: float) -> tuple[float, float]:
    """What `logits` takes for a scale and a softcap (0 = off)."""
    return (scale / softcap, softcap) if softcap else (scale * LOG2E.value, 0.0)


def bounds(causal: bool, window: tuple[int, int], chunk: int) -> tuple[int, int]:
    """The window with what causal and chunk say: a right bound of 0."""
    right = [bound for bound in (0 if causal or chunk else -1, window[1]) if bound >= 0]
    return window[0], min(right, default=-1)
