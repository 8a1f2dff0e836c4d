"""The numbers that decide whether a result is right. The same everywhere: on a laptop, in CI, on any chip.

Two gates, and a result must pass both:

- FlashAttention's rule: the largest error against the float64 reference is at most twice (with softcap, and for
  gradients: three times) the largest error of plain torch math in the same dtype, plus one rounding of the largest
  value;
- relative L2 error below 8e-3 (bfloat16), 1e-3 (float16), 1e-5 (float32), 1e-12 (float64, where the first gate has
  nothing to compare: plain torch math in float64 *is* the reference).

The first adapts to the problem, the second does not: it is what rejects a lost block or a scale that is 2 % off however
long the sequences are. An absolute tolerance would not: outputs shrink as keys grow (docs/conformance.md has numbers).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from ..contract import Accuracy

__all__ = ["RELATIVE_L2", "Finding", "Kind", "Measure", "check", "compare", "compare_class", "measure"]

RELATIVE_L2 = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-12}
"""Bound on the relative L2 error of a result of each dtype."""

_SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149, torch.float64: 0.0}
"""The smallest number above zero of each dtype: nothing finer can be asked of it."""

Kind = Literal["out", "lse", "grad"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something wrong: which check, in one sentence, and by how much where that is a number."""

    check: str
    message: str
    measured: float | None = None
    allowed: float | None = None

    @property
    def excess(self) -> float:
        """Times the allowance that was used; infinite where that is no number."""
        return self.measured / self.allowed if self.measured is not None and self.allowed else float("inf")

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Measure:
    """Both gates of one result.

    Attributes:
        worst: largest absolute error; worst_allowed: what FlashAttention's rule allows (inf in float64).
        relative: relative L2 error; relative_allowed: its bound.
    """

    worst: float
    worst_allowed: float
    relative: float
    relative_allowed: float

    @property
    def margin(self) -> float:
        """How much of the allowance was used by the gate that came closer; above 1 is a failure."""
        return max(_ratio(self.worst, self.worst_allowed), _ratio(self.relative, self.relative_allowed))


def _factor(softcap: bool, kind: Kind) -> int:
    """Times the error of plain torch. A gradient goes through two passes, rounded independently of plain torch's."""
    return 3 if softcap or kind == "grad" else 2


def _ratio(value: float, allowed: float) -> float:
    return 0.0 if value == 0 else value / allowed if allowed else float("inf")


def measure(
    actual: Tensor,
    reference: Tensor,
    plain: Tensor,
    dtype: torch.dtype,
    softcap: bool = False,
    kind: Kind = "out",
    floor: Tensor | float = 0.0,
) -> Measure:
    """Measure a result against both gates. Infinities must have been compared before; see `check`.

    Args:
        actual: the result, any shape. reference: the same in float64. plain: by plain torch math in `dtype`.
        dtype: what the backend computed in: that of the query.
        softcap: whether one was used.
        kind: `out`; `lse`, see below; or `grad`: plain torch in half precision can itself miss the bound where the
            terms of a gradient cancel, so there the bound is three times plain torch's own relative error if that is
            more.
        floor: error that is forgiven element by element: what rounding in float32 leaves of larger terms.

    An LSE has no natural scale: a constant added to all logits is added to it. An error of e in an LSE changes the
    weight of a partial by exp(e) - 1, which is e: the *absolute* error of an LSE is the relative error it causes. So
    its second gate is the root mean square of its absolute error, with the same bounds.
    """
    good = actual.detach().double()
    error = ((good - reference).abs() - floor - _SMALLEST[dtype]).clamp(min=0.0)
    plain_error = (plain.detach().double() - reference).abs()
    if not error.numel():
        return Measure(0.0, 0.0, 0.0, RELATIVE_L2[dtype])
    # An LSE is float32 and ends a chain: product, scale, cap, sum, logarithm.
    rounding = 4 * torch.finfo(torch.float32).eps if kind == "lse" else torch.finfo(dtype).eps
    allowed = _factor(softcap, kind) * float(plain_error.max()) + rounding * float(reference.abs().max())
    bound = RELATIVE_L2[dtype]
    if kind == "lse":
        relative = float(error.square().mean().sqrt())
    else:
        size = float(reference.norm())
        relative = _ratio(float(error.norm()), size)
        if kind == "grad":
            bound = max(bound, 3 * _ratio(float(plain_error.norm()), size))
    if dtype == torch.float64:
        allowed = float("inf")
    return Measure(float(error.max()), allowed, relative, bound)


def check(
    actual: Tensor,
    reference: Tensor,
    plain: Tensor,
    dtype: torch.dtype,
    softcap: bool = False,
    kind: Kind = "out",
    floor: Tensor | float = 0.0,
) -> Finding | None:
    """Compare with both gates. Returns None if `actual` passes them, else what is wrong with it. Arguments as
    `measure`.

    Infinities (the LSE of an empty row) must be where the reference has them; anything else not finite is a finding.
    """
    return compare(kind, actual, reference, plain, dtype, softcap, kind, floor)[0]


def compare(
    name: str,
    actual: Tensor,
    reference: Tensor,
    plain: Tensor,
    dtype: torch.dtype,
    softcap: bool = False,
    kind: Kind = "out",
    floor: Tensor | float = 0.0,
) -> tuple[Finding | None, float]:
    """`check` for a result called `name`, and the margin it left (`Measure.margin`)."""
    if actual.shape != reference.shape:
        return Finding(name, f"shape {tuple(actual.shape)}, {tuple(reference.shape)} is expected"), float("inf")
    infinite = reference.isinf()
    some = bool(infinite.any())
    if some:
        wrong = actual.detach().double()[infinite] != reference[infinite]
        if bool(wrong.any()):
            message = f"{int(wrong.sum())} of {int(infinite.sum())} rows that see no key do not have {name} = -inf"
            return Finding(name, message), float("inf")
    bad = ~actual.detach().isfinite() & ~infinite
    if bool(bad.any()):
        return Finding(name, f"{int(bad.sum())} of {bad.numel()} values are not finite"), float("inf")
    if some:
        # Only where there is something to leave out: taking elements one by one costs more than all the rest.
        seen = ~infinite
        actual, reference, plain = actual[seen], reference[seen], plain[seen]
        floor = floor[seen] if isinstance(floor, Tensor) else floor
    found = measure(actual, reference, plain, dtype, softcap, kind, floor)
    short = str(dtype).removeprefix("torch.")
    if found.worst > found.worst_allowed:
        rule = f"{_factor(softcap, kind)} x plain {short} torch + one rounding"
        message = f"largest error {found.worst:.3g}, FlashAttention's rule allows {found.worst_allowed:.3g} ({rule})"
        return Finding(name, message, found.worst, found.worst_allowed), found.margin
    if found.relative > found.relative_allowed:
        what = "root mean square error" if kind == "lse" else "relative L2 error"
        message = f"{what} {found.relative:.3g}, {found.relative_allowed:.3g} is allowed in {short}"
        return Finding(name, message, found.relative, found.relative_allowed), found.margin
    return None, found.margin


def compare_class(
    name: str, actual: Tensor, reference: Tensor, dtype: torch.dtype, accuracy: Accuracy, kind: Kind = "out"
) -> tuple[Finding | None, float]:
    """Compare as `compare` does, for a kernel that quantises Q, K or P: it is held to its class."""
    if actual.shape != reference.shape:
        return Finding(name, f"shape {tuple(actual.shape)}, {tuple(reference.shape)} is expected"), float("inf")
    infinite = reference.isinf()
    found, right = actual.detach().double(), reference
    if not torch.equal(found[infinite], right[infinite]) or not bool(found[~infinite].isfinite().all()):
        return Finding(name, "not finite, or not -inf in the rows that see no key"), float("inf")
    found, right = found[~infinite], right[~infinite]
    difference = ((found - right).abs() - _SMALLEST[dtype]).clamp(min=0.0)
    if kind == "lse":
        error = float(difference.square().mean().sqrt()) if difference.numel() else 0.0
    else:
        error = _ratio(float(difference.norm()), float(right.norm()))
    cosine = float(found @ right / (found.norm() * right.norm())) if error and kind != "lse" else 1.0
    if error <= accuracy.error and cosine >= accuracy.cosine:
        return None, error / accuracy.error
    message = (
        f"relative L2 error {error:.3g} and cosine {cosine:.6f}; its class is at most {accuracy.error} and at least "
        f"{accuracy.cosine}"
    )
    return Finding(name, message, error, accuracy.error), error / accuracy.error
